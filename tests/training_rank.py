"""One of several gloo ranks that train a small LoRA model, from a checkpoint to the next.

    python training_rank.py FOLDER RANK WORLD_SIZE STEPS FROM TO

FROM is the checkpoint to go on from, or `-`; TO the folder for the next. Rank 0 keeps all whole
tensors as they were after loading and at the end.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed as dist
from ranks import leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from skyrl_maze import training_state
from skyrl_maze.errors import CheckpointError


def parts(world_size: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    base = torch.nn.Sequential()
    base.add_module("first", torch.nn.Linear(10, 7))
    base.add_module("second", torch.nn.Linear(7, 3))
    config = peft.LoraConfig(r=5, lora_alpha=10, target_modules=["first", "second"])
    model = peft.get_peft_model(base, config)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    return model, optimizer, schedule


def train(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[float]:
    """Steps on data that only the step's number decides, the same on each rank; the learning rates used."""
    rates = []
    for step in steps:
        rates.append(optimizer.param_groups[0]["lr"])
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(step))
        (model(x) - 1).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return rates


def whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every trained parameter and its state, gathered."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            tensors[name] = parameter.detach()
            tensors |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }


def chance(rank: int) -> dict[str, Any]:
    """As SkyRL's strategy gives it, recognisable by the rank."""
    state = np.random.RandomState(rank).get_state()
    return {
        "cpu": torch.Generator().manual_seed(rank).get_state(),
        "numpy": state,
        "random": random.Random(rank).getstate(),
    }


def same(state: dict[str, Any] | None, rank: int) -> bool:
    if state is None:
        return False
    expected = chance(rank)
    return (
        torch.equal(state["cpu"], expected["cpu"])
        and (state["numpy"][1] == expected["numpy"][1]).all()
        and state["numpy"][2:] == expected["numpy"][2:]
        and state["random"] == expected["random"]
    )


def main(folder: Path, rank: int, world_size: int, steps: int, source: str, target: str) -> None:
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    model, optimizer, schedule = parts(world_size)
    outcome: dict[str, Any] = {"ended": "trained"}
    try:
        if source != "-":
            outcome["chance"] = same(training_state.load(Path(source), model, optimizer, schedule), rank)
        loaded = whole(model, optimizer)
        done = schedule.last_epoch
        outcome["rates"] = train(model, optimizer, schedule, range(done, done + steps))
        training_state.save(Path(target), model, optimizer, schedule, chance(rank))
        ended = whole(model, optimizer)
        if rank == 0:
            torch.save({"loaded": loaded, "ended": ended}, folder / "whole.pt")
    except CheckpointError as error:
        outcome = {"ended": "CheckpointError", "message": str(error)}
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6])
