"""Ranks that fail together: what went wrong on one is known to all before any of them waits for it."""

from typing import Any

import torch.distributed as dist

from skyrl_maze.errors import SkyRLMazeError
from skyrl_maze.faults import cause_of
from skyrl_maze.nodes import own_address


def failure_of(error: BaseException) -> str:
    """An error as one line that names this rank, its node and the cause below what Ray puts around it."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    text = str(error) if isinstance(error, SkyRLMazeError) else cause_of(error)
    return f"rank {dist.get_rank()} on {own_address()}: {text}"


def of_all_ranks(failure: str | None, value: Any, what: str, kind: type[SkyRLMazeError]) -> list[Any]:
    """The values of all ranks; the same error of this kind on each if something failed on any.

    Args:
        failure: what went wrong on this rank, as `failure_of` says it, or None.
        value: what this rank gives the others; anything that pickles.
        what: was to be done, as in "cannot <what>".
    """
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (failure, value))
    if found := [text for text, _ in outcomes if text is not None]:
        raise kind(f"cannot {what}: " + "; ".join(found))
    return [given for _, given in outcomes]


def raise_together(failure: str | None, what: str, kind: type[SkyRLMazeError]) -> None:
    """As `of_all_ranks`, where there is nothing to give."""
    of_all_ranks(failure, None, what, kind)
