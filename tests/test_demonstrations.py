"""Demonstrations: in the environment's words, solved within the budget, every wrong turn recovered from."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze import demonstrations
from skyrl_maze.actions import STOP, GoalRule, Grammar, best_action, parse_action
from skyrl_maze.dataset import MazeSetSpec, draw_set, evaluation_keys, load_set, turns_needed
from skyrl_maze.demonstrations import (
    Demonstration,
    Demonstrations,
    DemoSettings,
    demonstrate,
    wrong_moves,
)
from skyrl_maze.env import MazeConfig, MazeEnv
from skyrl_maze.errors import ConfigError, DatasetError
from skyrl_maze.maze import Maze, Move, generate_maze
from skyrl_maze.pictures import data_of, take_out
from skyrl_maze.render import THEMES, encode_png
from skyrl_maze.reward import max_return

EVERY_KIND = list(itertools.product(Grammar, GoalRule, THEMES))
mazes = st.builds(
    generate_maze, st.sampled_from([5, 7, 9]), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0])
)


def answers(demo: Demonstration) -> list[str]:
    return [message["content"] for message in demo.messages if message["role"] == "assistant"]


@pytest.mark.parametrize(("grammar", "goal_rule", "theme"), EVERY_KIND)
@pytest.mark.parametrize("wordy", [False, True])
def test_a_replay_sees_the_same_and_earns_all_there_is(
    grammar: str, goal_rule: str, theme: str, wordy: bool
) -> None:
    weights = {"success_weight": 1.0, "format_weight": 0.25, "shaping_weight": 0.5}
    config = MazeConfig(
        theme, grammar=grammar, goal_rule=goal_rule, feedback=wordy, budget_note=wordy, **weights
    )
    for seed in range(3):
        maze = generate_maze(9, seed)
        demo = demonstrate(maze, DemoSettings(config, 60, detours=0.4))
        env = MazeEnv(config, {"maze": demo.maze.to_text(), "max_turns": demo.max_turns})
        chat, _ = env.init()
        total = 0.0
        for answer in answers(demo):
            step = env.step(answer)
            chat += [{"role": "assistant", "content": answer}, *step["observations"]]
            total += step["reward"]
        emptied, urls = take_out(chat)
        assert demo.messages == tuple(emptied)
        assert demo.pictures == tuple(map(data_of, urls))
        assert env.get_metrics()["success"] == 1.0
        assert total == max_return(config.weights)
        assert demo.wrong_turns > 0


def test_without_detours_it_is_a_shortest_episode() -> None:
    for seed in range(20):
        maze = generate_maze(9, seed, braid=0.5)
        demo = demonstrate(maze, DemoSettings(MazeConfig(), 60))
        taken = [parse_action(answer, "tuple") for answer in answers(demo)]
        assert taken == [*maze.shortest_path(), STOP]
        assert demo.right == (True,) * len(taken)


@settings(max_examples=150, deadline=None)
@given(
    maze=mazes,
    detours=st.floats(0, 1),
    slack=st.integers(0, 25),
    seed=st.integers(0, 99),
    goal_rule=st.sampled_from(list(GoalRule)),
)
def test_every_detour_is_recovered_from_within_the_budget(
    maze: Maze, detours: float, slack: int, seed: int, goal_rule: GoalRule
) -> None:
    needed = turns_needed(maze, goal_rule)
    config = MazeConfig(goal_rule=goal_rule, cell_px=4)
    demo = demonstrate(maze, DemoSettings(config, needed + slack, detours, seed))
    position, bumps, away = maze.start, 0, 0
    for answer, right, seen in zip(answers(demo), demo.right, demo.positions, strict=True):
        assert seen == position
        action = parse_action(answer, "tuple")
        if right:
            assert action == best_action(maze, position)
        else:
            assert action in wrong_moves(maze, position)
            after = maze.step(position, Move(action))
            bumps, away = bumps + (after == position), away + (after != position)
        position = position if action is STOP else maze.step(position, Move(action))
    assert position == maze.goal
    assert demo.right[-1]
    assert len(demo.right) == needed + bumps + 2 * away <= needed + slack
    if detours == 1 and slack >= 2:
        assert demo.wrong_turns > 0


@given(maze=mazes, seed=st.integers(0, 99))
def test_a_budget_without_slack_allows_no_detour(maze: Maze, seed: int) -> None:
    demo = demonstrate(maze, DemoSettings(MazeConfig(cell_px=4), turns_needed(maze, "stop"), 1.0, seed))
    assert demo.wrong_turns == 0


@given(maze=mazes)
def test_a_move_is_either_nearer_or_wrong(maze: Maze) -> None:
    for row, col in itertools.product(range(maze.size), repeat=2):
        if not maze.is_open((row, col)) or (row, col) == maze.goal:
            continue
        wrong = wrong_moves(maze, (row, col))
        assert best_action(maze, (row, col)) not in wrong
        assert len(wrong) < 4
    assert wrong_moves(maze, maze.goal) == list(Move)


def test_pictures_show_where_the_agent_stands() -> None:
    maze = generate_maze(9, 1)
    demo = demonstrate(maze, DemoSettings(MazeConfig(theme="visgym"), 40, 0.5))
    assert demo.pictures == tuple(encode_png(maze, position, "visgym") for position in demo.positions)


def test_the_chat_up_to_each_right_answer() -> None:
    demo = demonstrate(generate_maze(9, 0), DemoSettings(MazeConfig(), 60, 0.5))
    parts = list(demo.up_to_each_answer())
    assert len(parts) == demo.right.count(True) < len(demo.right)
    assert parts[-1] == demo
    for part in parts:
        turns = len(part.right)
        assert part.right == demo.right[:turns]
        assert part.right[-1]
        assert part.messages == demo.messages[: 2 * turns]
        assert (part.pictures, part.positions) == (demo.pictures[:turns], demo.positions[:turns])


# Many


def test_an_episode_depends_on_its_maze_and_the_seed_alone() -> None:
    one = DemoSettings(MazeConfig(), 40, 0.5, seed=1)
    many = list(Demonstrations(MazeSetSpec(count=5, seed=7), one))
    assert many == [demonstrate(demo.maze, one) for demo in reversed(many)][::-1]
    other = DemoSettings(MazeConfig(), 40, 0.5, seed=2)
    assert [demonstrate(demo.maze, other) for demo in many] != many


def test_another_process_makes_the_same() -> None:
    script = (
        "import hashlib; from skyrl_maze.demonstrations import *\n"
        "demos = Demonstrations(MazeSetSpec(count=5), DemoSettings(MazeConfig(), 40, 0.5))\n"
        "print(hashlib.sha256(repr([[d.messages, d.pictures] for d in demos]).encode()).hexdigest())"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]


def test_they_come_one_by_one() -> None:
    demos = Demonstrations(MazeSetSpec(count=10**9), DemoSettings(MazeConfig(), 40))
    stream: Iterator[Demonstration] = iter(demos)
    assert len({demo.maze.key for demo in itertools.islice(stream, 5)}) == 5


def test_no_maze_of_an_evaluation_set_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 16 puzzles of 5x5: 9 in a set that ships, 3 in that of a recipe, and 4 that are left."""
    every = draw_set(MazeSetSpec(sizes=[5], count=16))
    keys = [maze.key for maze in every]
    monkeypatch.setattr(demonstrations, "evaluation_keys", lambda: set(keys[:9]))
    settings = DemoSettings(MazeConfig(), 20)
    shown = Demonstrations(MazeSetSpec(sizes=[5], count=4, seed=3), settings, keys[9:12])
    assert {demo.maze.key for demo in shown} == set(keys[12:])
    with pytest.raises(DatasetError, match="found only 4 beside the 12 puzzles kept out for evaluation"):
        list(Demonstrations(MazeSetSpec(sizes=[5], count=5), settings, keys[9:12]))


