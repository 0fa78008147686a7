"""Where a lesson ends: at weights of a wanted rate."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BISECTIONS = 20


class Stopper:
    """Ends a lesson where a rate lies in a range, be it between the weights of two checks.

    Where one check is below the range and the next above it, or the other way round, the straight line
    between their weights is searched by bisection.

    Args:
        weights: what the lesson changes.
        rate: of the model as it is.
        target: lowest and highest rate that will do.
    """

    def __init__(self, weights: list[Any], rate: Callable[[], float], target: tuple[float, float]) -> None:
        self._weights, self._rate, self._target = weights, rate, target
        self._before, self._before_rate = self._copy(), rate()

    def _copy(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._weights]

    def _side(self, rate: float) -> int:
        """-1 below the range, 0 in it, 1 above it."""
        return (rate > self._target[1]) - (rate < self._target[0])

    def check(self) -> tuple[float, bool]:
        """The rate, and whether it lies in the range; if not, the weights are as they were."""
        rate, after = self._rate(), self._copy()
        crossed = self._side(rate) * self._side(self._before_rate) < 0
        found = self._search(after, self._side(rate)) if crossed else rate
        if crossed and self._side(found):
            self._place(after, 1.0)
        self._before, self._before_rate = after, rate
        return (rate, False) if self._side(found) else (found, True)

    def _search(self, after: list[Tensor], side_after: int) -> float:
        low, high, rate = 0.0, 1.0, 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            self._place(after, middle)
            rate = self._rate()
            if not self._side(rate):
                break
            low, high = (low, middle) if self._side(rate) == side_after else (middle, high)
        return rate

    @torch.no_grad()
    def _place(self, after: list[Tensor], share: float) -> None:
        for weight, a, b in zip(self._weights, self._before, after, strict=True):
            weight.copy_(torch.lerp(a, b, share))
