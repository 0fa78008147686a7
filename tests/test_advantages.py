"""GRPO over the living: SkyRL's own numbers where nobody was lost, and nothing at all made out of noise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze import _compat

_compat.install()

from bare_trainer import trainer_of  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402

from skyrl_maze.advantages import (  # noqa: E402
    ESTIMATOR,
    TOLERANCE,
    grpo_living,
    has_signal,
    register,
    rows_without_signal,
)

Registry = ppo_utils.AdvantageEstimatorRegistry
# As this package pays: multiples of a power of two, whose sums are exact.
amounts = st.integers(-128, 128).map(lambda n: n / 64)


@pytest.fixture
def known_estimators():
    known = dict(Registry._functions)
    Registry._functions.pop(ESTIMATOR, None)
    yield Registry._functions
    Registry._functions.clear()
    Registry._functions.update(known)


@st.composite
def batches(draw, lost=False, spread=False):
    """Rewards, masks, groups: where `lost`, some samples are; with `spread`, no group's returns are equal."""
    length = draw(st.integers(1, 5))
    rewards, masks, index = [], [], []
    for group in range(draw(st.integers(1, 3))):
        rows = draw(
            st.lists(st.lists(amounts, min_size=length, max_size=length), min_size=2, max_size=5).filter(
                lambda rows: not spread or len({sum(row) for row in rows}) > 1
            )
        )
        for row in rows:
            alive = not (lost and draw(st.booleans()))
            mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length).filter(any))
            rewards.append(row)
            masks.append(mask if alive else [0] * length)
            index.append(f"maze-{group}")
    # SkyRL's groups lie in any order in a batch.
    order = draw(st.permutations(range(len(index))))
    return tuple([column[i] for i in order] for column in (rewards, masks, index))


def advantages(rewards, masks, index, **options):
    """Advantages per token, after a check that they are the returns too and lie on trainable tokens alone."""
    given, mask = torch.tensor(rewards, dtype=torch.float32), torch.tensor(masks)
    before = given.clone()
    found, returns = grpo_living(given, mask, np.array(index, dtype=object), **options)
    assert torch.equal(given, before)
    assert torch.equal(found, returns)
    assert found.dtype == given.dtype
    assert found.shape == given.shape
    assert torch.isfinite(found).all()
    assert not found[mask == 0].any()
    return found


@settings(deadline=None)
@given(batch=batches(spread=True), by_std=st.booleans())
def test_groups_with_spread_whose_samples_all_live_are_as_in_skyrl(batch, by_std):
    rewards, masks, index = batch
    theirs, _ = ppo_utils.compute_grpo_outcome_advantage(
        torch.tensor(rewards), torch.tensor(masks), np.array(index, dtype=object), grpo_norm_by_std=by_std
    )
    ours = advantages(rewards, masks, index, grpo_norm_by_std=by_std)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert ours.any()


def test_a_group_by_hand():
    found = advantages([[0, 1], [0, 0], [0, 0], [0, 1]], [[1, 1], [1, 0], [0, 1], [1, 1]], list("aaaa"))
    high = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # the sample deviation divides by n - 1
    expected = torch.tensor([[high, high], [-high, 0], [0, -high], [high, high]])
    torch.testing.assert_close(found, expected)
    plain = advantages([[0, 1], [0, 0]], [[1, 1], [1, 1]], list("aa"), grpo_norm_by_std=False)
    assert plain.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


@settings(deadline=None)
@given(
    row=st.lists(st.floats(0, 2, width=32), min_size=1, max_size=30),
    count=st.integers(2, 5),
    by_std=st.booleans(),
    data=st.data(),
)
def test_equal_returns_up_to_rounding_give_exactly_nothing(row, count, by_std, data):
    orders = [data.draw(st.permutations(row)) for _ in range(count)]
    # Summed by us, token by token, or already summed in the precision of the rewards.
    summed = [[float(np.cumsum(np.array(order, np.float32))[-1])] for order in orders]
    for rewards in (orders, summed):
        masks = [[1] * len(rewards[0])] * count
        assert not advantages(rewards, masks, ["g"] * count, grpo_norm_by_std=by_std).any()
        assert rows_without_signal(rewards, ["g"] * count, masks) == list(range(count))


