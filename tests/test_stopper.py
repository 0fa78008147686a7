"""A lesson ends in the range, or goes on as if nobody had looked."""

import pytest
import torch

from skyrl_maze.stopper import Stopper


def stopped(curve, start=0.0, steps=20, step=0.1, target=(0.4, 0.5)):
    """Where a stopper ends a weight that grows by `step`, or the weight at the end and False."""
    weight = torch.tensor([start])
    stopper = Stopper([weight], lambda: curve(float(weight)), target)
    for _ in range(steps):
        weight += step
        rate, ended = stopper.check()
        assert rate == curve(float(weight))
        if ended:
            return float(weight), True
    return float(weight), False


def test_a_lesson_ends_in_the_range_that_it_jumps_over():
    for curve, start in ((lambda w: w**8, 0.35), (lambda w: 1 - w**8, 0.35), (lambda w: w, 0.02)):
        at, ended = stopped(curve, start)
        assert ended
        assert 0.4 <= curve(at) <= 0.5


def test_a_lesson_goes_on_where_there_is_nothing_between_two_checks():
    at, ended = stopped(lambda w: float(w > 0.55), steps=10)
    assert (at, ended) == (pytest.approx(1.0), False), "the search leaves no trace"
    assert not stopped(lambda w: 0.3)[1]
