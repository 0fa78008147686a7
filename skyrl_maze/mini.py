"""The miniature run's model, half a million parameters and partly taught, and the mazes it is taught with."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from skyrl_maze import tiny
from skyrl_maze.dataset import MazeSetSpec, draw_set
from skyrl_maze.env import MazeConfig
from skyrl_maze.errors import ConfigError
from skyrl_maze.maze import Maze

MODEL_ID = "skyrl-maze/mini-qwen3-vl"
# Of the 768 mazes of 7x7 cells.
_VALIDATION, _VALIDATION_SEED = 128, 3
_TRAINING, _TRAINING_SEED = 576, 1


def mini_model(
    config: MazeConfig,
    evaluation: Sequence[Maze],
    max_turns: int,
    seed: int,
    report: Callable[[str], None] = lambda text: None,
    habit: bool = False,
) -> Path:
    """The folder of a partly taught model, built once for the same arguments; see `school`.

    Args:
        evaluation: the mazes that it shall be judged on, all of one size: with their goals their walls are
            never shown to it, and it is taught until it solves a part of them.
        seed: of the weights, and of the order of the lessons.
        habit: teach it to the end, and then a bad habit.
        report: is told what goes on.

    Raises:
        ConfigError: these settings do not suit it.
        SetupError: the cache cannot be written, or the model did not come out as wanted.
    """
    import torch

    from skyrl_maze.schooling import PATCH_PX, WITH_HABIT, Schooling, school

    sizes = {maze.size for maze in evaluation}
    side_px = max(sizes) * (config.cell_px or 0)
    if len(sizes) > 1 or side_px % (2 * PATCH_PX) or not side_px or config.feedback or config.budget_note:
        raise ConfigError(
            f"cannot teach {MODEL_ID} with mazes of sizes {sorted(sizes)}, cell_px={config.cell_px}, "
            f"feedback={config.feedback}, budget_note={config.budget_note}: it takes one size, pictures of a "
            f"multiple of {2 * PATCH_PX} px, and neither feedback nor budget_note; see recipe maze_mini"
        )
    lessons = replace(WITH_HABIT if habit else Schooling(), seed=seed)

    def build(folder: Path) -> None:
        (size,) = sizes
        held_out = {maze.key for maze in evaluation}
        validation = draw_set(MazeSetSpec(sizes=[size], count=_VALIDATION, seed=_VALIDATION_SEED), held_out)
        training = with_any_goal([*evaluation, *validation])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums would vary with their number
        try:
            with torch.random.fork_rng():
                model, processor = school(
                    config, training, [validation, evaluation], max_turns, lessons, report
                )
        finally:
            torch.set_num_threads(threads)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)

    identity = [asdict(config), [maze.key for maze in evaluation], max_turns, asdict(lessons)]
    return tiny.cached("mini", identity, build)


def with_any_goal(held_out: Sequence[Maze]) -> list[Maze]:
    """The walls of some held-out mazes and of as many others, each with a goal in every room but theirs."""
    size = held_out[0].size
    others = draw_set(
        MazeSetSpec(sizes=[size], count=_TRAINING, seed=_TRAINING_SEED), {maze.key for maze in held_out}
    )
    forbidden = {(maze.walls.tobytes(), maze.goal) for maze in held_out}
    first, last = (1, 1), (size - 2, size - 2)
    puzzles = []
    for walls in {maze.walls.tobytes(): maze.walls for maze in (*others, *held_out)}.values():
        for goal in itertools.product(range(1, size, 2), range(1, size, 2)):
            if (walls.tobytes(), goal) not in forbidden:
                puzzles.append(Maze(walls, last if goal == first else first, goal))
    return puzzles
