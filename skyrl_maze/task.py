"""What the launcher must know of an environment to train in it, whichever package that comes from."""

import functools
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from skyrl_maze.console import Progress
from skyrl_maze.errors import ConfigError, closest
from skyrl_maze.faults import cause_of
from skyrl_maze.pictures import Message
from skyrl_maze.settings import TrainConfig


@dataclass(frozen=True)
class LongestMessages:
    """What an environment may show at its longest, as messages with pictures in them."""

    opening: Sequence[Message]
    observations: Sequence[Sequence[Message]]
    """One entry for each kind of turn after the first; the longest one counts."""


class Task[Config: TrainConfig](ABC):
    """A skyrl_gym environment with its settings and its data; a recipe names it as `run.task: MODULE:CLASS`.

    It is made without arguments, in the driver and in the trainer's process alike, so its module must be
    importable on every node.
    """

    env_class: ClassVar[str]
    """The environment's id in skyrl_gym."""
    config: ClassVar[type[TrainConfig]]
    """`TrainConfig` with `environment.skyrl_gym.<env_class>`, and what the data need, in it."""

    @abstractmethod
    def register(self) -> None:
        """Make the environment known to skyrl_gym in this process; once more does no harm."""

    @abstractmethod
    def rows(self, cfg: Config) -> int:
        """Rows of the training set."""

    @abstractmethod
    def write_data(self, cfg: Config) -> tuple[Path, Path]:
        """Write the training and the evaluation set, unless they are there, and return the parquet files.

        A row holds `prompt`, `env_class` and what the environment takes as `extras`.
        """

    @abstractmethod
    def longest_messages(self, cfg: Config) -> LongestMessages:
        """What the run's longest episode is made of, for the engine's limits."""

    def problems(self, cfg: Config) -> list[str]:
        """A line for each of the task's settings that cannot work, with what would."""
        return []

    def warnings(self, cfg: Config) -> list[str]:
        """A line if the turn budget keeps episodes of the evaluation set from succeeding at all."""
        return []

    def folders(self, cfg: Config) -> list[str]:
        """Folders that it writes to, which are looked at before anything starts."""
        return []

    def build_model(self, cfg: Config, progress: Progress) -> Path | None:
        """The folder of a model that it builds itself, or None if the recipe names another one."""
        return None


def of(cfg: TrainConfig) -> Task[Any]:
    """The task of a run. Raises ConfigError as `load` does."""
    return load(cfg.run.task)


@functools.cache
def load(name: str) -> Task[Any]:
    """The task of that name.

    Args:
        name: MODULE:CLASS.

    Raises:
        ConfigError: there is none of that name that can be imported, or it is no `Task`.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name or not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise _refused(name, "is not of the form MODULE:CLASS")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise _refused(name, f"cannot be imported ({cause_of(error)})") from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, Task) and not inspect.isabstract(found)):
        tasks = [n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, Task)]
        raise _refused(name, f"is not a task of that module{closest(class_name, tasks)}")
    task: Task[Any] = found()
    return task


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"run.task={name!r} {why}; give a class derived from skyrl_maze.task.Task, in a package that is "
        "installed on every node"
    )
