"""Baselines: one that never errs, one that does not look, one that only knows where the goal lies."""

import asyncio
import collections
import random

import pytest

from skyrl_maze import dataset
from skyrl_maze.actions import ACTIONS, STOP, GoalRule, Grammar, parse_action
from skyrl_maze.address import Sampling
from skyrl_maze.env import MazeConfig
from skyrl_maze.errors import ConfigError
from skyrl_maze.evaluate import figures
from skyrl_maze.maze import Maze, Move
from skyrl_maze.plan import Plan
from skyrl_maze.play import play_episode
from skyrl_maze.policies import BASELINES, Baseline, Situation, greedy_compass


def situation(maze, position, **changes):
    fields = {"goal_rule": GoalRule.STOP, "grammar": "tuple", "index": 0, "sample": 0, "turn": 0}
    return Situation(messages=[], maze=maze, position=position, **{**fields, **changes})


@pytest.mark.parametrize("goal_rule", GoalRule)
@pytest.mark.parametrize("grammar", Grammar)
@pytest.mark.parametrize("name", dataset.shipped_sets())
def test_the_oracle_solves_every_shipped_maze_on_a_shortest_path(name, grammar, goal_rule):
    mazes = tuple(dataset.load_set(name))
    needed = max(dataset.turns_needed(maze, goal_rule) for maze in mazes)
    config = MazeConfig(grammar=grammar, goal_rule=goal_rule, theme="visgym")
    plan = Plan(mazes, name, config, needed, 1, Sampling(8, 0.0, 1.0, 0))

    async def play():
        return [await play_episode(plan, (i, 0), Baseline("oracle", 0)) for i in range(len(mazes))]

    records = asyncio.run(play())
    found = figures(records)
    assert (found.solve_rate, found.spl, found.mean_excess_steps) == (1.0, 1.0, 0.0)
    assert [len(r.turns) for r in records] == [dataset.turns_needed(maze, goal_rule) for maze in mazes]


def test_random_says_all_five_alike():
    maze = dataset.load_set("visgym-easy-64")[0]
    policy = Baseline("random", 1)

    async def play():
        return [await policy.answer(situation(maze, maze.start, turn=turn)) for turn in range(5000)]

    counts = collections.Counter(parse_action(text, "tuple") for text in asyncio.run(play()))
    assert set(counts) == set(ACTIONS)
    assert all(850 < count < 1150 for count in counts.values())


def test_random_follows_from_the_seed_and_the_place():
    maze = dataset.load_set("visgym-easy-64")[0]

    async def said(seed, **place):
        return [
            await Baseline("random", seed).answer(situation(maze, maze.start, turn=turn, **place))
            for turn in range(30)
        ]

    first = asyncio.run(said(1))
    assert asyncio.run(said(1)) == first
    assert asyncio.run(said(2)) != first
    assert asyncio.run(said(1, index=1)) != first
    assert asyncio.run(said(1, sample=1)) != first


def test_greedy_compass_goes_where_the_goal_lies_and_walks_into_dead_ends():
    #   S . .     the way leads down and round, the goal lies to the right
    rows = ["#######", "#..#..#", "#.#.#.#", "#.#.#.#", "#.###.#", "#.....#", "#######"]
    maze = Maze.from_rows(rows, (1, 1), (1, 5))
    assert greedy_compass(situation(maze, (1, 1)), random.Random(0)) is Move.RIGHT
    assert greedy_compass(situation(maze, (1, 2)), random.Random(0)) is Move.LEFT, "a dead end"
    assert greedy_compass(situation(maze, (5, 5)), random.Random(0)) is Move.UP
    assert greedy_compass(situation(maze, (1, 5)), random.Random(0)) is STOP


def test_an_unknown_policy_is_refused_with_the_closest():
    with pytest.raises(ConfigError, match="random, greedy-compass; did you mean 'oracle'"):
        Baseline("oracel", 0)
    assert list(BASELINES) == ["oracle", "random", "greedy-compass"]
