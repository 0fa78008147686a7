"""The maze as a Gymnasium environment: the checker is content, and the rules are those of the other face."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from skyrl_maze.errors import ConfigError, MazeError
from skyrl_maze.gymnasium_env import MazeGymnasiumEnv, register_gymnasium
from skyrl_maze.maze import Maze, generate_maze
from skyrl_maze.render import render
from skyrl_maze.reward import RewardWeights, max_return

MAZE = generate_maze(7, seed=5)
WAY = [int(move) for move in MAZE.shortest_path()]
STOP = 4


def begin(**arguments):
    env = MazeGymnasiumEnv(size=7, **arguments)
    env.reset(options={"maze": MAZE.to_text()})
    return env


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
@pytest.mark.parametrize(
    "arguments", [{}, {"size": 5, "theme": "visgym", "goal_rule": "reach", "braid": 1.0}]
)
def test_gymnasium_s_own_checker_is_content(render_mode, arguments):
    register_gymnasium()
    register_gymnasium()
    check_env(gymnasium.make("skyrl_maze/Maze-v0", render_mode=render_mode, **arguments).unwrapped)


def test_spaces():
    env = MazeGymnasiumEnv(size=9, cell_px=8)
    assert env.action_space == gymnasium.spaces.Discrete(5)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (72, 72, 3), np.uint8)


def test_reset_draws_new_mazes_from_the_seed():
    env = MazeGymnasiumEnv(size=9, cell_px=4)
    first, _ = env.reset(seed=1)
    second, _ = env.reset()
    again, _ = env.reset(seed=1)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_a_given_maze_is_walked_to_the_end():
    env = MazeGymnasiumEnv(size=7, render_mode="rgb_array")
    picture, info = env.reset(options={"maze": MAZE.to_text()})
    assert np.array_equal(picture, render(MAZE, MAZE.start))
    assert info["position"] == MAZE.start
    assert info["distance"] == len(WAY)
    for left, action in zip(range(len(WAY) - 1, -1, -1), WAY, strict=True):
        assert info["action_mask"][action] == 1
        picture, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info["distance"]) == (0.0, False, False, left)
        assert np.array_equal(picture, render(MAZE, info["position"]))
        assert np.array_equal(picture, env.render())
    assert env.step(STOP)[1:4] == (1.0, True, False)


def test_the_mask_is_zero_for_walls():
    maze = Maze.from_text("#####/#S..#/###.#/#..G#/#####")
    _, info = MazeGymnasiumEnv(size=5).reset(options={"maze": maze.to_text()})
    assert info["action_mask"].tolist() == [1, 0, 0, 0, 1]
    assert info["action_mask"].dtype == np.int8


def test_the_oracle_earns_exactly_the_maximum():
    parts = {"success_weight": 0.7, "format_weight": 0.1, "shaping_weight": 0.3}
    env = begin(goal_rule="reach", **parts)
    total = 0.0
    for action in WAY:
        total += env.step(action)[1]
    assert total == max_return(RewardWeights(*parts.values()))


def test_the_budget_truncates():
    env = begin(max_turns=2)
    assert env.step(WAY[0])[2:4] == (False, False)
    assert env.step(WAY[1])[2:4] == (False, True)
    with pytest.raises(MazeError, match="ended after 2"):
        env.step(0)


def test_nothing_is_rendered_without_a_mode():
    assert begin().render() is None


@pytest.mark.parametrize("action", [5, -1, 1.0, "up", None])
def test_actions_that_do_not_exist(action):
    with pytest.raises(MazeError, match="give an int from 0 to 4"):
        begin().step(action)


def test_a_step_before_reset():
    with pytest.raises(MazeError, match=r"call reset\(\) first"):
        MazeGymnasiumEnv().step(0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 8}, MazeError, "size 8"),
        ({"braid": 2.0}, MazeError, "braid 2.0"),
        ({"theme": "visgim"}, MazeError, "did you mean 'visgym'"),
        ({"goal_rule": "x"}, ConfigError, "unknown goal_rule 'x'"),
        ({"max_turns": 0}, ConfigError, "max_turns 0"),
        ({"format_weight": -1.0}, ConfigError, "format = -1.0"),
        ({"render_mode": "human"}, ConfigError, "unknown render_mode 'human'; choose None or 'rgb_array'"),
    ],
)
def test_bad_arguments_show_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        MazeGymnasiumEnv(**arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mase": "x"}, ConfigError, r"unknown reset options \['mase'\]; the only one is 'maze'"),
        (
            {"maze": MAZE.to_text()},
            MazeError,
            "size 7: this environment shows mazes of size 9; make one with size=7",
        ),
        ({"maze": "x"}, MazeError, "exactly one of each"),
    ],
)
def test_bad_reset_options(options, error, message):
    with pytest.raises(error, match=message):
        MazeGymnasiumEnv(size=9).reset(options=options)


def test_without_gymnasium_the_error_says_what_to_install():
    code = "import sys; sys.modules['gymnasium'] = None; import skyrl_maze.gymnasium_env"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "SetupError" in done.stderr
    assert "pip install 'skyrl_maze[gymnasium]'" in done.stderr
