"""The rules of a walk: what ends it, what it earns, what its numbers say."""

import functools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.actions import ACTIONS, STOP, GoalRule
from skyrl_maze.episode import Episode, StopReason
from skyrl_maze.errors import ConfigError, MazeError
from skyrl_maze.maze import Maze, Move, generate_maze
from skyrl_maze.reward import RewardWeights, max_return, quantize

# Shortest path: right, right, down, down.
MAZE = Maze.from_text("#####/#S..#/###.#/#..G#/#####")
WAY = MAZE.shortest_path()
DEFAULT = RewardWeights()


def play(actions, goal_rule="stop", max_turns=20, weights=DEFAULT, maze=MAZE):
    """The episode after `actions`, and its turns."""
    episode = Episode(maze, goal_rule, max_turns, weights)
    return episode, [episode.take(action) for action in actions]


def earned(turns):
    return functools.reduce(operator.add, (turn.reward for turn in turns), 0.0)


def test_stop_on_the_goal_solves():
    episode, turns = play([*WAY, STOP])
    assert [turn.terminated for turn in turns] == [False] * 4 + [True]
    assert [turn.reward for turn in turns] == [0.0] * 4 + [1.0]
    assert episode.stop_reason is StopReason.GOAL


def test_arriving_does_not_solve_under_stop():
    episode, turns = play(WAY)
    assert not episode.ended
    assert episode.reached
    assert earned(turns) == 0


def test_arriving_solves_under_reach():
    episode, turns = play(WAY, "reach")
    assert (turns[-1].terminated, turns[-1].truncated, turns[-1].reward) == (True, False, 1.0)
    assert episode.stop_reason is StopReason.GOAL


@pytest.mark.parametrize("goal_rule", list(GoalRule))
def test_stop_elsewhere_ends_unsolved(goal_rule):
    episode, turns = play([Move.RIGHT, STOP], goal_rule)
    assert (turns[-1].terminated, turns[-1].truncated, turns[-1].reward) == (True, False, 0.0)
    assert episode.stop_reason is StopReason.STOPPED_EARLY


def test_stop_after_leaving_the_goal_is_early():
    episode, _ = play([*WAY, Move.UP, STOP])
    assert episode.stop_reason is StopReason.STOPPED_EARLY
    assert episode.reached


def test_the_budget_truncates_an_unfinished_walk():
    episode, turns = play(WAY, max_turns=4)
    assert [(turn.terminated, turn.truncated) for turn in turns] == [(False, False)] * 3 + [(False, True)]
    assert episode.stop_reason is StopReason.OUT_OF_TURNS
    assert episode.turns_left == 0


@pytest.mark.parametrize(("goal_rule", "actions"), [("stop", [*WAY, STOP]), ("reach", WAY)])
def test_ending_on_the_last_turn_is_not_truncation(goal_rule, actions):
    _, turns = play(actions, goal_rule, max_turns=len(actions))
    assert (turns[-1].terminated, turns[-1].truncated, turns[-1].reward) == (True, False, 1.0)


def test_without_a_budget_nothing_truncates():
    episode, _ = play([None] * 1000, max_turns=None)
    assert not episode.ended
    assert episode.turns_left is None


def test_walls_and_failures_cost_a_turn_and_move_nothing():
    episode, turns = play([Move.UP, None, Move.RIGHT])
    assert [turn.bumped for turn in turns] == [True, False, False]
    assert (episode.turns, episode.moves, episode.wall_bumps, episode.parse_failures) == (3, 2, 1, 1)
    assert episode.position == (1, 2)
    assert episode.turns_left == 17


def test_nothing_follows_the_end():
    episode, _ = play([STOP])
    with pytest.raises(
        MazeError, match=r"cannot take turn 2: .* ended after 1 \(stopped_early\); start a new one"
    ):
        episode.take(Move.RIGHT)
    assert episode.turns == 1


