"""SkyRL's trainer with ours on top: dull groups, readable examples, its workers, its end, what it tells."""

import asyncio
import re
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_maze import _compat

_compat.install()

from adapter_files import published  # noqa: E402
from bare_trainer import FILTER, output_of, play, playing_trainer, trainer_of  # noqa: E402
from fake_servers import BASE, FakeEngine, serving  # noqa: E402
from skyrl.train import trainer as skyrl_trainer  # noqa: E402
from skyrl.train.generators.base import BatchMetadata, TrajectoryID  # noqa: E402
from skyrl.train.generators.utils import concatenate_generator_outputs  # noqa: E402
from skyrl.train.utils.callbacks import CallbackInput, TrainingControl  # noqa: E402

from skyrl_maze import worker  # noqa: E402
from skyrl_maze.errors import AdapterError  # noqa: E402
from skyrl_maze.narrator import ChatLogger, Narrator  # noqa: E402
from skyrl_maze.runlog import EventReader, RunLog, read_metrics  # noqa: E402
from skyrl_maze.serving import Served  # noqa: E402
from skyrl_maze.sharing import Shared  # noqa: E402

NO_FILTER = "trainer.algorithm.zero_variance_filter=false"
FILTERED = "reward/num_zero_variance_filtered"
# As this package pays: multiples of a power of two, whose sums are exact.
amounts = st.integers(-128, 128).map(lambda n: n / 64)


@st.composite
def batches(draw):
    """Rewards, masks and groups of three tokens a sample; some samples are lost, some groups are dull."""
    rewards, masks, uids = [], [], []
    for group in range(draw(st.integers(1, 4))):
        rows = draw(st.lists(st.lists(amounts, min_size=3, max_size=3), min_size=1, max_size=4))
        if draw(st.booleans()):
            rows = [draw(st.permutations(rows[0])) for _ in rows]
        rewards += rows
        masks += [draw(st.sampled_from([[1, 0, 1], [0, 1, 0], [0, 0, 0]])) for _ in rows]
        uids += [f"maze-{group}"] * len(rows)
    return rewards, masks, uids


def living_returns(rewards, masks, uids, uid):
    return [
        sum(row) for row, mask, name in zip(rewards, masks, uids, strict=True) if name == uid and any(mask)
    ]


# ---- the zero-variance filter ---------------------------------------------------------------------


def test_groups_without_signal_are_masked_and_counted():
    trainer = trainer_of(FILTER)
    rewards = [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 9.0]]
    masks = [[1, 1], [1, 0], [1, 1], [0, 1], [1, 1], [0, 0], [0, 0], [0, 0]]
    uids = ["dull", "dull", "good", "good", "lonely", "lonely", "lost", "lost"]
    output, found_uids = trainer.postprocess_generator_output(output_of(rewards, masks), uids)
    assert output["loss_masks"] == [[0, 0]] * 2 + [[1, 1], [0, 1]] + [[0, 0]] * 4
    assert output["rewards"] == rewards, "the rewards stay per token"
    assert found_uids == uids
    assert trainer.all_metrics[FILTERED] == 3


def test_float_noise_is_no_signal():
    trainer = trainer_of(FILTER)
    noisy = [[1.0, 0.0], [0.0, 1.0 + 1e-7]]  # of single precision
    output, _ = trainer.postprocess_generator_output(output_of(noisy), ["g", "g"])
    assert output["loss_masks"] == [[0, 0]] * 2
    assert trainer.all_metrics[FILTERED] == 1


def test_a_larger_tolerance_of_the_recipe_counts():
    nearly = [[1.0, 0.0], [0.0, 1.05]]
    for tolerance, filtered in ((0.0, 0), (0.1, 1)):
        trainer = trainer_of(FILTER, f"trainer.algorithm.zero_variance_filter_tol={tolerance}")
        trainer.postprocess_generator_output(output_of(nearly), ["g", "g"])
        assert trainer.all_metrics[FILTERED] == filtered


@pytest.fixture(scope="module")
def filtering():
    return trainer_of(FILTER)


@given(batch=batches())
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_just_the_groups_without_signal_are_masked(filtering, batch):
    rewards, masks, uids = batch
    good = {uid for uid in uids if len(set(living_returns(*batch, uid))) > 1}
    output, _ = filtering.postprocess_generator_output(output_of(rewards, list(masks)), uids)
    expected = [mask if uid in good else [0, 0, 0] for uid, mask in zip(uids, masks, strict=True)]
    assert output["loss_masks"] == expected
    assert filtering.all_metrics[FILTERED] == len(set(uids) - good)


