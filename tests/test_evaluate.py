"""Figures: intervals as published, paths as the environment counts them, and no chance in them."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import solved, walked, walks

from skyrl_maze.env import MazeEnv
from skyrl_maze.errors import RecordError
from skyrl_maze.evaluate import figures, metrics, spl, wilson_interval
from skyrl_maze.maze import generate_maze

Z = 1.959963984540054

evaluations = st.lists(walks(), min_size=1, max_size=6, unique_by=lambda r: (r.index, r.sample))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_intervals_are_those_of_the_literature(successes, trials, low, high):
    """Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3."""
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(counts=st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_bound_is_as_far_from_the_share_as_the_test_allows(counts):
    """The definition: the shares `p` with |share - p| <= z * sqrt(p * (1 - p) / n)."""
    successes, trials = counts
    low, high = wilson_interval(successes, trials)
    share = successes / trials
    assert 0 <= low <= share <= high <= 1
    for bound, at_the_end in ((low, successes == 0), (high, successes == trials)):
        allowed = Z * math.sqrt(bound * (1 - bound) / trials)
        assert abs(share - bound) == (0 if at_the_end else pytest.approx(allowed, rel=1e-6, abs=1e-12))


@given(trials=st.integers(1, 1000), data=st.data())
def test_intervals_are_mirrored(trials, data):
    successes = data.draw(st.integers(0, trials))
    low, high = wilson_interval(successes, trials)
    mirrored = wilson_interval(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (1, 0), (-1, 5), (6, 5)])
def test_an_interval_of_nothing_is_refused(successes, trials):
    with pytest.raises(RecordError, match="give 1 trial or more"):
        wilson_interval(successes, trials)


def test_figures_by_hand():
    border = "up" if generate_maze(7, 2).start[0] == 1 else "down"
    records = [
        solved(seed=0, index=0),
        walked(["<action>stop</action>"], seed=1, index=1),
        walked(["hm", *[f"<action>{border}</action>"] * 2, "<action>stop</action>"], seed=2, size=7, index=2),
        solved(seed=3, index=3).failed("engine: gone"),
    ]
    found = figures(records)
    assert (found.episodes, found.errors, found.solve_rate) == (4, 1, 0.25)
    assert (found.solve_rate_low, found.solve_rate_high) == wilson_interval(1, 4)
    assert found.spl == 0.25
    assert found.mean_excess_steps == 0.0
    assert found.turns == 5 + 1 + 4 + 5
    assert found.parse_failures == 1
    assert found.wall_bumps == 2
    assert found.stop_reasons == {"goal": 2, "stopped_early": 2}
    assert [(g.size, g.episodes, g.solve_rate) for g in found.by_size] == [(5, 3, 1 / 3), (7, 1, 0.0)]
    assert sum(group.episodes for group in found.by_shortest_path) == 4


def test_nothing_solved_has_no_excess():
    found = figures([walked([])])
    assert found.mean_excess_steps is None
    assert "eval/mean_excess_steps" not in metrics(found)
    assert metrics(found)["eval/solve_rate"] == 0.0


@given(record=walks())
def test_an_episode_counts_as_the_environment_counts(record):
    """`Episode.metrics` counts while it is played, the record afterwards."""
    config = {"grammar": "keyword", "goal_rule": record.goal_rule}
    env = MazeEnv(config, {"maze": record.maze, "max_turns": record.max_turns})
    env.init([])
    for turn in record.turns:
        env.step(turn.text)
    counted = env.get_metrics()
    assert spl(record) == counted["spl"]
    assert record.success == counted["success"]
    assert record.parse_failures == counted["parse_failures"]
    assert record.wall_bumps == counted["wall_bumps"]
    assert len(record.turns) == counted["turns"]
    assert record.shortest_path == counted["shortest_path"]


@settings(max_examples=40, deadline=None)
@given(records=evaluations, seed=st.integers(0, 9))
def test_order_does_not_matter(records, seed):
    shuffled = random.Random(seed).sample(records, len(records))
    assert figures(shuffled) == figures(records)


@settings(max_examples=40, deadline=None)
@given(records=evaluations)
def test_groups_hold_every_episode_once(records):
    found = figures(records)
    for groups in (found.by_size, found.by_shortest_path):
        assert sum(group.episodes for group in groups) == len(records)
        total = sum(group.solve_rate * group.episodes for group in groups)
        assert total == pytest.approx(found.solve_rate * len(records))
    assert sum(found.stop_reasons.values()) == len(records)
    assert 0 <= found.spl <= found.solve_rate


def test_no_episodes_and_twins_are_refused():
    with pytest.raises(RecordError, match="at least one"):
        figures([])
    with pytest.raises(RecordError, match="maze 2, sample 1 is there twice"):
        figures([solved(index=2, sample=1), walked([], index=2, sample=1)])