def test_rounding_alone_is_large_in_skyrl_and_nothing_here():
    tenths = [[0.2, 0.7, 0.4, 0.9, 0.1, 0.3], [0.1, 0.2, 0.3, 0.9, 0.7, 0.4]]
    summed = [[float(np.cumsum(np.array(row, np.float32))[-1])] for row in tenths]
    assert summed[0] != summed[1]
    mask, index = torch.ones(2, 1), np.array(["g", "g"])
    theirs, _ = ppo_utils.compute_grpo_outcome_advantage(torch.tensor(summed), mask, index)
    assert theirs.abs().max() > 0.05
    assert not advantages(summed, mask.tolist(), ["g", "g"]).any()


@settings(deadline=None)
@given(batch=batches(lost=True), by_std=st.booleans(), what=st.sampled_from([0.0, 1e6, -7.5]))
def test_lost_samples_get_nothing_and_change_nothing_for_the_others(batch, by_std, what):
    rewards, masks, index = batch
    found = advantages(rewards, masks, index, grpo_norm_by_std=by_std)
    living = [i for i, mask in enumerate(masks) if any(mask)]
    lost = [i for i, mask in enumerate(masks) if not any(mask)]
    assert not found[lost].any()
    if living:
        alone = advantages(*([column[i] for i in living] for column in batch), grpo_norm_by_std=by_std)
        assert torch.equal(found[living], alone)
    # Whatever a lost sample was paid counts for nothing.
    other = [[what] * len(row) if i in lost else row for i, row in enumerate(rewards)]
    assert torch.equal(found, advantages(other, masks, index, grpo_norm_by_std=by_std))


@settings(deadline=None)
@given(batch=batches(lost=True))
def test_the_advantages_of_a_group_sum_to_nothing(batch):
    rewards, masks, index = batch
    full = [[1] * len(mask) if any(mask) else mask for mask in masks]
    found = advantages(rewards, full, index)[:, 0]
    for group in set(index):
        rows = [i for i, name in enumerate(index) if name == group]
        assert abs(found[rows].sum().item()) < 1e-4


def test_one_living_sample_alone_or_none_gives_nothing():
    assert not advantages([[1.0, 2.0]], [[1, 1]], ["g"]).any()
    assert not advantages([[5.0], [1.0], [9.0]], [[1], [0], [0]], list("ggg")).any()
    assert not advantages([[5.0], [1.0]], [[0], [0]], list("gg")).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float32, torch.bool])
def test_all_dtypes_of_rewards_and_masks_are_taken(dtype, mask_dtype):
    rewards = torch.tensor([[1.0], [0.0]], dtype=dtype)
    found, _ = grpo_living(rewards, torch.ones(2, 1, dtype=mask_dtype), ["g", "g"], grpo_norm_by_std=False)
    assert found.dtype == dtype
    assert found.tolist() == [[0.5], [-0.5]]


# ---- signal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.0, 1.0, -1.0, 1000.0])
def test_the_tolerance_is_relative_above_one(size):
    allowed = TOLERANCE * max(1.0, abs(size))
    assert not has_signal([size, size + 0.9 * allowed])
    assert has_signal([size, size + 1.1 * allowed])
    assert has_signal([size, size + 0.9 * allowed], tolerance=TOLERANCE / 2)


def test_fewer_than_two_returns_have_no_signal():
    assert not has_signal([])
    assert not has_signal([3.0])
    assert has_signal([3.0, 4.0])


def test_rows_without_signal_are_those_of_dull_groups():
    index = ["dull", "good", "dull", "lonely", "good", "lonely", "lost", "good"]
    masks = [[1, 1], [1, 0], [0, 1], [1, 1], [1, 1], [0, 0], [0, 0], [0, 0]]
    per_token = [[0.5, 0.5], [1, 0], [1.0, 0.0], [1, 1], [0, 0], [0, 0], [7, 0], [0, 3]]
    expected = [0, 2, 3, 5, 6]  # a lost sample of a good group stays with it
    assert rows_without_signal(per_token, index, masks) == expected
    assert rows_without_signal([float(sum(row)) for row in per_token], index, masks) == expected
    assert rows_without_signal([], [], []) == []


def test_rows_without_signal_take_another_tolerance():
    rewards, index, masks = [0.0, 0.01], ["g", "g"], [[1], [1]]
    assert rows_without_signal(rewards, index, masks) == []
    assert rows_without_signal(rewards, index, masks, tolerance=0.1) == [0, 1]


