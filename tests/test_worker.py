"""A LoRA policy needs no broadcast group with the engines; any other one keeps SkyRL's."""

import asyncio
from typing import Any

import pytest

from skyrl_maze.worker import FSDPPolicyWorkerBase, MazePolicyWorker, PolicyWorker, RefWorker


@pytest.mark.parametrize(("lora", "rendezvous"), [(True, False), (False, True)])
def test_only_a_policy_without_lora_meets_the_engines(
    monkeypatch: pytest.MonkeyPatch, lora: bool, rendezvous: bool
) -> None:
    met: list[Any] = []

    async def meet(self: Any, client: Any, engine_cfg: Any) -> None:
        met.append((client, engine_cfg))

    monkeypatch.setattr(FSDPPolicyWorkerBase, "init_weight_sync_state", meet)
    worker = MazePolicyWorker.__new__(MazePolicyWorker)
    worker._is_lora = lora
    asyncio.run(worker.init_weight_sync_state("client", "cfg"))
    assert bool(met) is rendezvous
    assert getattr(worker, "_weight_sync_inference_client", None) == ("client" if lora else None)


def test_ranks_ask_ray_for_one_gpu_each() -> None:
    for actor in (PolicyWorker, RefWorker):
        assert actor._default_options["num_gpus"] == 1
