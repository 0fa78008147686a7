"""Two evaluations of the same mazes: exact p-values, and a refusal where nothing can be compared."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from walks import solved, walked

from skyrl_maze.compare import compare, sign_test
from skyrl_maze.errors import RecordError


def played(wins, **options):
    """An evaluation of mazes 0, 1, ...: solved where `wins` says so."""
    return [
        solved(seed=i, index=i, max_turns=8, **options)
        if won
        else walked([], seed=i, index=i, max_turns=8, **options)
        for i, won in enumerate(wins)
    ]


@pytest.mark.parametrize(
    ("wins_a", "wins_b", "p_value"),
    [(0, 0, 1.0), (1, 1, 1.0), (0, 5, 2 / 32), (0, 6, 2 / 64), (1, 8, 2 * 10 / 512), (6, 16, 0.05248)],
)
def test_p_values_by_hand(wins_a, wins_b, p_value):
    assert sign_test(wins_a, wins_b) == sign_test(wins_b, wins_a) == pytest.approx(p_value, abs=5e-6)


@given(wins_a=st.integers(0, 40), wins_b=st.integers(0, 40))
def test_the_p_value_is_the_weight_of_all_outcomes_as_unlikely(wins_a, wins_b):
    """The definition of an exact two-sided test, for a fair coin."""
    n = wins_a + wins_b
    ways = [math.comb(n, k) for k in range(n + 1)]
    as_unlikely = sum(w for w in ways if w <= ways[wins_a])
    assert sign_test(wins_a, wins_b) == pytest.approx(as_unlikely / 2**n)


def test_thousands_of_mazes_are_counted_exactly():
    assert 0 < sign_test(0, 1000) < 1e-300
    assert sign_test(3000, 3000) == 1.0


def test_mazes_of_one_side_are_listed():
    found = compare(played([True, True, False, False]), played([True, False, True, False]))
    assert [maze.index for maze in found.better_a] == [1]
    assert [maze.index for maze in found.better_b] == [2]
    assert found.p_value == 1.0
    assert not found.is_real


def test_six_to_none_is_real_and_five_to_none_is_not():
    for count, is_real in ((6, True), (5, False)):
        found = compare(played([True] * count), played([False] * count))
        assert found.is_real is is_real
        assert len(found.better_a) == count


def test_samples_of_a_maze_are_one_maze():
    twice = [solved(sample=0), solved(sample=1, max_turns=5)]
    once = [walked([], sample=0, max_turns=5), solved(sample=1)]
    [maze] = compare(twice, once).mazes
    assert (maze.solved_a, maze.solved_b) == (1.0, 0.5)
    assert compare(twice, once).p_value == 1.0


def test_other_mazes_and_rules_are_refused():
    a = played([True, True])
    with pytest.raises(RecordError, match="cannot compare 2 mazes with 1: maze 2 was played in only one"):
        compare(a, played([True]))
    with pytest.raises(RecordError, match=r"maze 1 is .* in one and .* in the other"):
        compare(a, [solved(seed=1, index=0), solved(seed=0, index=1)])
    with pytest.raises(RecordError, match="goal_rule is stop in one and reach in the other"):
        compare(a, played([True, True], goal_rule="reach"))
    with pytest.raises(RecordError, match="max_turns is 8 in one and 9 in the other"):
        compare(a, [solved(seed=i, index=i, max_turns=9) for i in range(2)])
