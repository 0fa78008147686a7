"""How an adapter reaches the engines: ranks write shards, the head node merges, every engine loads it.

rank: own rows -> shards/        no collective
all ranks: what went wrong?      one exchange, so that none waits for a rank that failed
head node: shards -> adapter/    an actor that needs neither GPU nor model: see `merger`
rank 0: every engine loads it    one immutable folder a version, proven by each engine: see `serving`
all ranks: what went wrong?
"""

import asyncio
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_maze.adapter import CONFIG_FILE, peft_config
from skyrl_maze.durable import new_file
from skyrl_maze.errors import AdapterError
from skyrl_maze.merge import config_bytes
from skyrl_maze.serving import Served, serve_everywhere
from skyrl_maze.shards import write_shard
from skyrl_maze.together import failure_of, of_all_ranks, raise_together
from skyrl_maze.versions import Version, retain

# Below the ten minutes after which the ranks' collectives give up.
MERGE_LIMIT_S = 240
_NO_ROWS = slice(0, 0)


@dataclasses.dataclass(frozen=True)
class Share:
    """One version of the adapter, about to be shared."""

    version: Version
    base_model: str
    wire_dtype: str
    """The name of a torch dtype."""
    keep: int
    """How many complete versions stay."""
    merger: Any
    """Handle of a `merger.Merger`."""
    previous: Version | None = None
    """What the engines serve now, to go back to."""
    witnessed: bool = True
    """Whether the engines' workers can say which LoRA modules they apply."""
    published: bool = False
    """Whether the version is merged already, as that of a step that was just saved is."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """What sharing a version came to."""

    served: Served
    largest_b: float
    """The largest absolute value in any lora_B, as written; 0 before the first update."""


def local_rows(peft_model: Any) -> dict[str, tuple[torch.Tensor, tuple[int, ...], int]]:
    """This rank's rows of every LoRA matrix, by PEFT's name: rows, shape of the whole, number of the first.

    Where several ranks hold the same rows, the first of them gives them and the others none.
    """
    rows = {}
    for name, parameter in peft_model.named_parameters():
        if "lora_" not in name:
            continue
        shape = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            held, first = parameter, 0
            owner = dist.get_rank() == 0
        else:
            held, mesh = parameter.to_local(), parameter.device_mesh
            _, offset = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
            first = offset[0] if held.shape[0] else 0
            owner = all(
                placement.is_shard(0) or mesh.get_local_rank(dim) == 0
                for dim, placement in enumerate(parameter.placements)
            )
        tensor = held.detach() if owner else held.detach()[_NO_ROWS]
        rows[name.replace(".default.", ".")] = (tensor, shape, first if owner else 0)
    return rows


async def share_adapter(share: Share, peft_model: Any, client: Any, lora_name: str) -> Shared | None:
    """Share this rank's part, and return when every engine serves the version; all ranks call it together.

    Returns:
        On rank 0 what it came to, on the others None.

    Raises:
        AdapterError: on every rank alike, naming rank, node and cause.
    """
    if not share.published:
        await write_shards(share, peft_model)
    failure, served, rank = None, None, dist.get_rank()
    largest_b = await asyncio.to_thread(_largest_b, peft_model, getattr(torch, share.wire_dtype))
    if rank == 0:
        try:
            served = await _merge_and_load(share, client, lora_name)
        except Exception as error:
            failure = failure_of(error)
    all_b = of_all_ranks(failure, largest_b, f"publish {share.version.path}", AdapterError)
    return Shared(served, max(all_b)) if served is not None else None


async def write_shards(share: Share, peft_model: Any) -> None:
    """Write this rank's rows, and rank 0 the adapter's config beside them; all ranks call it together.

    Raises:
        AdapterError: on every rank alike, naming rank, node and cause.
    """
    version, rank, failure = share.version, dist.get_rank(), None
    config = peft_config(dataclasses.asdict(peft_model.peft_config["default"]), share.base_model)

    def write() -> None:
        write_shard(
            version.shards,
            rank,
            dist.get_world_size(),
            local_rows(peft_model),
            getattr(torch, share.wire_dtype),
            run_id=version.run_id,
            step=version.step,
            attempt=version.attempt,
        )
        if rank == 0:  # so that the folder can be merged by hand
            with new_file(version.shards / CONFIG_FILE) as file:
                file.write(config_bytes(config))

    try:
        await asyncio.to_thread(write)
    except Exception as error:
        failure = failure_of(error)
    raise_together(failure, f"write the shards of {version.path}", AdapterError)


def _largest_b(peft_model: Any, dtype: torch.dtype) -> float:
    """The largest absolute value in this rank's rows of any lora_B, as it is written."""
    rows = local_rows(peft_model).items()
    held = [tensor for name, (tensor, *_) in rows if ".lora_B." in name and tensor.numel()]
    return max((float(tensor.abs().max().to(dtype)) for tensor in held), default=0.0)


async def _merge_and_load(share: Share, client: Any, lora_name: str) -> Served:
    if not share.published:
        merging = share.merger.merge.remote(share.version)
        await asyncio.wait_for(asyncio.wrap_future(merging.future()), MERGE_LIMIT_S)
    adapter, previous = share.version.adapter, share.previous.adapter if share.previous else None
    served = await serve_everywhere(client.server_urls, lora_name, adapter, previous, share.witnessed)
    versions = share.version.path.parent
    await asyncio.to_thread(
        retain, versions.parent.parent, share.version.run_id, share.keep, in_use=[share.version]
    )
    return served
