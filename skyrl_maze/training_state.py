"""What a rank must save to go on: the trained parameters, the optimizer's state, its schedule, its chance.

The tensors are saved by `torch.distributed.checkpoint` as safetensors files that know their place in the
whole, so that any number of ranks can load them. What is no tensor is the same on every rank, save the state
of the random generators, and lies in a file of JSON for each rank.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from skyrl_maze.durable import Fields, explained, new_file, read_sealed, require_space, sealed
from skyrl_maze.errors import CheckpointError
from skyrl_maze.faults import cause_of
from skyrl_maze.shards import shard_name
from skyrl_maze.together import failure_of, raise_together

_TRAINED = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
_ROOM_BYTES = 16 << 20  # for headers and the small files


def save(folder: Path, model: Any, optimizer: Any, scheduler: Any, random_state: dict[str, Any]) -> None:
    """Write this rank's part into `folder`, which all ranks see; all ranks call it together.

    Args:
        model: a model, sharded or not, of which some parameters are trained.
        random_state: as `FSDPStrategy.get_rng_state` gives it.

    Raises:
        CheckpointError: on every rank alike, naming rank, node and cause.
    """
    rank, tensors = dist.get_rank(), _tensors(model, optimizer)
    size = sum(_local(tensor).nbytes for tensor in tensors.values())

    def write_record() -> None:
        require_space(folder, size * dist.get_world_size() + _ROOM_BYTES)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        chance = _random_to_json(random_state)
        record = {"groups": groups, "schedule": scheduler.state_dict(), "random": chance}
        with new_file(folder / f"{shard_name(rank)}.json") as file:
            file.write(sealed(record))

    _all_do(write_record, f"write the checkpoint {folder}", folder)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    _all_do(lambda: save_tensors(tensors, storage_writer=writer), f"write the checkpoint {folder}", folder)


def load(folder: Path, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any] | None:
    """Put back what any number of ranks saved into `folder`; all ranks call it together.

    Returns:
        The state of this rank's random generators; None if fewer ranks saved one.

    Raises:
        CheckpointError: on every rank alike, naming rank, node and cause.
    """
    tensors = _tensors(model, optimizer)  # those of the model and the optimizer, to be filled in place
    reader = HuggingFaceStorageReader(str(folder))
    records: list[dict[str, Any]] = []

    def read_records() -> None:
        _check_names(set(reader.read_metadata().state_dict_metadata), set(tensors))
        records.append(_record(folder / f"{shard_name(0)}.json"))
        own = folder / f"{shard_name(dist.get_rank())}.json"
        if own.exists():
            records.append(_record(own))

    _all_do(read_records, f"read the checkpoint {folder}", folder)
    _all_do(lambda: load_tensors(tensors, storage_reader=reader), f"read the checkpoint {folder}", folder)
    common, *own = records
    go_on(optimizer, scheduler, common["groups"], common["schedule"])
    return _random_from_json(own[0]["random"]) if own else None


def go_on(optimizer: Any, scheduler: Any, groups: list[dict[str, Any]], schedule: dict[str, Any]) -> None:
    """Put the schedule where it was, at the rate that the settings say now.

    The optimizer's settings are those of today: what was saved of them only tells how far the schedule had
    taken the rate from where it began.

    Args:
        groups: the saved settings of the optimizer's groups, `lr` and `initial_lr` among them.
        schedule: the scheduler's saved state.
    """
    rates = [group["initial_lr"] for group in optimizer.param_groups]
    scheduler.load_state_dict(schedule)
    for group, rate, saved in zip(optimizer.param_groups, rates, groups, strict=True):
        began, was = saved["initial_lr"], saved["lr"]
        if rate == began:
            group["lr"] = was
            continue
        group["lr"] = was / began * rate if began else rate
        logger.info(f"the learning rate is {rate:g} now, and was {began:g} when the checkpoint was saved")
    scheduler.base_lrs = rates
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _record(path: Path) -> dict[str, Any]:
    record = read_sealed(path)
    Fields(record, str(path), "groups schedule random")
    return record


def _tensors(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Trained parameters and optimizer state by name; an optimizer that has not stepped gets a state of 0."""
    trained = get_model_state_dict(model, options=_TRAINED)
    state = get_optimizer_state_dict(model, optimizer, options=_TRAINED)
    return {name: value for name, value in {**trained, **state}.items() if isinstance(value, torch.Tensor)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_names(saved: set[str], wanted: set[str]) -> None:
    if saved == wanted:
        return
    shown = [*(f"{name} is not saved" for name in sorted(wanted - saved)[:5])]
    shown += [f"{name} is saved and not trained" for name in sorted(saved - wanted)[:5]]
    raise CheckpointError(
        f"{len(wanted - saved)} tensors are missing, {len(saved - wanted)} are left over: {'; '.join(shown)}"
    )


def _all_do(work: Callable[[], object], what: str, folder: Path) -> None:
    """Do this rank's part of `what`; raise CheckpointError on every rank if it failed on any."""
    failure = None
    try:
        with explained(what, folder):
            work()
    except CheckpointException as error:  # what went wrong on each rank; all ranks know it
        failure = "; ".join(f"rank {rank}: {cause_of(fault)}" for rank, (fault, _) in error.failures.items())
    except Exception as error:
        failure = failure_of(error)
    raise_together(failure, what, CheckpointError)


def _random_to_json(state: dict[str, Any]) -> dict[str, Any]:
    name, keys, *rest = state["numpy"]
    return {
        "cpu": state["cpu"].tolist(),
        "cuda": state["cuda"].tolist() if "cuda" in state else None,
        "numpy": [name, keys.tolist(), *rest],
        "random": state["random"],
    }


def _random_from_json(saved: dict[str, Any]) -> dict[str, Any]:
    name, keys, *rest = saved["numpy"]
    version, internal, gauss = saved["random"]
    state = {
        "cpu": torch.tensor(saved["cpu"], dtype=torch.uint8),
        "numpy": (name, np.array(keys, dtype=np.uint32), *rest),
        "random": (version, tuple(internal), gauss),
    }
    if saved["cuda"] is not None:
        state["cuda"] = torch.tensor(saved["cuda"], dtype=torch.uint8)
    return state
