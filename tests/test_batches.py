"""Batches: every row once an epoch, in an order that a number can name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.batches import TrainBatches


def batches(rows=13, size=3, epochs=4, seed=7):
    return TrainBatches(range(rows), list, size, epochs, seed)


def run(source, steps=10**6):
    """Batches of a training loop that stops after `steps` of them."""
    taken = []
    while len(taken) < steps and (epoch := list(itertools.islice(source, steps - len(taken)))):
        taken += epoch
    return taken


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1), st.data())
def test_a_run_that_goes_on_sees_what_it_would_have_seen(rows, size, epochs, seed, data):
    whole = run(batches(rows, size, epochs, seed))
    assert len(whole) == epochs * (rows // size)
    stopped = batches(rows, size, epochs, seed)
    steps = data.draw(st.integers(0, len(whole)))
    before = run(stopped, steps) if steps else []
    assert stopped.position == steps
    later = batches(rows, size, epochs, seed)
    later.position = stopped.position
    assert before + run(later) == whole


def test_an_epoch_holds_each_row_once_and_the_next_has_another_order():
    source = batches(rows=12)
    first, second = list(source), list(source)
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(12))
    assert first != second


def test_rows_that_fill_no_batch_are_left_out():
    assert len(batches(rows=13, size=5)) == 2
    assert [len(batch) for batch in batches(rows=13, size=5)] == [5, 5]


@pytest.mark.parametrize("steps", [4, 8])
def test_at_the_end_of_an_epoch_the_next_one_comes_whole(steps):
    stopped = batches(rows=12)
    run(stopped, steps)
    later = batches(rows=12)
    later.position = stopped.position
    assert len(list(later)) == 4


def test_seeds_have_orders_of_their_own():
    orders = [list(batches(seed=seed)) for seed in (1, 2)]
    assert orders[0] != orders[1]
    # The second epoch of one seed is not the first of the next.
    source = batches(seed=1)
    list(source)
    assert list(source) != orders[1]


def test_an_ended_run_gets_nothing():
    source = batches()
    source.end()
    assert list(source) == []


def test_the_position_counts_a_batch_before_it_is_used():
    source = batches()
    positions = [source.position for _ in source]
    assert positions == [1, 2, 3, 4]


def test_a_batch_is_what_collate_makes_of_it():
    source = TrainBatches("abcd", "".join, 2, 1, 0)
    assert sorted("".join(source)) == list("abcd")


def test_the_settings_tell_orders_apart():
    assert batches().settings() == {"rows": 13, "batch_size": 3, "seed": 7}
