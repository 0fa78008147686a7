"""Ranks that fail together: what went wrong on one is known to all before any of them waits for it."""

from typing import Any

import ray
import torch.distributed as dist

from skyrl_maze.errors import SkyRLMazeError
from skyrl_maze.faults import cause_of


def node() -> str:
    """The address of this node."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def failure_of(error: BaseException) -> str:
    """An error as one line that names this rank, its node and the cause below what Ray puts around it."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    text = str(error) if isinstance(error, SkyRLMazeError) else cause_of(error)
    return f"rank {dist.get_rank()} on {node()}: {text}"


def raise_together(failure: str | None, what: str, kind: type[SkyRLMazeError]) -> None:
    """Tell all ranks what failed on any; raise the same error of this kind on each if something did."""
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if found := [text for text in failures if text is not None]:
        raise kind(f"cannot {what}: " + "; ".join(found))
