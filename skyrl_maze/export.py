"""A LoRA adapter merged into its base model: a complete folder that transformers and vLLM load.

The base's files are written anew, shard by shard under their own names; sums are made in float32 and rounded
to the base's dtype once. Rounding to bfloat16 loses what is far smaller than the weight it is added to:
`ExportReport.rounding_share` says how much. Serving the adapter beside its base loses nothing.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from skyrl_maze.errors import AdapterError
from skyrl_maze.export_plan import ExportPlan, Merge, plan_export
from skyrl_maze.export_source import ADAPTER_FILE, Adapter, BaseModel, read_adapter, read_base

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]

_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class ExportReport:
    """What an export did."""

    merged_tensors: int
    shards: int
    update_norm: float
    """Norm of all that was added; 0 for an adapter that was never trained."""
    rounding_share: float
    """Norm of what rounding to the base's dtype changed, relative to `update_norm`; 0 for a float32 base."""


def export_merged(base: Path, adapter: Path, out: Path, progress: Progress | None = None) -> ExportReport:
    """Merge a PEFT LoRA adapter into its base and write the whole model to a new folder.

    Args:
        base: folder of a Hugging Face model in safetensors, one file or sharded with an index.
        adapter: folder with `adapter_model.safetensors` and `adapter_config.json`.
        out: the folder to make; it appears complete or not at all.
        progress: called with (steps done, steps in all); a step is a merged tensor or a written shard.

    Raises:
        AdapterError: a folder cannot be read or written, `out` exists, or the adapter does not fit its base
            in every tensor.
    """
    _check_out(base, out)
    try:
        model, lora = read_base(base), read_adapter(adapter)
        plan = plan_export(
            {name: tensor.shape for name, tensor in model.tensors.items()},
            {name: tensor.shape for name, tensor in lora.tensors.items()},
            lora.config,
            tied=model.tied,
        )
        _check_dtypes(plan, model, lora)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the final rename stays on one file system.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            report = apply_plan(plan, model, adapter, made, progress)
            _copy_others(model, made)
            _check_out(base, out)
            os.rename(made, out)
    except AdapterError as error:
        raise AdapterError(f"export of {adapter} with base {base}: {error}") from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        place = getattr(error, "filename", None) or out
        raise AdapterError(
            f"export of {adapter} with base {base} failed at {place}: {reason}; nothing was left at {out}: "
            "give places that can be read and written, with room for a copy of the base, and export again"
        ) from error
    return report


def apply_plan(
    plan: ExportPlan, base: BaseModel, adapter: Path, out: Path, progress: Progress | None = None
) -> ExportReport:
    """Write the base's shards, with the sums of `plan` in them, to the existing folder `out`.

    In memory are the merged tensors of one shard; all others go from page cache to disk.

    Raises:
        AdapterError: a sum is not finite.
        OSError: `out` cannot be written.
    """
    from safetensors.torch import save_file

    merges = {merge.target: merge for merge in plan.merges}
    steps, done = len(merges) + len(base.shards), 0
    update = lost = 0.0
    with safe_open(adapter / ADAPTER_FILE, "pt") as delta:
        for shard in base.shards:
            with safe_open(base.folder / shard, "pt") as file:
                tensors = {}
                for name in file.keys():  # noqa: SIM118  # it is not a mapping
                    tensors[name] = file.get_tensor(name)
                    if merge := merges.get(name):
                        tensors[name], added, rounded = _merged(tensors[name], delta, merge)
                        update, lost, done = update + added**2, lost + rounded**2, done + 1
                        _tell(progress, done, steps)
                save_file(tensors, out / shard, {**(file.metadata() or {}), "format": "pt"})
            _flush(out / shard)
            done += 1
            _tell(progress, done, steps)
    return ExportReport(len(merges), len(base.shards), update**0.5, (lost / update) ** 0.5 if update else 0.0)


def _merged(weight: "torch.Tensor", delta: Any, merge: Merge) -> tuple["torch.Tensor", float, float]:
    """The sum in the weight's dtype, the norm of what was added, and of what rounding changed."""
    import torch

    a, b = delta.get_tensor(merge.a).float(), delta.get_tensor(merge.b).float()
    exact = weight.to(torch.float32, copy=True).addmm_(b, a, alpha=merge.scale)
    merged = exact.to(weight.dtype)
    if not torch.isfinite(merged).all():
        raise AdapterError(
            f"cannot merge into {merge.target}: the sum is not finite in {weight.dtype}; adapter or base "
            "holds NaN, infinity or numbers too large for it: export an earlier checkpoint"
        )
    norm = torch.linalg.vector_norm
    return merged, float(norm(exact - weight)), float(norm(exact - merged))


def _tell(progress: Progress | None, done: int, steps: int) -> None:
    if progress:
        progress(done, steps)


def _check_out(base: Path, out: Path) -> None:
    if os.path.lexists(out):
        raise AdapterError(f"cannot export to {out}: it exists; give a new folder, or remove it first")
    if out.resolve().is_relative_to(base.resolve()):
        raise AdapterError(f"cannot export to {out}: it lies in the base {base}; give a folder elsewhere")


def _check_dtypes(plan: ExportPlan, base: BaseModel, adapter: Adapter) -> None:
    used = {merge.target: base.tensors[merge.target].dtype for merge in plan.merges}
    used |= {name: tensor.dtype for name, tensor in adapter.tensors.items()}
    if wrong := [f"{name} is {dtype}" for name, dtype in used.items() if dtype not in _DTYPES]:
        listed = "\n  - ".join(["", *wrong])
        raise AdapterError(f"can merge only {', '.join(_DTYPES)}; give others:{listed}")


def _copy_others(base: BaseModel, out: Path) -> None:
    for path in base.others:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base.folder / path, out / path)
        _flush(out / path)


def _flush(path: Path) -> None:
    """Put a file on the disk, so that a folder with its final name is whole even after a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
