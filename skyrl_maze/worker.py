"""The policy and reference ranks: SkyRL's FSDP workers, made fit for a LoRA policy and for a CPU."""

from skyrl_maze import _compat, cpu

_compat.install()
cpu.install()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import ray  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (  # noqa: E402
    FSDPPolicyWorkerBase,
    FSDPRefWorkerBase,
)

from skyrl_maze import training_state  # noqa: E402
from skyrl_maze.sharing import Share, Shared, share_adapter, write_shards  # noqa: E402


class MazePolicyWorker(FSDPPolicyWorkerBase):
    """One FSDP rank of the policy; its adapter reaches the engines through a shared folder."""

    _share: Share | None = None
    _shared: Shared | None = None

    def next_share(self, share: Share) -> None:
        """The version that the next synchronisation of weights makes."""
        self._share = share

    def last_shared(self) -> Shared | None:
        """What the last one came to; None on all ranks but the first."""
        return self._shared

    async def broadcast_to_inference_engines(
        self, inference_engine_client: Any, inference_engine_cfg: Any, model_id: str | None = None
    ) -> None:
        """SkyRL's hook after every optimizer step, without gathering a matrix: see `sharing`."""
        share, self._share = self._share, None
        if not self._is_lora or share is None:
            await super().broadcast_to_inference_engines(
                inference_engine_client, inference_engine_cfg, model_id
            )
            return
        client = inference_engine_client or self._weight_sync_inference_client
        reset = self._reset_prefix_cache_task(client, inference_engine_cfg)
        lora_name, _ = self._resolve_lora_sync_target(model_id)
        try:
            self._shared = await share_adapter(share, self.model.model, client, lora_name)
        finally:
            if reset is not None:
                await reset

    async def write_shards(self, share: Share) -> None:
        """This rank's part of a version that no engine needs to load now."""
        await write_shards(share, self.model.model)

    def save_checkpoint(self, ckpt_dir: str, tokenizer: Any = None) -> None:
        """What is trained, and not the model that it is trained on."""
        if not self._is_lora:
            super().save_checkpoint(ckpt_dir, tokenizer)
            return
        chance = self.strategy.get_rng_state()
        training_state.save(Path(ckpt_dir), self.model.model, self.optimizer, self.scheduler, chance)

    def load_checkpoint(self, ckpt_dir: str, **which: bool) -> Any:
        """Go on from what `save_checkpoint` saved, on however many ranks."""
        if not self._is_lora:
            return super().load_checkpoint(ckpt_dir, **which)
        chance = training_state.load(Path(ckpt_dir), self.model.model, self.optimizer, self.scheduler)
        if chance is not None:
            self.strategy.load_rng_state(chance)
        return {}

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