@settings(deadline=None)
@given(batch=batches(lost=True))
def test_a_group_without_signal_is_one_without_advantages(batch):
    rewards, masks, index = batch
    dull = set(rows_without_signal(rewards, index, masks))
    assert dull == set(rows_without_signal([sum(row) for row in rewards], index, masks))
    found = advantages(rewards, masks, index)
    for group in set(index):
        rows = [i for i, name in enumerate(index) if name == group]
        assert bool(found[rows].any()) != (rows[0] in dull)
        assert {row in dull for row in rows} == {rows[0] in dull}


# ---- in SkyRL -------------------------------------------------------------------------------------


def test_skyrl_reaches_the_estimator_by_its_name(known_estimators):
    register()
    register()
    assert known_estimators[ESTIMATOR] is grpo_living
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    index = np.array(["g", "g", "g"])
    for by_std in (True, False):
        found, returns = ppo_utils.compute_advantages_and_returns(
            rewards, mask, index, "grpo_living", config=None, grpo_norm_by_std=by_std
        )
        expected, _ = grpo_living(rewards, mask, index, grpo_norm_by_std=by_std)
        assert torch.equal(found, expected)
        assert torch.equal(returns, expected)
        assert found.any()


def test_to_register_leaves_the_other_estimators_alone(known_estimators):
    before = dict(known_estimators)
    register()
    assert {name: known_estimators[name] for name in before} == before
    assert before.keys() == known_estimators.keys() - {ESTIMATOR}


# ---- in the trainer -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer():
    register()
    trainer = trainer_of()
    assert trainer.cfg.trainer.algorithm.advantage_estimator == ESTIMATOR
    return trainer


def learned(trainer, rewards, masks, index):
    """The trainer's advantages, after a check that its response mask, wider than the loss's, stays."""
    wider = torch.ones(len(index), len(rewards[0]) + 1, dtype=torch.int64)
    loss_mask = torch.tensor([[*row, 0] for row in masks])
    batch = TrainingInputBatch(
        {
            "rewards": torch.tensor([[*row, 0.0] for row in rewards]),
            "response_mask": wider.clone(),
            "loss_mask": loss_mask.clone(),
            "values": None,
        }
    )
    batch.metadata = {"uids": list(index), "avg_response_length": 3.0}
    done = trainer.compute_advantages_and_returns(batch)
    assert torch.equal(done["response_mask"], wider)
    assert done["response_mask"].dtype == wider.dtype
    assert torch.equal(done["loss_mask"], loss_mask)
    assert torch.equal(done["advantages"], done["returns"])
    return done["advantages"]


def test_a_lost_sample_by_hand_in_the_trainer(trainer):
    rewards = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [50.0, 0.0, 0.0]]
    found = learned(trainer, rewards, [[1, 0, 1], [0, 1, 1], [0, 0, 0]], "ggg")
    high = 0.5 / (math.sqrt(1 / 2) + 1e-6)
    torch.testing.assert_close(found, torch.tensor([[high] * 4, [-high] * 4, [0.0] * 4]))
    assert trainer.all_metrics["loss/avg_raw_advantages_abs"] == pytest.approx(high), "of the living"


@settings(deadline=None)
@given(batch=batches(lost=True))
def test_in_the_trainer_too_samples_without_loss_get_nothing_and_change_nothing(trainer, batch):
    rewards, masks, index = batch
    found = learned(trainer, rewards, masks, index)
    living = [i for i, mask in enumerate(masks) if any(mask)]
    assert not found[[i for i in range(len(index)) if i not in living]].any()
    if living:
        alone = learned(trainer, *([column[i] for i in living] for column in batch))
        assert torch.equal(found[living], alone)
        expected = advantages(*batch)
        trainable = torch.tensor(masks, dtype=torch.bool)
        assert torch.equal(found[:, :-1][trainable], expected[trainable])


def test_a_batch_of_which_nothing_can_be_learned_has_finite_metrics(trainer):
    # The zero-variance filter leaves such a batch where all samples of each group fare alike.
    assert not learned(trainer, [[0.0, 1.0]] * 2, [[0, 0]] * 2, "gg").any()
    assert trainer.all_metrics["loss/avg_raw_advantages"] == 0
    assert trainer.all_metrics["loss/avg_raw_advantages_abs"] == 0
