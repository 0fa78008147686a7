"""A run's task is found by the name that its recipe gives, or it is said why not."""

import pytest

from skyrl_maze import _compat

_compat.install()

from skyrl_maze import task  # noqa: E402
from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.errors import ConfigError  # noqa: E402
from skyrl_maze.maze_task import MazeTask  # noqa: E402
from skyrl_maze.settings import RunConfig, TrainConfig  # noqa: E402


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a module that can be imported."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


def test_mazes_are_the_default():
    assert isinstance(task.load(RunConfig.task), MazeTask)
    assert task.load(RunConfig.task) is task.of(TrainConfig())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("maze", "is not of the form MODULE:CLASS"),
        ("", "is not of the form MODULE:CLASS"),
        ("a b:C", "is not of the form MODULE:CLASS"),
        ("os.path:", "is not of the form MODULE:CLASS"),
        ("../evil:Task", "is not of the form MODULE:CLASS"),
        ("nowhere.task:Task", r"cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)"),
        ("skyrl_maze.maze_task:MazTask", "is not a task of that module; did you mean 'MazeTask'"),
        ("skyrl_maze.maze_task:MazeTrainConfig", "is not a task of that module"),
        ("skyrl_maze.task:Task", "is not a task of that module"),
        ("skyrl_maze.env:ENV_ID", "is not a task of that module"),
    ],
)
def test_another_name_is_refused(name, why):
    with pytest.raises(ConfigError, match=rf"^run.task='.*' {why}.*; give a class derived from "):
        task.load(name)


def test_a_module_that_fails_is_told_of(package):
    package("broken_task", "1 / 0")
    with pytest.raises(ConfigError, match=r"cannot be imported .ZeroDivisionError: division by zero."):
        task.load("broken_task:Task")


def test_the_commands_settings_are_those_of_its_task(package):
    package(
        "other_task",
        """
from dataclasses import dataclass, field
from pathlib import Path
from skyrl_maze.settings import TrainConfig
from skyrl_maze.task import LongestMessages, Task

@dataclass
class Config(TrainConfig):
    pieces: int = 3

class Other(Task[Config]):
    env_class, config = "other", Config
    def register(self): pass
    def rows(self, cfg): return 10 * cfg.pieces
    def write_data(self, cfg): return Path("a"), Path("b")
    def longest_messages(self, cfg): return LongestMessages([], [[]])
    def problems(self, cfg): return ["pieces: too few"] if cfg.pieces < 2 else []
""",
    )
    base = [
        "run.task=other_task:Other",
        "environment.env_class=other",
        "generator.vision_language_generator=true",
        "trainer.logger=console",
    ]
    small = ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "generator.batched=false"]
    cfg = build_config([*base, *small, "pieces=4"])
    assert (task.of(cfg).rows(cfg), type(cfg).__name__) == (40, "Config")
    with pytest.raises(ConfigError, match=r"piece: there is no such setting; did you mean 'pieces'"):
        build_config([*base, *small, "piece=4"])
    with pytest.raises(ConfigError, match=r"data.mazes: there is no such setting"):
        build_config([*base, *small, "data.mazes.folder=x"])
    with pytest.raises(ConfigError, match=r"pieces: too few"):
        build_config([*base, *small, "pieces=1"])
    with pytest.raises(ConfigError, match=r"the training set has 40 row.s., which give no full batch of "):
        build_config([*base, "pieces=4", "trainer.train_batch_size=64"])
    with pytest.raises(ConfigError, match=r"env_class=.maze.: run.task=other_task:Other plays .other"):
        build_config([base[0], *base[2:], *small, "environment.env_class=maze"])
