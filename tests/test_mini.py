"""The miniature run's mazes and where its model is kept."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from skyrl_maze import dataset, mini, recipes
from skyrl_maze.dataset import MazeSetSpec
from skyrl_maze.env import MazeConfig
from skyrl_maze.errors import ConfigError
from skyrl_maze.maze import generate_maze
from skyrl_maze.runlog import read_metrics

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


@pytest.mark.rehearsal
@pytest.mark.timeout(1500)
def test_the_miniature_run_begins_with_a_partly_taught_model(tmp_path, model_cache):
    """The two commands of `make mini`, with one step of training."""
    scripts = Path(sysconfig.get_path("scripts"))
    run = [scripts / "skyrl.entrypoints.main_base", "+recipe=maze_mini", "trainer.max_training_steps=1"]
    page = [scripts / "skyrl-maze", "report", "runs/maze-mini", "--out", "runs/maze-mini/report.html"]
    for command in (run, page):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(model_cache)},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    root = tmp_path / "runs/maze-mini"
    rates = {record["step"]: record.get("eval/solve_rate") for record in read_metrics(root)}
    assert 0.35 <= rates[0] <= 0.60, "greedy, on the 64 held-out mazes"
    assert sorted(rates) == [0, 1]
    assert (root / "report.html").stat().st_size > 100_000
