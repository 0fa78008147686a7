"""A sum over processes placed as the policy's ranks are: sees each one's GPU, and tries the network."""

import contextlib
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from skyrl_maze.faults import cause_of

_GRACE_S = 15  # in which a rank says itself that its limit is over


@dataclass(frozen=True)
class RankView:
    """What one rank sees."""

    node: str
    """Address of its node."""
    device: str
    """Name of its GPU; empty if it sees none."""
    port: int
    """A free port there."""


@dataclass(frozen=True)
class Reduced:
    """What the attempt came to."""

    ranks: dict[int, RankView] = field(default_factory=dict)
    backend: str = ""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    unplaced: bool = False
    """Whether the ranks got no place in time."""


class _Rank:
    """One rank, in a process of its own."""

    def look(self) -> RankView:
        import ray
        import torch

        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        return RankView(str(ray.util.get_node_ip_address()), device, port)  # type: ignore[no-untyped-call]

    def sum(self, rank: int, ranks: int, address: str, backend: str, limit_s: float) -> list[float]:
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            backend, f"tcp://{address}", rank=rank, world_size=ranks, timeout=timedelta(seconds=limit_s)
        )
        try:
            numbers = torch.tensor([rank + 1.0, 1.0], device="cuda" if backend == "nccl" else "cpu")
            dist.all_reduce(numbers)
            return [float(number) for number in numbers.tolist()]
        finally:
            dist.destroy_process_group()


def reduce_over_ranks(ranks: int, limit_s: float) -> Reduced:
    """Place `ranks` processes with a GPU each as SkyRL does, and have them sum a few numbers.

    NCCL where every rank sees a GPU, else gloo. Each of the three steps has `limit_s` seconds. What was
    started is gone in the end.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"GPU": 1, "CPU": 1}] * ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(limit_s):
            return Reduced(unplaced=True)
        placed: Any = ray.remote(num_cpus=1, num_gpus=1)(_Rank)
        for rank in range(ranks):
            there = PlacementGroupSchedulingStrategy(group, rank)
            actors.append(placed.options(scheduling_strategy=there).remote())
        return _reduced(actors, limit_s, _nodes_of(group))
    finally:
        for actor in actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        remove_placement_group(group)


def _nodes_of(group: Any) -> dict[int, str]:
    from ray.util import placement_group_table

    return {
        int(index): str(node) for index, node in placement_group_table(group)["bundles_to_node_id"].items()
    }


def _reduced(actors: list[Any], limit_s: float, nodes: dict[int, str]) -> Reduced:
    views, problems = _all([actor.look.remote() for actor in actors], limit_s, nodes)
    if problems:
        return Reduced(views, problems=tuple(problems))
    backend = "nccl" if all(view.device for view in views.values()) else "gloo"
    address, began_s = f"{views[0].node}:{views[0].port}", time.monotonic()
    calls = [
        actor.sum.remote(rank, len(actors), address, backend, limit_s) for rank, actor in enumerate(actors)
    ]
    sums, problems = _all(calls, limit_s + _GRACE_S, nodes)
    right = [len(actors) * (len(actors) + 1) / 2, float(len(actors))]
    problems += [f"rank {r} has the sum {s} and not {right}" for r, s in sums.items() if s != right]
    return Reduced(views, backend, time.monotonic() - began_s, tuple(problems))


def _all(calls: list[Any], limit_s: float, nodes: dict[int, str]) -> tuple[dict[int, Any], list[str]]:
    """The answers by rank, and a line for each rank without one."""
    import ray

    ready, _late = ray.wait(calls, num_returns=len(calls), timeout=limit_s)
    answers, problems = dict[int, Any](), list[str]()
    for rank, call in enumerate(calls):
        who = f"rank {rank} on node {nodes.get(rank, 'unknown')[:8]}"
        if call not in ready:
            problems.append(f"{who} did not answer within {limit_s:g} s")
            continue
        try:
            answers[rank] = ray.get(call, timeout=limit_s)
        except Exception as error:  # whatever a rank may say
            problems.append(f"{who}: {cause_of(getattr(error, 'cause', None) or error)}")
    return answers, problems
