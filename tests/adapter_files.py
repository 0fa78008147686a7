"""Made-up adapters for the tests of shards, merge and versions: tensors, splits, shards on disk."""

from pathlib import Path

import torch

from skyrl_maze import adapter, merge, shards, versions

RUN = "run-1"
RANK = 4


def name_of(module: str, side: str) -> str:
    return f"base_model.model.model.{module}.lora_{side}.weight"


def tensors_of(layers: int = 2, seed: int = 0, width: int = 6) -> dict[str, torch.Tensor]:
    """Random float32 matrices of a small adapter."""
    source = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(layers):
        for module in ("q_proj", "down_proj"):
            at = f"layers.{layer}.{module}"
            made[name_of(at, "A")] = torch.randn(RANK, width, generator=source)
            made[name_of(at, "B")] = torch.randn(width + 3, RANK, generator=source)
    return made


def even_cuts(rows: int, world_size: int) -> list[int]:
    """Where FSDP cuts `rows` rows: equal chunks, the last ones short or empty."""
    chunk = -(-rows // world_size)
    return [min(rank * chunk, rows) for rank in range(world_size + 1)]


def part_of(tensors, rank, world_size, cuts=None):
    """What `write_shard` gets on one rank; `cuts` gives the bounds of all ranks by name."""
    part = {}
    for name, whole in tensors.items():
        bounds = (cuts or {}).get(name) or even_cuts(len(whole), world_size)
        start, end = bounds[rank], bounds[rank + 1]
        part[name] = (whole[start:end], tuple(whole.shape), start)
    return part


def write_all(folder, tensors, world_size=3, dtype=torch.float32, cuts=None, **identity):
    """Write the shards of all ranks."""
    who = {"run_id": RUN, "step": 1, "attempt": 0, **identity}
    return [
        shards.write_shard(folder, rank, world_size, part_of(tensors, rank, world_size, cuts), dtype, **who)
        for rank in range(world_size)
    ]


def config_of(**changes):
    """A config that fits `tensors_of`."""
    given = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **changes}
    return adapter.peft_config(given, "some/model", "abc")


def merged(folder: Path, out: Path, allow_vision: bool = False):
    """Merge the shards in `folder` into the new folder `out`."""
    out.mkdir()
    plan = merge.plan_merge(shards.read_manifests(folder), allow_vision)
    return merge.apply_merge(plan, folder, out, config_of())


def published(root: Path, step: int, tensors=None, run_id=RUN, world_size=2) -> versions.Version:
    """Write, merge and publish one version."""
    version = versions.new_version(root, run_id, step)
    who = {"run_id": run_id, "step": step, "attempt": version.attempt}
    write_all(version.shards, tensors or tensors_of(seed=step), world_size, **who)
    plan = merge.plan_merge(shards.read_manifests(version.shards))
    versions.publish(version, lambda out: merge.apply_merge(plan, version.shards, out, config_of()))
    return version
