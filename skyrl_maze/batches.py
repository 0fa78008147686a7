"""The training rows in batches, in an order that follows from a seed and the number of batches alone.

So a run that goes on sees the rows that it would have seen, whatever machine it goes on with, and all that a
checkpoint keeps of it is one number.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


class TrainBatches:
    """Stands where SkyRL's trainer has its data loader; each iteration is the rest of an epoch.

    Args:
        rows: the data set.
        collate: makes a batch of a list of rows.
        batch_size: rows of a batch; those that fill no batch are left out of their epoch.
        epochs: after so many nothing comes.
        seed: of the order; each epoch has its own.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        collate: Callable[[list[Any]], Any],
        batch_size: int,
        epochs: int,
        seed: int,
    ) -> None:
        self._rows, self._collate = rows, collate
        self._batch_size, self._epochs, self._seed = batch_size, epochs, seed
        self.position = 0
        """Batches that were handed out, over all epochs."""

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._rows) // self._batch_size

    def end(self) -> None:
        """Hand out no more."""
        self.position = self._epochs * len(self)

    def __iter__(self) -> Iterator[Any]:
        if self.position >= self._epochs * len(self):
            return
        epoch, first = divmod(self.position, len(self))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)).tolist()
        for batch in range(first, len(self)):
            chosen = order[batch * self._batch_size : (batch + 1) * self._batch_size]
            self.position += 1  # before the batch is used: a checkpoint is saved while it still is
            yield self._collate([self._rows[row] for row in chosen])

    def state_dict(self) -> dict[str, int]:
        """The position, as SkyRL's own checkpoints keep it."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from what `state_dict` gave."""
        self.position = state["position"]

    def settings(self) -> dict[str, int]:
        """What the order follows from."""
        return {"rows": len(self._rows), "batch_size": self._batch_size, "seed": self._seed}