def test_without_the_filter_nothing_is_masked():
    trainer = trainer_of(NO_FILTER)
    masks = [[1, 1], [1, 0]]
    output, _ = trainer.postprocess_generator_output(output_of([[1.0, 0.0]] * 2, list(masks)), ["g", "g"])
    assert output["loss_masks"] == masks
    assert FILTERED not in trainer.all_metrics


# ---- examples that can be read --------------------------------------------------------------------


@pytest.fixture(scope="module")
def playing(tmp_path_factory):
    """Builds a trainer with the given example interval that really plays mazes."""
    folder = tmp_path_factory.mktemp("model")
    return lambda interval: playing_trainer(folder, f"trainer.print_example_interval={interval}")


PICTURE = re.compile(r"\[image/png 112x112 sha256:[0-9a-f]{12}\]")


def assert_readable(text, pictures):
    assert len(PICTURE.findall(text)) == pictures
    assert "base64" not in text
    assert re.search(r"[A-Za-z0-9+/]{80}", text) is None


def test_the_example_is_the_conversation(playing):
    trainer = playing(2)
    assert trainer.cfg.trainer.print_example_interval == 0, "SkyRL prints none beside it"
    output, printed = play(trainer, 2)
    assert_readable(printed, 3)
    assert "Walk to the goal" in printed
    assert printed.count("[assistant] <action>right</action>") == 3
    assert printed.count("[user] ") == 2
    assert f"(Total Reward: {sum(output['rewards'][0]):.4f})" in printed
    assert printed.index("Walk to the goal") < printed.index("[assistant]")


@pytest.mark.parametrize(("interval", "step"), [(2, 1), (2, 3), (0, 0), (0, 2), (-1, 2)])
def test_at_other_steps_no_example_is_printed(playing, interval, step):
    output, printed = play(playing(interval), step)
    assert len(output["chats"]) == 2
    assert "Example" not in printed
    assert "Walk to the goal" not in printed


class Table:
    """A tracker that keeps its rows."""

    def __init__(self, backend="wandb"):
        self.backend, self.rows = backend, []

    def log_samples_to_table(self, *, key, columns, samples, step):
        self.rows += [dict(zip(columns, row, strict=True)) for row in samples]


def log(table, output, **changes):
    prompts = [[{"role": "user", "content": "maze"}]] * 2
    given = {"tracker": table, "num_samples": 2, "prompts": prompts, "generator_output": output}
    # No tokenizer: nothing is decoded a second time.
    ChatLogger().log(**{**given, "tokenizer": None, "global_step": 4, "wandb_key": "trajectories", **changes})


@pytest.mark.parametrize("evaluated", [False, True])
def test_the_table_holds_whole_conversations(playing, evaluated):
    output, _ = play(playing(0), 1)
    if evaluated:  # an evaluation logs its batches put together
        output = concatenate_generator_outputs([output])
    table = Table()
    log(table, output)
    assert [row["idx"] for row in table.rows] == [0, 1]
    for row, rewards in zip(table.rows, output["rewards"], strict=True):
        assert (row["step"], row["num_turns"]) == (4, 3)
        assert row["reward"] == pytest.approx(sum(rewards))
        assert_readable(row["trajectory"], 3)
        assert re.findall(r"^\[([A-Z]+)\]$", row["trajectory"], re.M) == ["USER", "ASSISTANT"] * 3
        assert row["trajectory"].count("<action>right</action>") >= 3


def test_where_there_are_no_conversations_the_prompts_stand(playing):
    output, _ = play(playing(0), 1)
    table = Table()
    log(table, {name: value for name, value in output.items() if name != "chats"})
    assert [row["trajectory"] for row in table.rows] == ["[USER]\nmaze"] * 2


def test_other_trackers_get_no_table(playing):
    output, _ = play(playing(0), 1)
    table = Table("console")
    log(table, output)
    assert table.rows == []
    log(None, output)


# ---- workers, and the end of a run ----------------------------------------------------------------


def test_the_workers_are_this_packages(monkeypatch):
    built = []
    monkeypatch.setattr(
        skyrl_trainer.RayPPOTrainer, "build_models", lambda _self, *classes: built.append(classes)
    )
    shared = []
    monkeypatch.setattr("skyrl_maze.adapter_trainer.start_merger", lambda: None)
    monkeypatch.setattr(
        "skyrl_maze.trainer.MazeTrainer._share_through_folder", lambda _self: shared.append(True)
    )
    asked = []
    monkeypatch.setattr("skyrl_maze.trainer.MazeTrainer._ask_policy", lambda _self, *told: asked.append(told))
    critic, trainer = object(), trainer_of()
    for rank in (8, 0):
        trainer.cfg.trainer.policy.model.lora.rank = rank
        trainer.build_models(object(), critic, object())
    assert built == [(worker.PolicyWorker, critic, worker.RefWorker)] * 2
    assert shared == [True], "without LoRA there is nothing to share"
    assert asked == [("watch", trainer.cfg.run.hang)]


