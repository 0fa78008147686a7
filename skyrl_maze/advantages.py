"""GRPO's advantage over the living samples of each group, as an estimator of SkyRL's registry.

SkyRL's own `grpo` scores a lost episode 0 in its group's mean and deviation, and turns the rounding noise of
a group with equal returns into advantages of order one. Here a sample without a single trainable token takes
no part, and a group without spread, or with fewer than two living samples, has no advantage.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

ESTIMATOR = "grpo_living"

# Equal returns of order one, each a sum of a few dozen float32 rewards, differ by less than this.
TOLERANCE = 1e-5
_EPSILON = 1e-6


def grpo_living(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable],
    grpo_norm_by_std: bool = True,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(return - mean) / deviation within each group, see equation 3 of arXiv:2402.03300.

    Args:
        token_level_rewards: float, (batch, response length).
        response_mask: (batch, response length); a sample whose row is all zero is not alive.
        index: the group of each sample.
        grpo_norm_by_std: whether to divide by the sample deviation.

    Returns:
        Advantages and returns, equal, each (batch, response length) in the dtype of the rewards; zero where
        the mask is.
    """
    returns = token_level_rewards.double().sum(dim=-1)
    living = response_mask.bool().any(dim=-1)
    advantages = torch.zeros_like(returns)
    for rows in _groups(index, living.tolist()).values():
        group = returns[rows]
        if not has_signal(group.tolist()):
            continue
        centred = group - group.mean()
        advantages[rows] = centred / (group.std() + _EPSILON) if grpo_norm_by_std else centred
    spread = (advantages.unsqueeze(-1) * response_mask).to(token_level_rewards.dtype)
    return spread, spread


def has_signal(returns: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Whether these returns of one group differ by more than rounding, relative to those above one."""
    if len(returns) < 2:
        return False
    return max(returns) - min(returns) > tolerance * max(1.0, *map(abs, returns))


def rows_without_signal(
    rewards: Sequence[Sequence[float] | float],
    index: Sequence[Hashable],
    loss_masks: Sequence[Sequence[int]],
    tolerance: float = TOLERANCE,
) -> list[int]:
    """The samples of groups from which nothing can be learned.

    Args:
        rewards: per token or per sample.
        index: the group of each sample.
        loss_masks: per token; a sample whose mask is all zero is not alive.
        tolerance: returns that differ by no more, relative to those above one, count as equal.
    """
    returns = [reward if isinstance(reward, float | int) else sum(reward) for reward in rewards]
    living = [any(mask) for mask in loss_masks]
    groups = _groups(index, living)
    dull = {key for key, rows in groups.items() if not has_signal([returns[i] for i in rows], tolerance)}
    return [i for i, key in enumerate(index) if key in dull or key not in groups]


def _groups(index: Sequence[Hashable], living: Sequence[bool]) -> dict[Hashable, list[int]]:
    """The living samples of each group that has any."""
    groups = defaultdict(list)
    for i, key in enumerate(index):
        if living[i]:
            groups[key].append(i)
    return groups


def register() -> None:
    """Make the estimator known to SkyRL in this process; calling it again does nothing."""
    if ESTIMATOR not in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.register(ESTIMATOR, grpo_living)
