"""The miniature run's mazes and where its model is kept."""

import pytest

from skyrl_maze import dataset, mini, recipes
from skyrl_maze.dataset import MazeSetSpec
from skyrl_maze.env import MazeConfig
from skyrl_maze.errors import ConfigError
from skyrl_maze.maze import generate_maze

CONFIG = MazeConfig(theme="tokens", cell_px=4, grammar="keyword", goal_rule="reach", feedback=False)


def test_no_held_out_maze_is_taught_with_its_goal():
    held_out = dataset.mazes_of(MazeSetSpec(sizes=[7], count=64, seed=2))
    puzzles = mini.with_any_goal(held_out)
    taught = {(maze.walls.tobytes(), maze.goal) for maze in puzzles}
    assert len(taught) == len(puzzles)
    assert taught.isdisjoint({(maze.walls.tobytes(), maze.goal) for maze in held_out})
    assert len(puzzles) > 1000


def test_the_runs_own_training_set_holds_no_evaluation_maze_with_its_goal():
    """At 7x7 a start follows from its goal, so distinct keys are distinct puzzles."""
    mazes = recipes.read_settings(["+recipe=maze_mini"])["data"]["mazes"]
    held_out = dataset.mazes_of(MazeSetSpec(**mazes["eval"]))
    training = dataset.draw_set(MazeSetSpec(**mazes["train"]), {maze.key for maze in held_out})
    taught = {(maze.walls.tobytes(), maze.goal) for maze in training}
    assert taught.isdisjoint({(maze.walls.tobytes(), maze.goal) for maze in held_out})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cell_px": 5}, "cell_px=5"),
        ({"cell_px": None}, "cell_px=None"),
        ({"feedback": True}, "feedback=True"),
    ],
)
def test_what_does_not_suit_it_is_refused_before_anything_is_taught(change, said):
    with pytest.raises(ConfigError, match=said):
        mini.mini_model(MazeConfig(**{**vars(CONFIG), **change}), [generate_maze(7, 1)], 12, 0)


def test_two_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"sizes \[7, 9\]"):
        mini.mini_model(CONFIG, [generate_maze(7, 1), generate_maze(9, 1)], 12, 0)