def test_the_client_is_closed_in_the_loop_of_the_run_even_if_that_fails(monkeypatch):
    async def fail(_self):
        raise RuntimeError("no training today")

    loops = []

    async def teardown():
        loops.append(asyncio.get_running_loop())

    async def run(trainer):
        with pytest.raises(RuntimeError, match="no training today"):
            await trainer.train()
        return asyncio.get_running_loop()

    monkeypatch.setattr(skyrl_trainer.RayPPOTrainer, "train", fail)
    trainer = trainer_of()
    trainer.inference_engine_client = SimpleNamespace(teardown=teardown)
    assert [asyncio.run(run(trainer))] == loops


# ---- the adapter that the engines serve -----------------------------------------------------------


def prove(trainer, version, fault="", largest_b=1.0):
    """The metrics of proving that an engine with this fault serves the version."""
    engine = FakeEngine(fault)

    async def run():
        async with serving(engine) as urls:
            engine.serves = version.adapter
            trainer.inference_engine_client = SimpleNamespace(server_urls=urls, model_name=BASE)
            shared = Shared(Served(engines=1, modules=4, proven=True, seconds=0.5), largest_b)
            return await trainer._proof(version, shared)

    return asyncio.run(run())


def test_what_is_proven_is_a_metric_and_the_tag_of_every_episode(playing, tmp_path):
    trainer = playing(0)
    assert play(trainer, 1)[0]["adapter_versions"] == [None, None]
    metrics = prove(trainer, published(tmp_path, 7))
    assert (metrics["adapter/engines"], metrics["adapter/modules"], metrics["adapter/largest_b"]) == (
        1,
        4,
        1.0,
    )
    assert metrics["adapter/probe_difference"] > 0
    assert metrics["timing/adapter_load"] == 0.5
    assert metrics["timing/adapter_probe"] > 0
    outputs = [play(trainer, step)[0] for step in (2, 3)]
    assert concatenate_generator_outputs(outputs)["adapter_versions"] == ["7.0"] * 4


def test_a_version_that_is_not_proven_is_no_tag(playing, tmp_path):
    trainer = playing(0)
    prove(trainer, published(tmp_path, 7))
    with pytest.raises(AdapterError, match="answers as the base model does"):
        prove(trainer, published(tmp_path, 8), "answers as the base model")
    assert trainer.generator.adapter_version == "7.0"


# ---- what the trainer tells -----------------------------------------------------------------------


def told(step, **fields):
    return CallbackInput(global_step=step, epoch=0, total_steps=6, steps_per_epoch=3, **fields)


def test_the_solve_rate_gets_plain_names_in_the_records_that_trackers_get(tmp_path):
    logs = {
        "environment/solve_rate": 0.25,
        "eval/all/environment/solve_rate": 0.5,
        "reward/avg_raw_reward": 0.3,
        "timing/step": 2.0,
    }
    events = EventReader(tmp_path)
    Narrator(RunLog(tmp_path)).on_log(SimpleNamespace(), told(3, logs=logs), TrainingControl())
    assert (logs["train/solve_rate"], logs["eval/solve_rate"]) == (0.25, 0.5)
    assert read_metrics(tmp_path) == [{"step": 3, **logs}]
    [event] = events.new()
    assert (event["event"], event["step"], event["steps"]) == ("measured", 3, 6)
    assert event["train/solve_rate"] == 0.25


def test_a_record_without_a_solve_rate_stays_without(tmp_path):
    logs = {"loss": 1.0}
    Narrator(RunLog(tmp_path)).on_log(SimpleNamespace(), told(1, logs=logs), TrainingControl())
    assert logs == {"loss": 1.0}


def test_every_phase_is_an_event(tmp_path):
    events = EventReader(tmp_path)
    narrator, trainer, control = Narrator(RunLog(tmp_path)), SimpleNamespace(), TrainingControl()
    narrator.on_eval_start(trainer, told(0), control)
    narrator.on_step_start(trainer, told(1), control)
    narrator.on_save(trainer, told(1, ckpt_path="x"), control)
    assert [event["event"] for event in events.new()] == ["evaluating", "training", "saved"]


def test_the_rows_of_a_training_step_are_an_event(tmp_path):
    events = EventReader(tmp_path)
    narrator = Narrator(RunLog(tmp_path))
    for phase in ("train", "eval"):
        narrator.observe(
            {
                "trajectory_ids": [
                    TrajectoryID(row, sample) for row in ("7", "0", "11") for sample in (0, 1)
                ],
                "batch_metadata": BatchMetadata(3, phase),
            }
        )
    (event,) = events.new()
    assert (event["event"], event["step"], event["rows"]) == ("played", 3, [7, 0, 11])
