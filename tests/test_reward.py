"""Rewards: exact sums in any order, progress that telescopes, and no pay for walking in circles."""

import functools
import itertools
import math
import operator
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.errors import ConfigError, RewardError
from skyrl_maze.maze import Maze, Move, generate_maze
from skyrl_maze.reward import (
    QUANTUM,
    RewardWeights,
    format_reward,
    max_return,
    quantize,
    shaping_reward,
    success_reward,
    weight_problems,
)

weight = st.floats(0, 4)


def add(amounts):
    """The plain sum, number by number; Python's own `sum` makes up for what rounding loses."""
    return functools.reduce(operator.add, amounts, 0.0)


def walk(maze, moves):
    """The cells that `moves` visit, the start first."""
    cells = [maze.start]
    for move in moves:
        cells.append(maze.step(cells[-1], move))
    return cells


def shaping_of_walk(weights, maze, cells):
    return [shaping_reward(weights, maze, a, b) for a, b in itertools.pairwise(cells)]


@given(amount=st.floats(-1e6, 1e6))
def test_quantize_gives_the_nearest_multiple(amount):
    quantized = quantize(amount)
    assert quantized % QUANTUM == 0
    assert abs(quantized - amount) <= QUANTUM / 2
    assert quantize(quantized) == quantized
    assert quantize(-amount) == -quantized


@given(amount=st.floats(allow_nan=False, allow_infinity=False))
def test_quantize_takes_every_finite_number(amount):
    assert math.isclose(quantize(amount), amount, rel_tol=1e-9, abs_tol=QUANTUM)


def test_tenths_depend_on_order_and_quantized_ones_do_not():
    tenths = [0.1, 0.2, 0.3]
    assert add(tenths) != add(reversed(tenths))
    quantized = [quantize(tenth) for tenth in tenths]
    assert add(quantized) == add(reversed(quantized))


@given(amounts=st.lists(st.floats(-1, 1), max_size=15), seed=st.integers(0, 2**32))
def test_sums_do_not_depend_on_order_even_in_float32(amounts, seed):
    quantized = [quantize(amount) for amount in amounts]
    shuffled = random.Random(seed).sample(quantized, k=len(quantized))
    total = np.float32(0)
    for amount in shuffled:
        total = np.float32(total + np.float32(amount))
    assert float(total) == add(shuffled) == add(quantized) == math.fsum(quantized)


@given(
    seed=st.integers(0, 1000),
    shaping=weight,
    braid=st.sampled_from([0.0, 1.0]),
    moves=st.lists(st.sampled_from(Move), max_size=60),
)
def test_shaping_telescopes_exactly_and_is_bounded(seed, shaping, braid, moves):
    maze = generate_maze(9, seed, braid)
    weights = RewardWeights(shaping=shaping)
    cells = walk(maze, moves)
    steps = shaping_of_walk(weights, maze, cells)
    assert add(steps) == shaping_reward(weights, maze, cells[0], cells[-1])
    assert add(steps) == add(sorted(steps))
    assert 0 <= add(steps) <= quantize(shaping)


@given(seed=st.integers(0, 1000), shaping=weight)
def test_a_circle_earns_nothing_and_the_way_to_the_goal_the_weight(seed, shaping):
    maze = generate_maze(9, seed)
    weights = RewardWeights(shaping=shaping)
    cells = walk(maze, maze.shortest_path())
    assert add(shaping_of_walk(weights, maze, [*cells[:5], *cells[:4][::-1]])) == 0
    assert add(shaping_of_walk(weights, maze, cells)) == quantize(shaping)


def test_shaping_measures_the_path_and_not_the_crow():
    # Moving right comes nearer as the crow flies and farther on foot.
    maze = Maze.from_text("#######/#S....#/#.#####/#.....#/#####.#/#....G#/#######")
    weights = RewardWeights(shaping=1.0)
    assert (maze.distance_to_goal[1, 1], maze.distance_to_goal[1, 2]) == (8, 9)
    assert shaping_reward(weights, maze, (1, 1), (1, 2)) == 0  # the potential is never below the start's
    assert shaping_reward(weights, maze, (2, 1), (1, 1)) == -1 / 8
    assert shaping_reward(weights, maze, (1, 1), (2, 1)) == 1 / 8


def test_success_and_format():
    weights = RewardWeights(success=2.0, format=0.5)
    assert success_reward(weights, True) == 2.0
    assert success_reward(weights, False) == 0.0
    assert format_reward(weights, 3, 4) == 0.375
    assert format_reward(weights, 0, 4) == 0.0
    assert format_reward(RewardWeights(format=1.0), 1, 3) == quantize(1 / 3)


@given(success=weight, form=weight, shaping=weight)
def test_max_return_is_the_exact_sum_of_the_parts(success, form, shaping):
    parts = [quantize(success), quantize(form), quantize(shaping)]
    assert max_return(RewardWeights(success, form, shaping)) == math.fsum(parts)


def test_default_weights_pay_success_alone():
    assert RewardWeights() == RewardWeights(1.0, 0.0, 0.0)
    assert max_return(RewardWeights()) == 1.0


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, -math.inf, True, "1", None])
def test_a_bad_weight_is_named(bad):
    with pytest.raises(ConfigError, match=r"format = .*: must be a finite number of 0 or more"):
        RewardWeights(format=bad)


def test_all_bad_weights_are_named_at_once():
    assert weight_problems({"a": -1.0, "b": 1, "c": math.nan}) == [
        "a = -1.0: must be a finite number of 0 or more",
        "c = nan: must be a finite number of 0 or more",
    ]


@pytest.mark.parametrize("amount", [math.nan, math.inf, -math.inf])
def test_an_amount_that_is_not_finite_is_refused(amount):
    with pytest.raises(RewardError, match=f"cannot pay a reward of {amount!r}"):
        quantize(amount)


def test_weights_whose_sum_is_not_finite_are_refused():
    with pytest.raises(RewardError, match="lower the reward weights"):
        max_return(RewardWeights(success=1.5e308, format=1.5e308))


@pytest.mark.parametrize(("understood", "turns"), [(0, 0), (2, 1), (-1, 1)])
def test_impossible_counts_are_refused(understood, turns):
    with pytest.raises(RewardError, match=f"{understood} understood of {turns} turns"):
        format_reward(RewardWeights(), understood, turns)
