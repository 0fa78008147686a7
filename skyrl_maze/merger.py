"""The actor on the head node that makes one adapter of the ranks' shards. Its process loads no torch."""

import shutil
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_maze.adapter import CONFIG_FILE, read_config
from skyrl_maze.complete import verify
from skyrl_maze.merge import apply_merge, plan_merge
from skyrl_maze.nodes import HEAD_RESOURCE, own_address
from skyrl_maze.shards import read_manifests
from skyrl_maze.versions import Version, publish, publish_folder


class Merger:
    """Merges shards where it was put, which is the head node if there is one."""

    def __init__(self, on_head: bool) -> None:
        self._on_head = on_head
        self._report: dict[str, Any] = {}

    def node_id(self) -> str:
        """Ray's name for the node that it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def merge(self, version: Version) -> dict[str, Any]:
        """Publish the adapter of a version whose shards are written; what it reports is kept."""
        started_s = time.monotonic()
        config = read_config(version.shards / CONFIG_FILE)
        plan = plan_merge(read_manifests(version.shards))
        publish(version, lambda scratch: apply_merge(plan, version.shards, scratch, config))
        self._report = {
            "step": version.step,
            "attempt": version.attempt,
            "path": str(version.adapter),
            "bytes": plan.bytes,
            "seconds": time.monotonic() - started_s,
            "node": own_address(),
            "on_head": self._on_head,
        }
        return self._report

    def export(self, version: Version, out: Path) -> None:
        """Copy the adapter of a published version to `out`, a folder of its own; an older one goes."""
        files = verify(version.path).files

        def copy(scratch: Path) -> None:
            for file in files:
                shutil.copyfile(version.path / file.path, scratch / Path(file.path).name)

        publish_folder(out, copy, version.run_id, version.step, version.attempt, replace=True)

    def report(self) -> dict[str, Any]:
        """What the last merge came to; empty before the first."""
        return self._report


def start_merger() -> Any:
    """An actor on the head node, or on this one where no node is marked as head. It takes no CPU slot."""
    on_head = HEAD_RESOURCE in ray.cluster_resources()  # type: ignore[no-untyped-call]
    if on_head:
        options: dict[str, Any] = {"resources": {HEAD_RESOURCE: 0.001}}
    else:
        here = ray.get_runtime_context().get_node_id()
        options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
    return ray.remote(num_cpus=0, **options)(Merger).remote(on_head)