def test_the_sets_that_ship_are_kept_out() -> None:
    demos = Demonstrations(MazeSetSpec(count=3), DemoSettings(MazeConfig(), 40), ["mine"])
    assert demos._held_out == evaluation_keys() | {"mine"}
    assert {maze.key for maze in load_set("visgym-easy-64")} < demos._held_out


def test_mazes_that_nobody_can_solve_are_passed_over_and_counted() -> None:
    demos = Demonstrations(MazeSetSpec(sizes=[9], count=30, seed=1), DemoSettings(MazeConfig(), 13))
    for _ in range(2):
        assert {len(demo.right) for demo in demos} == {13}
        assert demos.left_out > 0
    free = Demonstrations(MazeSetSpec(sizes=[9], count=30, seed=1), DemoSettings(MazeConfig(), 81))
    assert len(list(free)) == 30
    assert free.left_out == 0


def test_a_budget_that_is_too_small_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_maze.dataset._PATIENCE", 50)
    with pytest.raises(
        DatasetError, match="50 that were drawn cannot be solved within 5 turns, so raise max"
    ):
        list(Demonstrations(MazeSetSpec(sizes=[9], count=1), DemoSettings(MazeConfig(), 5)))
    maze = generate_maze(9, 0)
    with pytest.raises(DatasetError, match=f"cannot demonstrate the maze {maze.key}: it takes "):
        demonstrate(maze, DemoSettings(MazeConfig(), 5))


def test_impossible_settings_are_all_told() -> None:
    with pytest.raises(ConfigError) as caught:
        DemoSettings(MazeConfig(theme="tokns"), 0, 1.5)
    assert json.dumps(str(caught.value)).count("\\n  - ") == 3
    for part in (
        "did you mean 'tokens'?",
        "max_turns = 0: must be",
        "detours = 1.5: must be a number from 0",
    ):
        assert part in str(caught.value)


def test_impossible_sets_are_refused_before_anything_is_made() -> None:
    settings = DemoSettings(MazeConfig(), 40)
    with pytest.raises(DatasetError, match="cannot demonstrate 'visgym-easy-64': it is an evaluation set"):
        Demonstrations(MazeSetSpec(name="visgym-easy-64"), settings)
    with pytest.raises(DatasetError, match=r"cannot draw mazes to demonstrate: count=0: must be at least 1"):
        Demonstrations(MazeSetSpec(count=0), settings)
