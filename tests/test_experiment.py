"""The trainer tells what it does, and the solve rate has a plain name wherever metrics go."""

from pathlib import Path
from types import SimpleNamespace

from skyrl_maze import _compat

_compat.install()

from skyrl.train.utils.callbacks import CallbackInput, TrainingControl  # noqa: E402

from skyrl_maze.experiment import Narrator  # noqa: E402
from skyrl_maze.runlog import EventReader, RunLog, read_metrics  # noqa: E402


def _input(step: int, **fields: object) -> CallbackInput:
    return CallbackInput(global_step=step, epoch=0, total_steps=6, steps_per_epoch=3, **fields)


def test_the_solve_rate_gets_plain_names_in_the_records_that_trackers_get(tmp_path: Path) -> None:
    logs = {
        "environment/solve_rate": 0.25,
        "eval/all/environment/solve_rate": 0.5,
        "reward/avg_raw_reward": 0.3,
        "timing/step": 2.0,
    }
    events = EventReader(tmp_path)
    Narrator(RunLog(tmp_path)).on_log(SimpleNamespace(), _input(3, logs=logs), TrainingControl())
    assert (logs["train/solve_rate"], logs["eval/solve_rate"]) == (0.25, 0.5)
    assert read_metrics(tmp_path) == [{"step": 3, **logs}]
    [event] = events.new()
    assert (event["event"], event["step"], event["steps"]) == ("measured", 3, 6)
    assert event["train/solve_rate"] == 0.25


def test_a_record_without_a_solve_rate_stays_without(tmp_path: Path) -> None:
    logs: dict[str, float] = {"loss": 1.0}
    Narrator(RunLog(tmp_path)).on_log(SimpleNamespace(), _input(1, logs=logs), TrainingControl())
    assert logs == {"loss": 1.0}


def test_every_phase_is_an_event(tmp_path: Path) -> None:
    events = EventReader(tmp_path)
    narrator, trainer, control = Narrator(RunLog(tmp_path)), SimpleNamespace(), TrainingControl()
    narrator.on_eval_start(trainer, _input(0), control)
    narrator.on_step_start(trainer, _input(1), control)
    narrator.on_save(trainer, _input(1, ckpt_path="x"), control)
    assert [event["event"] for event in events.new()] == ["evaluating", "training", "saved"]
