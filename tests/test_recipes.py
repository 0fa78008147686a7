"""Recipes: every shipped one is sound to the last key, and a recipe of one's own is found and read."""

import re
import shlex
from pathlib import Path

import pytest

from skyrl_maze import _compat, dataset, recipes
from skyrl_maze.errors import ConfigError

_compat.install()

from skyrl.train.utils import validate_cfg  # noqa: E402

from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.settings import policy_ranks  # noqa: E402

COMMAND = "skyrl.entrypoints.main_base"
every_recipe = pytest.mark.parametrize("name", recipes.names())


def about(name):
    return recipes.about(recipes.find(name))


def cfg_of(name):
    return build_config([f"+recipe={name}"])


def refusal(*argv):
    with pytest.raises(ConfigError) as caught:
        recipes.read_settings(list(argv))
    return str(caught.value)


@pytest.fixture
def write(tmp_path):
    """Writes a recipe file and gives its path."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


# --- in a package


def test_a_recipe_in_a_package_is_found_and_extends_others(tmp_path, monkeypatch):
    package = tmp_path / "boxes"
    package.mkdir()
    (package / "below.yaml").write_text("extends: _stack_cpu\nrun: {id: below, warm_up_steps: 7}\n")
    (package / "small-boxes.yaml").write_text("extends: below.yaml\nrun: {id: boxes}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = recipes.read_settings(["+recipe=boxes:small-boxes", "generator.max_turns=3"])
    assert (settings["run"]["id"], settings["run"]["warm_up_steps"]) == ("boxes", 7)
    assert settings["trainer"]["train_batch_size"] == 4
    assert refusal("+recipe=boxes:small_boxes") == (
        "no recipe 'small_boxes' in the package boxes; did you mean 'small-boxes'?; "
        "it has: below, small-boxes"
    )


@pytest.mark.parametrize("name", ["nowhere:x", "nowhere.at.all:x"])
def test_a_package_that_is_not_there_is_named(name):
    said = refusal(f"+recipe={name}")
    assert said.startswith(
        f"no recipe '{name}': {name.partition(':')[0]} cannot be imported (No module named"
    )


@pytest.mark.parametrize("name", ["../x:y", "a/b:c", "boxes:../secret", "boxes:"])
def test_no_path_leaves_a_package(name):
    assert refusal(f"+recipe={name}").startswith(f"no recipe {name!r}")


# --- the shipped ones


def test_recipes_ship():
    assert {"maze", "maze_1node", "maze_cpu", "maze_instruct"} <= set(recipes.names())


@every_recipe
def test_skyrl_accepts_the_recipe(name):
    validate_cfg(cfg_of(name))


@every_recipe
def test_the_header_says_all(name):
    fields = about(name)
    assert list(fields) == ["Purpose", "Hardware", "Expected", "Launch", "Override"]
    assert all(fields.values())


def test_the_page_of_recipes_has_a_row_for_each_that_says_what_its_header_says():
    page = (Path(__file__).parents[1] / "docs/recipes.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in re.findall(r"^\| (`maze.*) \|$", page, re.MULTILINE)]
    wanted = [
        [f"`{name}`", *(about(name)[field] for field in ("Purpose", "Hardware", "Expected"))]
        for name in recipes.names()
    ]
    assert rows == wanted


@every_recipe
@pytest.mark.parametrize("field", ["Launch", "Override"])
def test_the_commands_of_the_header_work(name, field):
    command, *argv = shlex.split(about(name)[field])
    assert command == COMMAND
    assert argv[0] == f"+recipe={name}"
    assert (len(argv) > 1) == (field == "Override")
    validate_cfg(build_config(argv))


@every_recipe
def test_what_is_overridden_changes_something(name):
    argv = shlex.split(about(name)["Override"])[1:]
    assert recipes.read_settings(argv) != recipes.read_settings(argv[:1])


@every_recipe
def test_the_turn_budget_solves_every_evaluation_maze(name):
    cfg = cfg_of(name)
    mazes = dataset.mazes_of(cfg.data.mazes.eval)
    rule = cfg.environment.skyrl_gym.maze.goal_rule
    assert dataset.solvable(mazes, rule, cfg.generator.max_turns) == len(mazes)


def test_a_budget_too_short_would_be_seen():
    cfg = build_config(["+recipe=maze", "generator.max_turns=15"])
    assert dataset.solvable(dataset.mazes_of(cfg.data.mazes.eval), "stop", cfg.generator.max_turns) == 50


@every_recipe
def test_batches_divide_by_the_ranks(name):
    cfg = cfg_of(name)
    samples = cfg.generator.n_samples_per_prompt
    for prompts in (cfg.trainer.train_batch_size, cfg.trainer.policy_mini_batch_size):
        assert prompts * samples % policy_ranks(cfg) == 0
    assert cfg.trainer.train_batch_size % cfg.trainer.policy_mini_batch_size == 0
    assert cfg.data.mazes.train.count % cfg.trainer.train_batch_size == 0


@every_recipe
def test_the_engine_has_room_for_a_whole_episode(name):
    cfg = cfg_of(name)
    engine = cfg.generator.inference_engine.engine_init_kwargs
    assert engine["limit_mm_per_prompt"]["image"] >= cfg.generator.max_turns
    longest = max(
        cfg.generator.sampling_params.max_generate_length,
        cfg.generator.eval_sampling_params.max_generate_length,
    )
    assert engine["max_model_len"] >= cfg.generator.max_input_length + longest


@every_recipe
def test_all_that_a_run_writes_is_its_own(name):
    cfg = build_config([f"+recipe={name}", "run.root=/r"])
    written = (cfg.trainer.ckpt_path, cfg.trainer.export_path, cfg.trainer.log_path)
    assert all(path.startswith("/r/") for path in (*written, cfg.trainer.policy.model.lora.lora_sync_path))
    assert len(set(written)) == 3


@every_recipe
def test_training_sets_can_be_drawn_apart_from_evaluation(name):
    mazes = cfg_of(name).data.mazes
    held_out = dataset.evaluation_keys() | {maze.key for maze in dataset.mazes_of(mazes.eval)}
    few = min(mazes.train.count, 64)
    mazes.train.count = few
    assert len(dataset.draw_set(mazes.train, held_out)) == few


# --- recipes of one's own


def test_extending_lays_a_recipe_over_another(write):
    write(
        "base.yaml", "extends: maze_cpu\ntrainer: {seed: 5, epochs: 9}\ndata: {mazes: {train: {sizes: [7]}}}"
    )
    top = write("top.yaml", "extends: base.yaml\ntrainer: {seed: 6}")
    settings = recipes.read_settings([f"+recipe={top}"])
    assert (settings["trainer"]["seed"], settings["trainer"]["epochs"]) == (6, 9)
    assert settings["data"]["mazes"]["train"]["sizes"] == [7]
    assert settings["run"]["device"] == "cpu"
    assert "extends" not in settings


def test_a_recipe_extends_a_file_beside_it_wherever_it_is_run(write, monkeypatch, tmp_path_factory):
    write("sub/base.yml", "trainer: {seed: 5}")
    top = write("sub/top.yaml", "extends: base.yml")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert recipes.load(str(top)) == {"trainer": {"seed": 5}}


def test_the_three_ways_to_write_a_path(write, monkeypatch, tmp_path):
    path = write("some/mine.yaml", "trainer: {seed: 5}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "some"))
    for given in (str(path), "some/mine.yaml", "./some/mine.yaml", "~/mine.yaml"):
        assert recipes.read_settings([f"+recipe={given}"]) == {"trainer": {"seed": 5}}


def test_an_unknown_recipe_is_refused_with_the_closest():
    assert refusal("+recipe=maze_gpu") == (
        f"no recipe 'maze_gpu'; did you mean 'maze_cpu'?; shipped: {', '.join(recipes.names())}; "
        "or give the path of a .yaml file, or PACKAGE:NAME"
    )


def test_paths_that_are_no_recipe(tmp_path, write):
    (tmp_path / "folder.yaml").mkdir()
    text = write("notes.txt", "a: 1")
    for path in (tmp_path / "folder.yaml", tmp_path / "none.yaml", text):
        assert refusal(f"+recipe={path}").startswith(f"no recipe '{path}'")


def test_an_unknown_base_is_refused(write):
    top = write("top.yaml", "extends: maze_gpu")
    assert refusal(f"+recipe={top}").startswith("no recipe 'maze_gpu'; did you mean 'maze_cpu'?")


def test_a_circle_is_named(write):
    write("b.yaml", "extends: a.yaml")
    a = write("a.yaml", "extends: b.yaml")
    assert (
        refusal(f"+recipe={a}")
        == "recipes extend each other in a circle: a -> b -> a; take one extends: line out"
    )
    own = write("own.yaml", "extends: own.yaml")
    assert "own -> own" in refusal(f"+recipe={own}")


@pytest.mark.parametrize("base", ["[maze, maze_cpu]", "3", "{a: 1}"])
def test_only_one_recipe_can_be_extended(write, base):
    top = write("top.yaml", f"extends: {base}")
    assert refusal(f"+recipe={top}").endswith("must be the name or the path of one recipe")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- a\n- b\n", "a list"),
        ("just words", "a single value"),
        ("", "nothing"),
        ("# Purpose: none\n", "nothing"),
    ],
)
def test_a_recipe_that_is_no_mapping(write, text, found):
    path = write("mine.yaml", text)
    message = refusal(f"+recipe={path}")
    assert (
        message == f"recipe {path} holds {found}; it must be a mapping of settings, such as trainer: {{...}}"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("trainer: {seed: 1", "while parsing a flow mapping"),
        ("trainer:\n\tseed: 1", "cannot start any token"),
        ("trainer: {seed: 1}\ntrainer: {seed: 2}", "found duplicate key trainer"),
    ],
)
def test_broken_yaml_is_told_with_its_place(write, text, reason):
    path = write("mine.yaml", text)
    message = refusal(f"+recipe={path}")
    assert message.startswith(f"cannot read recipe {path}: ")
    assert reason in message
    assert "line " in message
    assert "\n" not in message


def test_a_recipe_that_is_not_utf8(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"run: {id: \xff}")
    assert refusal(f"+recipe={path}").startswith(f"cannot read recipe {path}: 'utf-8' codec can't decode")


def test_a_recipe_nested_without_end_is_refused(write):
    path = write("mine.yaml", f"a: {'[' * 20_000}")
    assert refusal(f"+recipe={path}").startswith(f"cannot read recipe {path}: maximum recursion depth")


def test_header_and_about_read_the_first_comment_only(write):
    path = write(
        "mine.yaml", "# Purpose: one\n#           two.\n# Hardware: none\n\n# Launch: not here\na: 1\n"
    )
    assert recipes.header(path) == ["Purpose: one", "two.", "Hardware: none"]
    assert recipes.about(path) == {"Purpose": "one two.", "Hardware": "none"}


def test_interpolations_are_resolved_last(write):
    path = write("mine.yaml", "run: {id: a, root: /r}\ntrainer: {run_name: '${run.id}'}")
    assert recipes.load(str(path))["trainer"] == {"run_name": "${run.id}"}
    assert recipes.read_settings([f"+recipe={path}", "run.id=b"])["trainer"] == {"run_name": "b"}


def test_merge_leaves_its_arguments_alone():
    below, above = {"a": {"b": 1, "c": [1, 2]}, "d": 1}, {"a": {"c": [3]}, "d": {"e": 1}}
    assert recipes.merge(below, above) == {"a": {"b": 1, "c": [3]}, "d": {"e": 1}}
    assert below == {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert recipes.merge(above, {"d": None})["d"] is None


def test_no_arguments_are_no_settings():
    assert recipes.read_settings([]) == {}


def test_a_recorded_command_line_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["+recipe=maze_cpu", "run.id=b", "trainer.seed=3"]
    kept = recipes.record(argv, tmp_path)
    assert kept == tmp_path / recipes.RECORD
    monkeypatch.chdir("/")
    again = recipes.read_settings([f"+recipe={kept}"])
    assert again["run"]["root"] == str(tmp_path / "runs/b")
    monkeypatch.chdir(tmp_path)
    assert again == recipes.read_settings(argv)
