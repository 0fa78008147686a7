"""One episode as token ids: what the engine was given, what it sampled, and whether the two fit.

Ids are only appended. Sampled ids stay as they are and carry the loss; all others are masked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_maze.pictures import PictureError

RULES = {
    "prefix": "each turn's engine prompt is the beginning of the training sequence",
    "lengths": "ids, loss mask, rewards and log-probabilities are equally many",
    "image_tokens": "image tokens stand exactly where pictures are, as many as their grids fill",
    "pictures": "every picture is there once, in order",
    "sampled_vision_token": "the policy sampled no token that stands for a picture",
    "finite": "log-probabilities and rewards are finite",
}


@dataclass(frozen=True)
class Picture:
    """A picture as the trainer and the engine take it."""

    url: str
    """Its `data:` address."""
    grid: tuple[int, int, int]
    """Patches along time, height and width."""
    tokens: int
    """Language tokens that it fills: the product of `grid` over the square of the merge size."""
    pixel_values: Any
    """Tensor of (patches, values of a patch), in the engine's dtype."""
    features: dict[str, Any] | None = None
    """`hash` and `kwargs` of the engine's own rendering, where pictures travel as tensors."""


@dataclass
class Trajectory:
    """The ids of an episode so far.

    Args:
        image_id: the token that stands for a part of a picture; None for a model without pictures.
        banned_ids: tokens that the policy may not sample.
    """

    image_id: int | None = None
    banned_ids: frozenset[int] = frozenset()
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where each picture begins in the whole sequence."""
    engine_prompts: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """What the engine says it was given, turn by turn, and how many ids the sequence had then."""
    _paid_at: int | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def ids(self) -> list[int]:
        """The whole sequence, pictures expanded: what the engine sees next."""
        return self.prompt_ids + self.response_ids

    @property
    def folded_ids(self) -> list[int]:
        """The whole sequence with one token a picture: what an engine that expands them is sent."""
        ids, folded, position = self.ids, [], 0
        for offset, picture in zip(self.offsets, self.pictures, strict=True):
            folded += ids[position : offset + 1]
            position = offset + picture.tokens
        return folded + ids[position:]

    def open(self, ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        """Begin with the first messages; `ids` holds one image token a picture."""
        self.prompt_ids += self._expanded(ids, pictures)

    def observe(self, ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        """Append what the environment showed, masked; `ids` holds one image token a picture."""
        expanded = self._expanded(ids, pictures)
        self._append(expanded, 0, [0.0] * len(expanded))

    def sample(self, ids: Sequence[int], logprobs: Sequence[float] | None, prompt: Sequence[int]) -> None:
        """Append what the policy sampled when it was given `prompt`."""
        self.engine_prompts.append((len(self), np.asarray(prompt, dtype=np.int64)))
        self._append(ids, 1, [0.0] * len(ids) if logprobs is None else logprobs)
        self._paid_at = len(self.response_ids) - 1 if ids else None

    def close_turn(self, end_of_turn_id: int, sampled: int) -> None:
        """Append the end-of-turn token, masked, unless it is the last of the `sampled` ids."""
        if not sampled or self.response_ids[-1] != end_of_turn_id:
            self._append([end_of_turn_id], 0, [0.0])

    def reward(self, amount: float) -> None:
        """Pay for the turn that ended: on its last sampled token, or on the last token if it has none."""
        self.rewards[-1 if self._paid_at is None else self._paid_at] += amount

    def expanded_length(self, ids: Sequence[int], pictures: Sequence[Picture]) -> int:
        """How many ids `observe` would append."""
        return len(ids) + sum(picture.tokens - 1 for picture in pictures)

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self.response_ids += ids
        self.loss_mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.rewards += [0.0] * len(ids)

    def _expanded(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        places = sum(token == self.image_id for token in ids)
        if places != len(pictures):
            raise PictureError(
                f"the chat template wrote {places} image tokens for {len(pictures)} pictures; "
                "its messages must show one for each"
            )
        coming = iter(pictures)
        expanded: list[int] = []
        for token in ids:
            if token != self.image_id:
                expanded.append(token)
                continue
            picture = next(coming)
            self.offsets.append(len(self) + len(expanded))
            self.pictures.append(picture)
            expanded += [token] * picture.tokens
        return expanded


def broken_rules(trajectory: Trajectory, shown_urls: Sequence[str], merge: int | None) -> list[str]:
    """The names of the `RULES` that a finished trajectory breaks; none is trained on.

    Args:
        trajectory: the episode.
        shown_urls: addresses of the pictures that the environment showed, in order.
        merge: patches along one side of a language token's square; None without pictures.
    """
    t, ids = trajectory, np.asarray(trajectory.ids, dtype=np.int64)
    lengths = {len(t.response_ids), len(t.loss_mask), len(t.rewards), len(t.logprobs)}
    places = zip(t.offsets, t.pictures, strict=False)
    expected = [offset + i for offset, picture in places for i in range(picture.tokens)]
    standing = np.flatnonzero(ids == t.image_id).tolist() if t.image_id is not None else []
    filled = [merge is not None and math.prod(p.grid) == p.tokens * merge**2 for p in t.pictures]
    sampled = (token for token, mask in zip(t.response_ids, t.loss_mask, strict=False) if mask)
    holds = {
        "prefix": all(np.array_equal(ids[:length], prompt) for length, prompt in t.engine_prompts),
        "lengths": len(lengths) == 1 and bool(t.response_ids),
        "image_tokens": standing == expected and all(filled) and len(t.offsets) == len(t.pictures),
        "pictures": [p.url for p in t.pictures] == list(shown_urls)
        and all(len(p.pixel_values) == math.prod(p.grid) for p in t.pictures),
        "sampled_vision_token": t.banned_ids.isdisjoint(sampled),
        "finite": all(isinstance(x, int | float) and math.isfinite(x) for x in [*t.logprobs, *t.rewards]),
    }
    return [rule for rule in RULES if not holds[rule]]
