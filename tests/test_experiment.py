"""The experiment hands SkyRL this package's parts; which rows and which logger, it says itself."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_maze import _compat

_compat.install()

from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import (  # noqa: E402
    NewInferenceWorkerWrap,
)

from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.experiment import BasePPOExp, MazeExperiment  # noqa: E402
from skyrl_maze.narrator import ChatLogger  # noqa: E402
from skyrl_maze.runlog import RunLog  # noqa: E402
from skyrl_maze.serving import WITNESS  # noqa: E402


def _experiment(*settings: str) -> MazeExperiment:
    experiment = MazeExperiment.__new__(MazeExperiment)  # the real one starts Ray's placement groups
    experiment.cfg = build_config(["+recipe=maze_cpu", *settings])
    experiment.tokenizer = SimpleNamespace()
    return experiment


def test_the_trajectory_table_is_this_packages() -> None:
    assert type(_experiment().get_trajectory_logger()) is ChatLogger


def test_without_evaluation_there_is_no_evaluation_set() -> None:
    assert _experiment("trainer.eval_interval=-1").get_eval_dataset() is None
    assert _experiment("data.val_data=[]").get_eval_dataset() is None


@pytest.mark.parametrize(
    ("settings", "extension"),
    [
        ([], WITNESS),
        (["generator.inference_engine.engine_init_kwargs.worker_extension_cls=my.Own"], "my.Own"),
        (
            [
                "generator.inference_engine.run_engines_locally=false",
                "generator.inference_engine.external_server_urls=['http://10.0.0.1:8000']",
            ],
            None,
        ),
    ],
)
def test_engines_that_it_starts_can_tell_what_they_compute_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], extension: str | None
) -> None:
    monkeypatch.setattr(BasePPOExp, "get_inference_client", lambda experiment: experiment.cfg)
    experiment = _experiment(*settings)
    experiment.log = RunLog(tmp_path)
    arguments = experiment.get_inference_client().generator.inference_engine.engine_init_kwargs
    assert arguments.get("worker_extension_cls") == extension


def test_the_witness_is_a_class_that_engines_find() -> None:
    module, _, name = WITNESS.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), NewInferenceWorkerWrap)
