"""What a worker of vLLM says about an adapter that it was told to load: which parts of it are in use.

vLLM calls an adapter loaded even if it knows none of its modules. So each worker compares the adapter's files
with what its forward pass reads; SkyRL's servers are started with this class (see `experiment`).
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap

from skyrl_maze.adapter import WEIGHTS_FILE

Pair = tuple[torch.Tensor, torch.Tensor]
Answer = dict[str, Any]


def _answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Answers with `error` instead of raising: vLLM 0.30 leaves the other workers' answers unread then."""

    @functools.wraps(method)
    def answer(*args: Any) -> Answer:
        try:
            return method(*args)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class LoraWitness(NewInferenceWorkerWrap):
    """SkyRL's extension of a vLLM worker with two more methods, which `/collective_rpc` reaches by name."""

    @_answering
    def skyrl_maze_sees(self, folder: str, sizes: dict[str, int]) -> Answer:
        """Nothing, or the `error` that files are not there in `sizes` bytes, as this node sees the folder."""
        seen = {name: (Path(folder) / name).stat().st_size for name in sizes}
        return {} if seen == sizes else {"error": f"the files have {seen} bytes here, not {sizes}"}

    @_answering
    def skyrl_maze_applied_lora(self, lora_id: int, folder: str) -> Answer:
        """The modules of the adapter in `folder` that this worker computes with, by PEFT's names.

        Returns:
            `applied`: their matrices are those of the files, bit for bit; `other`: they are not. What is in
            neither list is ignored, or belongs to another worker's layers.
        """
        return applied_lora(self.model_runner.lora_manager._adapter_manager, lora_id, Path(folder))


def applied_lora(manager: Any, lora_id: int, folder: Path) -> dict[str, list[str]]:
    """See `LoraWitness`; `manager` is vLLM's `LoRAModelManager`."""
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    in_use = dict(_in_use(manager, lora_id))
    scaling = PEFTHelper.from_local_dir(str(folder), None).vllm_lora_scaling_factor
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = mapper.get_rename_mapper()
    found: dict[str, list[str]] = {"applied": [], "other": []}
    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        for name in sorted(file.keys()):
            module = name.removesuffix(".lora_A.weight")
            if module == name or (held := in_use.get(parse_fine_tuned_lora_name(name, mapper)[0])) is None:
                continue
            a, b = (file.get_tensor(f"{module}.lora_{side}.weight").to(held[0].dtype) for side in "AB")
            if scaling != 1:
                b *= scaling  # as vLLM does, in the same dtype
            alike = torch.equal(a, held[0]) and torch.equal(b, held[1])
            found["applied" if alike else "other"].append(module)
    return found


def _in_use(manager: Any, lora_id: int) -> Iterator[tuple[str, Pair]]:
    """vLLM's names of the modules whose part this worker's buffers hold, each with its whole matrices."""
    lora = manager.get_adapter(lora_id)
    if lora is None or lora_id not in manager.lora_index_to_id:
        return
    slot = manager.lora_index_to_id.index(lora_id)
    for name, layer in manager.modules.items():
        if (weights := lora.get_lora(name)) is None:
            continue
        # One layer of the engine may stand for several of the adapter, such as qkv_proj for three.
        parts = manager.packed_modules.get(name, [name])
        if _in_buffers(layer, slot, weights.lora_a, weights.lora_b):
            pairs = zip(parts, _listed(weights.lora_a), _listed(weights.lora_b), strict=True)
            yield from ((part, (a, b)) for part, a, b in pairs if a is not None and b is not None)


def _in_buffers(layer: Any, slot: int, a: Any, b: Any) -> bool:
    """Whether a layer's buffers hold these matrices, divided as vLLM's `set_lora` does."""
    if isinstance(b, list) and len(b) != layer.n_slices:
        a, b = layer.expand_packed_lora(a, b)
    if layer.tp_size > 1:
        a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    buffers = [*layer.lora_a_stacked, *layer.lora_b_stacked]
    return all(
        torch.equal(buffer[slot, 0, : part.shape[0], : part.shape[1]].cpu(), part.cpu())
        for buffer, part in zip(buffers, [*_listed(a), *_listed(b)], strict=True)
        if part is not None
    )


def _listed(matrices: Any) -> list[Any]:
    return matrices if isinstance(matrices, list) else [matrices]
