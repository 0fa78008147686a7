"""Configuration: what wins over what, and every fault named at once, in words that mend it."""

from pathlib import Path

import pytest

from skyrl_maze import _compat, recipes
from skyrl_maze.errors import ConfigError
from skyrl_maze.faults import RolloutConfig

_compat.install()

from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.maze_task import MazeTrainConfig  # noqa: E402
from skyrl_maze.settings import TrainConfig, needed_gpus, policy_ranks  # noqa: E402

CPU = "+recipe=maze_cpu"


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe on top of maze_cpu and gives the argument that chooses it."""

    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(f"extends: maze_cpu\n{text}")
        return f"+recipe={path}"

    return write


def refusal(*argv):
    with pytest.raises(ConfigError) as caught:
        build_config(list(argv))
    return str(caught.value)


def only_problem(*argv):
    """The one problem of a refusal that lists one."""
    title, *problems = refusal(*argv).split("\n  - ")
    assert title.startswith("1 ")
    (problem,) = problems
    return problem


# --- what wins


def test_defaults_lie_below_the_recipe_and_the_recipe_below_the_command_line(recipe):
    default = TrainConfig()
    chosen = recipe("trainer: {seed: 7, epochs: 5}\ngenerator: {max_turns: 9}")
    cfg = build_config([chosen, "trainer.seed=8"])
    assert default.trainer.seed not in (7, 8)
    assert cfg.trainer.seed == 8  # command line
    assert cfg.trainer.epochs == 5  # recipe
    assert cfg.generator.max_turns == 9
    assert cfg.run.device == "cpu"  # the recipe below that
    assert cfg.trainer.update_epochs_per_batch == default.trainer.update_epochs_per_batch


def test_the_order_of_arguments_does_not_matter():
    assert build_config(["trainer.seed=8", CPU]).trainer.seed == 8


def test_values_arrive_with_their_types():
    cfg = build_config(
        [CPU, "environment.skyrl_gym.maze.cell_px=32", "trainer.policy.optimizer_config.lr=1e-5"]
    )
    assert type(cfg) is MazeTrainConfig
    assert cfg.environment.skyrl_gym.maze.cell_px == 32
    assert cfg.environment.skyrl_gym.maze.grammar == "keyword"
    assert cfg.trainer.policy.optimizer_config.lr == 1e-5


def test_a_table_is_merged_and_a_list_replaced():
    cfg = build_config(
        [CPU, "generator.inference_engine.engine_init_kwargs={seed: 3}", "data.mazes.train.sizes=[7, 9]"]
    )
    assert cfg.generator.inference_engine.engine_init_kwargs["seed"] == 3
    assert "limit_mm_per_prompt" in cfg.generator.inference_engine.engine_init_kwargs
    assert cfg.data.mazes.train.sizes == [7, 9]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("a,b", "a,b"),
        ("a=b=c", "a=b=c"),
        ("a[1]{2}", "a[1]{2}"),
        ("'a b'", "a b"),
        ("'[x]'", "[x]"),
        ('"{y}"', "{y}"),
        ("'007'", "007"),
        ("'#1: a'", "#1: a"),
        ("ü", "ü"),
        ("x/${run.device}", "x/cpu"),
    ],
)
def test_quotes_commas_and_brackets_in_values(written, read):
    assert build_config([CPU, f"trainer.run_name={written}"]).trainer.run_name == read


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a b", "-x"])
def test_the_id_of_a_run_is_one_folder_name(name):
    assert only_problem(CPU, f"run.id='{name}'").startswith(
        f"run.id={name!r} names a folder: letters, digits"
    )


@pytest.mark.parametrize("argument", ["+recipe=maze_cpu", "++recipe=maze_cpu", "recipe=maze_cpu"])
def test_forms_of_the_recipe_argument(argument):
    assert build_config([argument]).run.device == "cpu"


def test_a_run_without_recipe(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    argv = ["generator.vision_language_generator=true", "data.mazes.train.count=2048"]
    assert "WANDB_API_KEY" in only_problem(*argv)  # SkyRL's own default wants an account
    cfg = build_config([*argv, "trainer.logger=console"])
    assert cfg.data.mazes.eval.name == "visgym-easy-64"
    assert cfg.run.root == str(Path("runs/maze").absolute())


def test_the_argument_that_skyrl_found_this_entrypoint_by_is_dropped():
    assert (
        build_config([CPU, "trainer.override_entrypoint=skyrl_maze.entrypoints.main_base"]).run.id
        == "maze-cpu"
    )


def test_the_root_is_absolute_before_other_folders_follow_from_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    cfg = build_config([CPU, "run.root=a/${run.id}", "run.id=b"])
    assert cfg.run.root == str(tmp_path / "a" / "b")
    assert cfg.trainer.ckpt_path == str(tmp_path / "a" / "b" / "checkpoints")
    assert build_config([CPU, "run.root=~/x"]).trainer.log_path == "/home/someone/x/logs"


# --- arguments that cannot be read


@pytest.mark.parametrize(
    "argument", ["trainer.seed", "+recipe", "--help", "+a=1", "~a=1", "=1", "a..b=1", "a.=1", ""]
)
def test_an_argument_that_is_no_setting(argument):
    assert only_problem(CPU, argument) == f"{argument!r} is not a setting; write key=value, or +recipe=NAME"


def test_a_value_that_is_not_yaml():
    assert only_problem(CPU, "run.id=[") == (
        "'run.id=[' is not readable as YAML (while parsing a flow node); quote it: run.id=\"'...'\""
    )


def test_a_key_given_twice_is_not_decided_silently():
    assert only_problem(CPU, "trainer.seed=1", "trainer.seed=2") == (
        "trainer.seed is given twice, as '1' and as '2'; keep one"
    )
    assert only_problem(CPU, "recipe=maze") == "+recipe is given twice, as 'maze_cpu' and as 'maze'; keep one"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("run.id", "MAZE_RUN_ID"),
        ("run.root", "MAZE_SHARED"),
        ("trainer.seed", "MAZE_OVERRIDES"),
        ("trainer.epochs", None),
    ],
)
def test_a_key_that_the_job_gives_as_well_names_the_jobs_variable(key, name, monkeypatch):
    monkeypatch.setenv("MAZE_RUN_ID", "maze")
    monkeypatch.setenv("MAZE_OVERRIDES", "trainer.seed=1 trainer.logger=console")
    hint = f": train_job.sh takes it from {name}, so say that: env {name}=... train_job.sh" if name else ""
    assert (
        only_problem(CPU, f"{key}=1", f"{key}=2")
        == f"{key} is given twice, as '1' and as '2'; keep one{hint}"
    )


def test_an_empty_recipe_name():
    assert only_problem("+recipe=").startswith("'+recipe=' names no recipe; shipped: maze, ")


def test_all_unreadable_arguments_are_named_at_once():
    message = refusal(CPU, "a", "run.id={", "trainer.seed=1", "trainer.seed=1")
    assert message.startswith("3 argument(s) cannot be read:\n  - 'a' is not a setting")
    assert message.count("\n  - ") == 3


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("run.id=${nope}", "Interpolation key 'nope' not found"),
        ("run.id=${run.id}", "Recursive interpolation"),
        ("run.id=${oops", ""),
        ("trainer.seed=???", "Missing mandatory value"),
    ],
)
def test_an_interpolation_without_target(argument, reason):
    message = refusal(CPU, argument)
    assert reason in message
    assert "run.id" in message or "run.root" in message or "trainer.seed" in message


# --- settings that do not exist or have a wrong type


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("trainr.seed=1", "trainr: there is no such setting; did you mean 'trainer'?"),
        ("trainer.sed=1", "trainer.sed: there is no such setting; did you mean 'seed'?"),
        (
            "trainer.policy.model.lora.rnk=1",
            "trainer.policy.model.lora.rnk: there is no such setting; did you mean 'rank'?",
        ),
        (
            "environment.skyrl_gym.maze.them=visgym",
            "environment.skyrl_gym.maze.them: there is no such setting; did you mean 'theme'?",
        ),
        (
            "data.mazes.train.size=[9]",
            "data.mazes.train.size: there is no such setting; did you mean 'sizes'?",
        ),
        ("trainer.policy={modl: {}}", "trainer.policy.modl: there is no such setting; did you mean 'model'?"),
        ("run.qqqq=1", "run.qqqq: there is no such setting"),
        ("trainer.seed=abc", "trainer.seed='abc': input should be a valid integer"),
        ("trainer.seed=1.5", "trainer.seed=1.5: input should be a valid integer"),
        ("trainer.seed=", "trainer.seed=None: input should be a valid integer"),
        ("trainer.seed=null", "trainer.seed=None: input should be a valid integer"),
        ("trainer.seed=true", "trainer.seed=True: input should be a valid integer"),
        ("trainer.seed={a: 1}", "trainer.seed={'a': 1}: input should be a valid integer"),
        ("trainer.seed.x=1", "trainer.seed={'x': 1}: input should be a valid integer"),
        ("trainer.flash_attn=maybe", "trainer.flash_attn='maybe': input should be a valid boolean"),
        ("trainer.flash_attn=1", "trainer.flash_attn=1: input should be a valid boolean"),
        ("trainer.strategy=[fsdp]", "trainer.strategy=['fsdp']: input should be a valid string"),
        ("trainer.policy.optimizer_config.lr=fast", None),
        (
            "trainer.policy.model=null",
            "trainer.policy.model=None: input should be a dictionary or an instance of ",
        ),
        ("trainer=[1, 2]", "trainer=[1, 2]: input should be a dictionary or an instance of TrainerConfig"),
        ("trainer=3", "trainer=3: input should be a dictionary or an instance of TrainerConfig"),
        ("data.mazes.train.sizes=9", "data.mazes.train.sizes=9: input should be a valid list"),
        ("data.mazes.train.sizes=[a]", "data.mazes.train.sizes=['a']: input should be a valid integer"),
        ("data.mazes.train.sizes={9: 1}", "data.mazes.train.sizes={9: 1}: input should be a valid list"),
        ("generator.inference_engine.engine_init_kwargs=[]", None),
        (
            "trainer.project_name=12",
            "trainer.project_name=12: input should be a valid string; to keep it text, quote ",
        ),
    ],
)
def test_one_wrong_setting(argument, problem):
    found = only_problem(CPU, argument)
    assert found.startswith(problem or argument.split("=")[0])


@pytest.mark.parametrize("argument", ["environment.skyrl_gym.maze.cell_px=null", "data.mazes.eval.name=null"])
def test_null_is_fine_where_it_is_optional(argument):
    build_config([CPU, argument])


def test_text_that_yaml_reads_as_a_number_can_be_quoted_as_told():
    problem = only_problem(CPU, "trainer.project_name=12")
    told = problem.split("quote it: ")[1]
    assert told == "trainer.project_name=\"'12'\""
    assert build_config([CPU, told.replace('"', "")]).trainer.project_name == "12"


def test_all_wrong_settings_are_named_at_once(recipe):
    chosen = recipe("trainer: {sed: 1}\ngenerator: {max_turn: 3}\nrunn: 1")
    message = refusal(chosen, "trainer.flash_attn=maybe", "environment.skyrl_gym.maze.feedback=3")
    title, *problems = message.split("\n  - ")
    assert title == "5 setting(s) cannot be used:"
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "environment.skyrl_gym.maze.feedback=3",
        "generator.max_turn",
        "runn",
        "trainer.flash_attn='maybe'",
        "trainer.sed",
    ]


# --- settings that cannot work


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (
            "environment.skyrl_gym.maze.theme=tokns",
            "environment.skyrl_gym.maze: cannot draw a maze in theme 'tokns': choose 'tokens' or 'visgym'; "
            "did you mean 'tokens'?",
        ),
        (
            "environment.skyrl_gym.maze.grammar=tupel",
            "environment.skyrl_gym.maze: unknown grammar 'tupel'; choose one of tuple, keyword; "
            "did you mean 'tuple'?",
        ),
        (
            "environment.skyrl_gym.maze.goal_rule=arrive",
            "environment.skyrl_gym.maze: unknown goal_rule 'arrive'",
        ),
        (
            "environment.skyrl_gym.maze.shaping_weight=-1",
            "environment.skyrl_gym.maze: shaping_weight = -1: must be ",
        ),
        (
            "environment.skyrl_gym.maze.prompt_template=none.txt",
            "environment.skyrl_gym.maze: cannot use the prompt ",
        ),
        ("run.device=gpu", "run.device='gpu'; did you mean 'cpu'?; allowed: cuda, cpu"),
        ("run.console=quiet", "run.console='quiet'; allowed: full, progress"),
        ("run.start=habbit", "run.start='habbit'; did you mean 'habit'?; allowed: unfinished, habit"),
        ("generator.max_turns=0", "generator.max_turns=0: must be from 1 to 10000"),
        (
            "generator.vision_language_generator=false",
            "generator.vision_language_generator=false: episodes show pic",
        ),
        (
            "environment.env_class=gsm8k",
            "environment.env_class='gsm8k': run.task=skyrl_maze.maze_task:MazeTask plays 'maze'",
        ),
        (
            "trainer.placement.colocate_all=true",
            "trainer.placement.colocate_all=true needs an engine that can sleep",
        ),
        (
            "trainer.export_path=${run.root}/checkpoints",
            "trainer.ckpt_path and trainer.export_path are both ",
        ),
        (
            "trainer.policy.model.lora.exclude_modules=null",
            "trainer.policy.model.lora.exclude_modules=None: the engine",
        ),
        (
            "trainer.ckpt_path=s3://bucket/ckpts",
            "trainer.ckpt_path=s3://bucket/ckpts: must be a folder that all nodes see, not a cloud address",
        ),
        ("trainer.update_ref_every_epoch=true", "trainer.update_ref_every_epoch=true: SkyRL would make"),
        ("trainer.critic.model.path=some/critic", "trainer.critic.model.path=some/critic: a checkpoint of"),
        ("data.mazes.train.sizes=[8]", "data.mazes.train.sizes=[8]: cannot make a maze of size 8 (int)"),
        ("data.mazes.train.sizes=[]", "data.mazes.train.sizes=[]: give at least one size, and each once"),
        (
            "data.mazes.train.weights=[1, 2]",
            "data.mazes.train.weights=[1, 2]: give one finite number of 0 or more ",
        ),
        ("data.mazes.train.seed=-1", "data.mazes.train.seed: cannot draw a maze from seed -1"),
        (
            "data.mazes.train.count=3",
            "the training set has 3 row(s), which give no full batch of trainer.train_batch_size=",
        ),
        (
            "data.mazes.train.name=visgym-easy-64",
            "data.mazes.train.name='visgym-easy-64': shipped sets are for evaluation; set it to null and ",
        ),
        (
            "data.mazes.eval.name=visgym-easy",
            "data.mazes.eval.name='visgym-easy': no such maze set; did you mean 'visgym-easy-64'?; shipped: ",
        ),
        ("trainer.train_batch_size=0", "trainer.train_batch_size=0: must be at least 1"),
        (
            "trainer.train_batch_size=6",
            "trainer.train_batch_size=6 is not a multiple of trainer.policy_mini_batch_",
        ),
        (
            "trainer.policy.sequence_parallel_size=4",
            "trainer.policy.sequence_parallel_size=4 does not divide the 2 policy ranks",
        ),
        (
            "trainer.policy.sequence_parallel_size=0",
            "trainer.policy.sequence_parallel_size=0: must be at least 1",
        ),
    ],
)
def test_one_impossible_setting(argument, problem):
    assert only_problem(CPU, argument).startswith(problem)


def test_trajectories_that_cannot_be_dealt_evenly():
    message = refusal(CPU, "generator.n_samples_per_prompt=1", "trainer.placement.policy_num_gpus_per_node=3")
    assert (
        "trainer.train_batch_size=4 x 1 samples = 4 trajectories cannot be dealt evenly to 3 policy ranks"
        in message
    )
    assert "trainer.policy_mini_batch_size=4 x 1 samples = 4 trajectories cannot be dealt" in message


def test_all_impossible_settings_are_named_at_once():
    message = refusal(
        CPU,
        "run.device=tpu",
        "generator.max_turns=0",
        "environment.skyrl_gym.maze.theme=x",
        "environment.skyrl_gym.maze.grammar=y",
        "data.mazes.train.sizes=[4, 6]",
        "data.mazes.eval.braid=2",
        "trainer.policy_mini_batch_size=0",
    )
    title, *problems = message.split("\n  - ")
    assert title == "8 setting(s) cannot work:"
    assert len(problems) == 8


def test_what_skyrl_itself_refuses_is_one_error():
    message = refusal(CPU, "trainer.logprobs_chunk_size=null")
    assert message.startswith(
        "SkyRL refuses these settings: logprobs_chunk_size=None (no chunking) is only supported"
    )


# --- what is derived


def test_ranks_and_gpus():
    cfg = build_config(["+recipe=maze_1node"])
    assert (policy_ranks(cfg), needed_gpus(cfg)) == (8, 8)
    apart = build_config(
        [CPU, "trainer.placement.policy_num_gpus_per_node=2", "generator.inference_engine.num_engines=3"]
    )
    assert (policy_ranks(apart), needed_gpus(apart)) == (2, 5)
    reference = ["trainer.algorithm.use_kl_loss=true", "trainer.placement.colocate_policy_ref=false"]
    assert needed_gpus(build_config([CPU, *reference])) == needed_gpus(build_config([CPU])) + 2


# --- bounds


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.policy.optimizer_config.lr=.nan",
        "trainer.policy.optimizer_config.lr=-1.0",
        "generator.sampling_params.temperature=.inf",
        "generator.sampling_params.max_generate_length=0",
        "generator.inference_engine.num_engines=0",
        "generator.inference_engine.pipeline_parallel_size=0",
        "generator.inference_engine.data_parallel_size=-1",
        "trainer.ref.sequence_parallel_size=0",
        "trainer.critic.sequence_parallel_size=0",
        "generator.inference_engine.gpu_memory_utilization=5.0",
        "generator.inference_engine.model_dtype=banana",
        "generator.max_turns=0",
        "trainer.strategy=banana",
        "trainer.logger=banana",
        "trainer.resume_mode=banana",
        "trainer.resume_mode=from_path",
        "trainer.epochs=0",
        "trainer.seed=-1",
        "trainer.policy.model.path=null",
    ],
)
def test_a_value_out_of_bounds_is_refused(setting):
    name = setting.partition("=")[0]
    assert name in refusal(CPU, setting)


@pytest.mark.parametrize("steps", [-1, 1_000_001])
def test_the_warm_up_has_a_range(steps):
    problem = only_problem(CPU, f"run.warm_up_steps={steps}")
    assert problem == f"run.warm_up_steps={steps}: must be from 0 to 1000000"


@pytest.mark.parametrize("steps", [0, 1_000_000])
def test_the_ends_of_the_warm_ups_range_are_in_it(steps):
    assert build_config([CPU, f"run.warm_up_steps={steps}"]).run.warm_up_steps == steps


# --- rollouts


def test_all_impossible_rollouts_are_named_at_once_the_mistyped_way_with_its_closest():
    wrong = {
        "pictures": "tensor",
        "retries": -1,
        "retry_wait_s": 61.0,
        "request_timeout_s": 0.0,
        "env_timeout_s": ".nan",
        "max_failed_share": 1.5,
        "fault_rate": -0.1,
    }
    message = refusal(CPU, *[f"generator.rollouts.{name}={value}" for name, value in wrong.items()])
    title, *problems = message.split("\n  - ")
    assert title == "7 setting(s) cannot work:"
    assert [problem.partition("=")[0] for problem in problems] == [f"generator.rollouts.{n}" for n in wrong]
    assert problems[0] == (
        "generator.rollouts.pictures='tensor'; did you mean 'tensors'?; allowed: auto, files, tensors"
    )
    assert problems[1] == "generator.rollouts.retries=-1: must be from 0 to 100"


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (
            "generator.rollouts.retrys=1",
            "generator.rollouts.retrys: there is no such setting; did you mean 'retries'?",
        ),
        ("generator.rollouts.retries=1.5", "generator.rollouts.retries=1.5: input should be a valid integer"),
        ("generator.rollouts.pictures=3", "generator.rollouts.pictures=3: input should be a valid string"),
        (
            "generator.rollouts.fault_rate=some",
            "generator.rollouts.fault_rate='some': input should be a valid number",
        ),
        (
            "generator.rollouts=null",
            "generator.rollouts=None: input should be a dictionary or an instance of RolloutConfig",
        ),
    ],
)
def test_one_wrong_setting_of_the_rollouts(argument, problem):
    assert only_problem(CPU, argument).startswith(problem)


def test_rollouts_arrive_with_their_types():
    rollouts = build_config([CPU, "generator.rollouts={pictures: files, retry_wait_s: 1}"]).generator.rollouts
    assert rollouts == RolloutConfig(pictures="files", retry_wait_s=1.0)


# --- groups


def test_a_group_of_one_is_refused_where_the_estimator_compares_samples():
    message = only_problem(CPU, "generator.n_samples_per_prompt=1")
    assert message.startswith("generator.n_samples_per_prompt=1: a group of one has no spread")
    assert "trainer.algorithm.advantage_estimator=grpo_living; take at least 2" in message
    small = [f"trainer.micro_{part}_batch_size_per_gpu=1" for part in ("train", "forward")]
    build_config([CPU, *small, "generator.n_samples_per_prompt=2"])
    other = "trainer.algorithm.advantage_estimator=reinforce++"
    build_config([CPU, *small, "generator.n_samples_per_prompt=1", other])


@pytest.mark.parametrize("name", recipes.names())
def test_shipped_recipes_learn_from_the_living_and_read_a_picture_once(name):
    cfg = build_config([f"+recipe={name}"])
    assert cfg.trainer.algorithm.advantage_estimator == "grpo_living"
    assert cfg.generator.inference_engine.engine_init_kwargs["mm_processor_cache_gb"] > 0
