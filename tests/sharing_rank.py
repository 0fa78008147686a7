"""One of several gloo ranks that share a small LoRA model through a folder; prints how it ended as JSON."""

import asyncio
import concurrent.futures
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import torch.distributed as dist
from fake_servers import FakeEngine, serving
from ranks import leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from skyrl_maze import _compat

_compat.install()

from skyrl_maze.merger import Merger  # noqa: E402
from skyrl_maze.sharing import Share, share_adapter  # noqa: E402
from skyrl_maze.versions import Version  # noqa: E402


class MergerHere:
    """The merger without Ray: called in this process, through the same two methods."""

    def __init__(self, fails: bool) -> None:
        self.merge = SimpleNamespace(remote=self._merge)
        self._fails = fails

    def _merge(self, version: Version) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            if self._fails:
                raise OSError("the head node is gone")
            future.set_result(Merger(on_head=False).merge(version))
        except Exception as error:
            future.set_exception(error)
        return SimpleNamespace(future=lambda: future)


def model(seed: int, trained: bool) -> Any:
    torch.manual_seed(seed)
    base = torch.nn.Sequential()
    base.add_module("first", torch.nn.Linear(10, 7))
    base.add_module("second", torch.nn.Linear(7, 3))
    config = peft.LoraConfig(r=5, lora_alpha=10, target_modules=["first", "second"])
    tuned = peft.get_peft_model(base, config)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name and trained:
            torch.nn.init.normal_(parameter)
    return tuned


def main(folder: Path, rank: int, world_size: int, fault: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    tuned = model(seed=1, trained=fault != "nothing is learned yet")
    whole = {n: p.detach().clone() for n, p in tuned.named_parameters() if "lora_" in n}
    fully_shard(tuned, mesh=init_device_mesh("cpu", (world_size,)))
    version = Version(4, 0, folder / "run" / "versions" / "4.0")
    if fault == "a shard is there already" and rank == 1:
        version.shards.mkdir(parents=True, exist_ok=True)
        (version.shards / "rank-00001.json").write_text("{}")
    share = Share(version, "base", "float32", 2, MergerHere(fault == "the head is gone"))
    engines = [
        FakeEngine(),
        FakeEngine("no load", {"an engine fails once": 1, "an engine fails": 99}.get(fault, 0)),
    ]

    async def run() -> dict[str, Any]:
        async with serving(*engines) as urls:
            shared = await share_adapter(share, tuned, SimpleNamespace(server_urls=urls), "policy")
        loaded = [str(engine.serves) for engine in engines if engine.serves]
        return {"ended": "shared", "loaded": loaded, "largest_b": shared and shared.largest_b}

    try:
        outcome = asyncio.run(run())
    except Exception as error:
        outcome = {"ended": type(error).__name__, "message": str(error)}
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
