"""The maze as a task of the launcher: its settings, its maze sets, and the models that are built here."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skyrl.train.config.config import BaseConfig, DataConfig, EnvironmentConfig, SkyRLGymConfig

from skyrl_maze import dataset, mini, tiny
from skyrl_maze.actions import format_action
from skyrl_maze.console import Progress
from skyrl_maze.dataset import MazeSetSpec
from skyrl_maze.env import ENV_ID, MazeConfig, MazeEnv, register
from skyrl_maze.maze import Move, generate_maze
from skyrl_maze.settings import TrainConfig
from skyrl_maze.task import LongestMessages, Task

# Answers that each draw another sentence from the environment, in either grammar.
_NOT_UNDERSTOOD = ("", "hello", "<action>jump</action>", "('move', 9)")


@dataclass
class MazeSetsConfig(BaseConfig):
    """The two maze sets of a run, written as parquet files before it starts."""

    folder: str = "data/mazes"
    train: MazeSetSpec = field(default_factory=MazeSetSpec)
    eval: MazeSetSpec = field(default_factory=lambda: MazeSetSpec(name="visgym-easy-64"))


@dataclass
class MazeDataConfig(DataConfig):
    mazes: MazeSetsConfig = field(default_factory=MazeSetsConfig)


@dataclass
class MazeGymConfig(SkyRLGymConfig):
    maze: MazeConfig = field(default_factory=MazeConfig)


@dataclass
class MazeEnvironmentConfig(EnvironmentConfig):
    env_class: str = ENV_ID
    skyrl_gym: MazeGymConfig = field(default_factory=MazeGymConfig)


@dataclass
class MazeTrainConfig(TrainConfig):
    """The settings of a run on mazes."""

    data: MazeDataConfig = field(default_factory=MazeDataConfig)
    environment: MazeEnvironmentConfig = field(default_factory=MazeEnvironmentConfig)


class MazeTask(Task[MazeTrainConfig]):
    """Mazes to be walked by looking at them; see `env.MazeEnv`."""

    env_class = ENV_ID
    config = MazeTrainConfig

    def register(self) -> None:
        register()

    def rows(self, cfg: MazeTrainConfig) -> int:
        return cfg.data.mazes.train.count

    def write_data(self, cfg: MazeTrainConfig) -> tuple[Path, Path]:
        mazes = cfg.data.mazes
        return dataset.prepare(mazes.train, mazes.eval, Path(mazes.folder).absolute())

    def longest_messages(self, cfg: MazeTrainConfig) -> LongestMessages:
        """Its largest mazes, with the longest feedback."""
        evaluated = (maze.size for maze in dataset.mazes_of(cfg.data.mazes.eval))
        largest = generate_maze(max(*cfg.data.mazes.train.sizes, *evaluated), seed=0)
        extras = {"maze": largest.to_text(), "max_turns": cfg.generator.max_turns + 1}
        config, observations = cfg.environment.skyrl_gym.maze, []
        understood = [format_action(move, config.grammar) for move in Move]
        for answer in (*understood, "".join(understood), *_NOT_UNDERSTOOD):
            env = MazeEnv(config, extras)
            opening, _ = env.init([])
            observations.append(env.step(answer)["observations"])
        return LongestMessages(opening, observations)

    def problems(self, cfg: MazeTrainConfig) -> list[str]:
        mazes = cfg.data.mazes
        return [
            *[f"environment.skyrl_gym.maze: {p}" for p in cfg.environment.skyrl_gym.maze.problems()],
            *[f"data.mazes.train.{p}" for p in _training_set_problems(mazes.train)],
            *[f"data.mazes.eval.{p}" for p in mazes.eval.problems()],
        ]

    def warnings(self, cfg: MazeTrainConfig) -> list[str]:
        mazes = dataset.mazes_of(cfg.data.mazes.eval)
        rule, turns = cfg.environment.skyrl_gym.maze.goal_rule, cfg.generator.max_turns
        solvable = dataset.solvable(mazes, rule, turns)
        if solvable == len(mazes):
            return []
        enough = max(dataset.turns_needed(maze, rule) for maze in mazes)
        return [
            f"generator.max_turns={turns} lets at most {solvable} of {len(mazes)} evaluation mazes be solved "
            f"({solvable / len(mazes):.1%}); {enough} turns allow all"
        ]

    def folders(self, cfg: MazeTrainConfig) -> list[str]:
        return [cfg.data.mazes.folder]

    def build_model(self, cfg: MazeTrainConfig, progress: Progress) -> Path | None:
        maze, mazes, max_turns = cfg.environment.skyrl_gym.maze, cfg.data.mazes, cfg.generator.max_turns
        name = cfg.trainer.policy.model.path
        if name == tiny.MODEL_ID:
            progress.doing("building the tiny Qwen3-VL")
            warm_up = tiny.WarmUp(steps=cfg.run.warm_up_steps)
            return tiny_model(maze, mazes.train.sizes, max_turns, warm_up, progress.warming_up)
        if name == mini.MODEL_ID:
            progress.doing("teaching the miniature Qwen3-VL")
            judged, habit = dataset.mazes_of(mazes.eval), cfg.run.start == "habit"
            return mini.mini_model(maze, judged, max_turns, cfg.run.school_seed, progress.update, habit)
        return None


def tiny_model(
    config: MazeConfig,
    sizes: Sequence[int],
    max_turns: int,
    warm_up: tiny.WarmUp | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The folder of a tiny model that walks at random through mazes of these sizes; `tiny.build_tiny_model`.

    Args:
        max_turns: the turn budget that the task text names.
    """
    warm_up = warm_up or tiny.WarmUp()
    settings = [asdict(config), list(sizes), max_turns]
    walks = random_walks(config, sizes, max_turns, warm_up)
    return tiny.build_tiny_model(settings, walks, warm_up, progress)


def random_walks(
    config: MazeConfig, sizes: Sequence[int], max_turns: int, warm_up: tiny.WarmUp
) -> Iterator[list[dict[str, Any]]]:
    """Chats of uniformly random moves, see `tiny.random_episodes`."""

    def make_env(rng: random.Random) -> MazeEnv:
        maze = generate_maze(rng.choice(sizes), rng.getrandbits(32))
        return MazeEnv(config, {"maze": maze.to_text(), "max_turns": max_turns})

    def answer(rng: random.Random) -> str:
        return format_action(rng.choice(list(Move)), config.grammar)

    return tiny.random_episodes(make_env, answer, warm_up)


def _training_set_problems(spec: MazeSetSpec) -> list[str]:
    if spec.name is None:
        return spec.problems()
    return [f"name={spec.name!r}: shipped sets are for evaluation; set it to null and give sizes and count"]