@pytest.mark.parametrize("max_turns", [0, -1, 2.0, True, "5"])
def test_impossible_budgets(max_turns):
    with pytest.raises(ConfigError, match=f"max_turns {max_turns!r}: give an int of 1 or more"):
        Episode(MAZE, "stop", max_turns, DEFAULT)


def test_an_unknown_goal_rule():
    with pytest.raises(ConfigError, match="'stopp'; choose one of stop, reach; did you mean 'stop'"):
        Episode(MAZE, "stopp", 5, DEFAULT)


def test_format_is_paid_once_at_the_end():
    weights = RewardWeights(success=0.0, format=1.0)
    _, turns = play([None, Move.RIGHT, STOP], weights=weights)
    assert [turn.reward for turn in turns] == [0.0, 0.0, quantize(2 / 3)]
    _, turns = play([None, Move.RIGHT], weights=weights, max_turns=2)
    assert [turn.reward for turn in turns] == [0.0, 0.5]


def test_shaping_pays_each_turn():
    weights = RewardWeights(success=1.0, shaping=0.5)
    _, turns = play([*WAY[:2], Move.LEFT, None, Move.UP, STOP], weights=weights)
    assert [turn.reward for turn in turns] == [0.125, 0.125, -0.125, 0.0, 0.0, 0.0]


@given(
    size=st.sampled_from([5, 7, 9, 13]),
    seed=st.integers(0, 10**6),
    braid=st.floats(0, 1),
    goal_rule=st.sampled_from(GoalRule),
    parts=st.tuples(*[st.floats(0, 3)] * 3),
)
def test_the_oracle_earns_exactly_the_maximum(size, seed, braid, goal_rule, parts):
    maze, weights = generate_maze(size, seed, braid), RewardWeights(*parts)
    way = [*maze.shortest_path(), *([STOP] if goal_rule is GoalRule.STOP else [])]
    episode, turns = play(way, goal_rule, len(way), weights, maze)
    assert earned(turns) == max_return(weights)
    assert episode.metrics()["spl"] == 1.0


@given(
    seed=st.integers(0, 10**6),
    goal_rule=st.sampled_from(GoalRule),
    actions=st.lists(st.sampled_from([*ACTIONS[:4], None]) | st.just(STOP), max_size=40),
    parts=st.tuples(*[st.floats(0, 3)] * 3),
)
def test_no_walk_earns_more_than_the_oracle(seed, goal_rule, actions, parts):
    maze, weights = generate_maze(7, seed, 0.5), RewardWeights(*parts)
    episode, turns = Episode(maze, goal_rule, 30, weights), []
    for action in actions:
        if not episode.ended:
            turns.append(episode.take(action))
    assert 0 <= earned(turns) <= max_return(weights)
    assert sum(turn.terminated + turn.truncated for turn in turns) == episode.ended
    metrics = episode.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("stop_reason/")) == 1
    assert metrics["terminated"] + metrics["truncated"] + metrics["stop_reason/cut"] == 1
    assert metrics["spl"] <= metrics["success"] <= metrics["reached"]


def test_metrics_of_a_detour():
    episode, _ = play([None, Move.UP, Move.RIGHT, Move.LEFT, *WAY, STOP])
    assert episode.metrics() == {
        "success": 1.0,
        "reached": 1.0,
        "spl": 4 / 7,  # the bump counts as a move, the failure does not
        "turns": 9.0,
        "shortest_path": 4.0,
        "parse_failures": 1.0,
        "wall_bumps": 1.0,
        "terminated": 1.0,
        "truncated": 0.0,
        "stop_reason/goal": 1.0,
        "stop_reason/stopped_early": 0.0,
        "stop_reason/out_of_turns": 0.0,
        "stop_reason/cut": 0.0,
    }
    assert {type(value) for value in episode.metrics().values()} == {float}


def test_metrics_of_an_episode_that_was_cut():
    episode, _ = play([])
    metrics = episode.metrics()
    assert {name for name, value in metrics.items() if value} == {"shortest_path", "stop_reason/cut"}
