"""One FSDP rank of the LoRA benchmark: a Qwen3-VL split over gloo ranks, shared and saved in two ways.

Imported once by the fork server of `benchmarks/lora.py`, from which each rank is started. The model's class
and the LoRA matrices, as DTensors, are the real ones; the base stays on the meta device, without values.
"""

import asyncio
import contextlib
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyrl_maze import _compat, cpu

_compat.install()
cpu.install()

import peft  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from lora_setup import Sizes, answer_calls  # noqa: E402
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase  # noqa: E402
from skyrl.train.config import FSDPConfig, ModelConfig, OptimizerConfig, SkyRLLoraConfig  # noqa: E402
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: E402

from skyrl_maze.sharing import Share, write_shards  # noqa: E402
from skyrl_maze.versions import Version  # noqa: E402

WIRE_DTYPE = "bfloat16"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_settings(sizes: Sizes) -> peft.LoraConfig:
    """LoRA on every linear layer of the language model, and none on the picture tower."""
    return peft.LoraConfig(
        r=sizes.lora_rank,
        lora_alpha=2 * sizes.lora_rank,
        target_modules=TARGETS,
        exclude_modules=".*visual.*",
        task_type=peft.TaskType.CAUSAL_LM,
    )


def build_model(sizes: Sizes, base_device: str) -> Any:
    """A PEFT model whose LoRA matrices hold the same random float32 values on every rank."""
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocabulary,
        },
        vision_config={
            "hidden_size": sizes.vision_hidden,
            "intermediate_size": sizes.vision_intermediate,
            "depth": sizes.vision_depth,
            "out_hidden_size": sizes.hidden,
            "deepstack_visual_indexes": [sizes.vision_depth * part // 4 for part in (1, 2, 3)],
        },
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(base_device):
        model = peft.get_peft_model(Qwen3VLForConditionalGeneration(config), adapter_settings(sizes))
    for name, module in model.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default")):
            module.to_empty(device="cpu")
            torch.nn.init.normal_(module.weight)
    return model


class Engines:
    """Stands in for the engines of SkyRL's worker: what they load is no part of the measurement."""

    async def update_named_weights(self, request: Any) -> None:
        """Load nothing."""


class Rank:
    """Does what the benchmark asks for, together with the other ranks."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        self._rank = rank
        self._mesh = init_device_mesh("cpu", (ranks,))
        self._model = build_model(sizes, "meta")
        fully_shard(self._model, mesh=self._mesh)

    def shapes(self) -> dict[str, Any]:
        """Number of base parameters, and the shape of each LoRA matrix."""
        parameters = dict(self._model.named_parameters())
        lora = {name: list(p.shape) for name, p in parameters.items() if "lora_" in name}
        base = sum(p.numel() for name, p in parameters.items() if name not in lora)
        return {"base_parameters": base, "lora": lora}

    def share(self, version: Version) -> None:
        """This package: write this rank's rows."""
        share = Share(version, "Qwen/Qwen3-VL-8B-Instruct", WIRE_DTYPE, keep=1, merger=None)
        asyncio.run(write_shards(share, self._model))

    def share_as_skyrl(self, folder: Path) -> None:
        """SkyRL's worker: gather every matrix on all ranks, write on the first, barrier."""
        worker = SimpleNamespace(model=SimpleNamespace(model=self._model), _is_multimodal_lm_only=False)
        saving = FSDPPolicyWorkerBase._save_lora_adapters_and_sync(
            worker, self._model, str(folder), Engines()
        )
        asyncio.run(saving)

    def checkpoint(self, folder: Path) -> None:
        """This package: the LoRA matrices and Adam's two moments of each, float32, each rank its own rows."""
        lora = {name: p.detach() for name, p in self._model.named_parameters() if "lora_" in name}
        state = {
            f"{part}.{name}": tensor.clone()  # stands in for the moments, which are as large
            for part in ("parameter", "exp_avg", "exp_avg_sq")
            for name, tensor in lora.items()
        }
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))

    def checkpoint_as_skyrl(self, folder: Path, sizes: Sizes) -> dict[str, int]:
        """SkyRL's strategy: save a scaled-down model after one step of its optimizer; returns its counts."""
        model = build_model(sizes, "cpu")
        lora = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
        base = sum(p.numel() for p in model.parameters()) - lora
        fully_shard(model, mesh=self._mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        model_config = ModelConfig(lora=SkyRLLoraConfig(rank=sizes.lora_rank))
        strategy = FSDPStrategy(FSDPConfig(), OptimizerConfig(), model_config)
        strategy.setup_distributed()
        with contextlib.redirect_stdout(None):
            strategy.save_checkpoint(model, str(folder), node_local_rank=self._rank, optimizer=optimizer)
        return {"base_parameters": base, "lora_parameters": lora}


def start(sizes: Sizes, rank: int, ranks: int, rendezvous: Path, connection: Connection) -> None:
    """Join the other ranks, and do what the benchmark asks for."""
    # PEFT looks for the published config of a model that has none.
    warnings.filterwarnings("ignore", message="Could not find a config file")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    answer_calls(Rank(sizes, rank, ranks), connection)
    dist.destroy_process_group()
