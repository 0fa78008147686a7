"""The experiment hands SkyRL this package's parts; which rows and which logger, it says itself."""

from types import SimpleNamespace

from skyrl_maze import _compat

_compat.install()

from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.experiment import MazeExperiment  # noqa: E402
from skyrl_maze.trainer import ChatLogger  # noqa: E402


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
