"""The policy and reference ranks: SkyRL's FSDP workers, made fit for a LoRA policy and for a CPU."""

from skyrl_maze import _compat, cpu

_compat.install()
cpu.install()

from typing import Any  # noqa: E402

import ray  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (  # noqa: E402
    FSDPPolicyWorkerBase,
    FSDPRefWorkerBase,
)


class MazePolicyWorker(FSDPPolicyWorkerBase):
    """One FSDP rank of the policy."""

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Keep the client; a LoRA policy reaches the engines as files and needs no broadcast group.

        SkyRL rendezvouses an NCCL group with every engine even then.
        """
        if not self._is_lora:
            await super().init_weight_sync_state(inference_engine_client, inference_engine_cfg)
            return
        self._weight_sync_inference_client = inference_engine_client


class MazeRefWorker(FSDPRefWorkerBase):
    """One FSDP rank of the reference model, in a process where the workarounds are in place."""


PolicyWorker = ray.remote(num_gpus=1)(MazePolicyWorker)
RefWorker = ray.remote(num_gpus=1)(MazeRefWorker)
