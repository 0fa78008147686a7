"""The policy and reference ranks: SkyRL's FSDP workers, made fit for a LoRA policy and for a CPU."""

from skyrl_maze import _compat, cpu

_compat.install()
cpu.install()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import ray  # noqa: E402
import torch  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (  # noqa: E402
    FSDPPolicyWorkerBase,
    FSDPRefWorkerBase,
)
from transformers import AutoTokenizer  # noqa: E402

from skyrl_maze import training_state  # noqa: E402
from skyrl_maze.hang_detection import HangConfig, Progress  # noqa: E402
from skyrl_maze.sharing import Share, Shared, share_adapter, write_shards  # noqa: E402
from skyrl_maze.vision import BANNED_BIAS, model_config, vision_tokens  # noqa: E402


def ban_vision_tokens(model: Any, model_path: str) -> None:
    """Give the tokens that stand for pictures the logits that they have at the engine, in place.

    There they cannot be sampled, so no gradient would ever take back what probability drifts to them, and the
    policy that learns would become another than the one that acts.
    """
    config, tokenizer = model_config(model_path), AutoTokenizer.from_pretrained(model_path)
    head = model.get_output_embeddings()
    banned = vision_tokens(tokenizer, config).banned_ids & frozenset(range(head.weight.shape[0]))
    ids = torch.tensor(sorted(banned))

    def lower(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., ids.to(logits.device)] += BANNED_BIAS
        return logits

    head.register_forward_hook(lower)


class MazePolicyWorker(FSDPPolicyWorkerBase):
    """One FSDP rank of the policy; its adapter reaches the engines through a shared folder."""

    _share: Share | None = None
    _shared: Shared | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._progress = Progress()
        super().__init__(*args, **kwargs)

    def watch(self, hang: HangConfig) -> None:
        """Let HyperPod's agent, if there is one, look at the first rank of each node."""
        if self._local_rank == 0:
            self._progress.watch(hang)

    def training_is_over(self) -> None:
        """Tell the same agent."""
        self._progress.end()

    def init_model(self, model_path: str, num_training_steps: int | None = None) -> None:
        super().init_model(model_path, num_training_steps)
        ban_vision_tokens(self.model.model, model_path)

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
            self._progress.step(share.version.step)
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

    def init_model(self, model_path: str) -> None:
        super().init_model(model_path)
        ban_vision_tokens(self.model.model, model_path)


PolicyWorker = ray.remote(num_gpus=1)(MazePolicyWorker)
RefWorker = ray.remote(num_gpus=1)(MazeRefWorker)
