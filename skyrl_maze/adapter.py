"""What makes a set of LoRA matrices an adapter that PEFT and vLLM load: its names, shapes and config.

vLLM takes matrices with unknown names in silence and computes without them, so names are checked here.
"""

import enum
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skyrl_maze.errors import AdapterError

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# What wrappers leave in names; no other program knows them.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_VISION = {"visual", "vision_tower", "vision_model"}

# What a loader needs to know, in the order in which it is written.
_KEPT = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "bias", "use_rslora"),
    *("fan_in_fan_out", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"),
)
# These change what the matrices mean, in ways that vLLM or a merge would not follow.
_REFUSED = (
    *("use_dora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices"),
    *("layer_replication", "target_parameters", "alora_invocation_tokens", "arrow_config"),
)
# These begin with changed base weights, which an adapter does not hold.
_CHANGES_BASE = re.compile("pissa.*|olora|loftq|corda|lora_ga")


def adapter_problems(shapes: Mapping[str, Iterable[int]], allow_vision: bool = False) -> list[str]:
    """Why these matrices are no adapter, one line each, with the name first; empty if they are one.

    Args:
        shapes: the shape of each whole matrix by name, `base_model.model.<module>.lora_A.weight` (rank, in)
            or `....lora_B.weight` (out, rank).
        allow_vision: whether those of a picture tower may be among them; engines skip them by default.
    """
    if not shapes:
        return ["no matrices at all; check target_modules"]
    problems, sides = [], dict[str, dict[str, tuple[int, ...]]]()
    for name, given in sorted(shapes.items()):
        shape = tuple(given)
        if reason := _name_problem(name, allow_vision):
            problems.append(f"{name}: {reason}")
        elif len(shape) != 2 or min(shape) < 1:
            problems.append(f"{name}: has shape {list(shape)}; must be a matrix")
        if match := _NAME.fullmatch(name):
            sides.setdefault(match["module"], {})[match["side"]] = shape
    for module, pair in sides.items():
        if len(pair) == 1:
            (only,) = pair
            problems.append(f"{module}: has lora_{only} without lora_{'B' if only == 'A' else 'A'}")
        elif len(pair["A"]) == len(pair["B"]) == 2 and pair["A"][0] != pair["B"][1]:
            problems.append(
                f"{module}: lora_A {list(pair['A'])} and lora_B {list(pair['B'])} are of different ranks"
            )
    return problems


def _name_problem(name: str, allow_vision: bool) -> str | None:
    parts = name.split(".")
    for wrapper in _WRAPPERS:
        if wrapper in parts:
            return f"holds {wrapper}, which no engine knows; take it out"
    if len(parts) > 2 and parts[-1] == "weight" and parts[-3] in ("lora_A", "lora_B"):
        return f"holds the adapter's name {parts[-2]!r}; take it out, as PEFT does when it saves"
    if not (match := _NAME.fullmatch(name)):
        return "must be base_model.model.<module>.lora_A.weight or ....lora_B.weight"
    if not allow_vision and _VISION & set(match["module"].split(".")):
        return "belongs to the picture tower, which engines skip; use exclude_modules='.*visual.*'"
    return None


def peft_config(
    given: Mapping[str, Any], base_model: str, revision: str | None = None, peft_version: str | None = None
) -> dict[str, Any]:
    """The content of adapter_config.json: plain JSON, the same for the same settings.

    Args:
        given: fields of a `peft.LoraConfig`, such as `dataclasses.asdict` gives; `r`, `lora_alpha` and
            `target_modules` are needed.
        base_model: the id or path of the model that the adapter belongs to.
        revision: of `base_model`.

    Raises:
        AdapterError: something is missing, or the adapter would not mean the same elsewhere.
    """
    missing = [name for name in ("r", "lora_alpha", "target_modules") if not given.get(name)]
    refused = [name for name in _REFUSED if given.get(name) not in (None, False, [], {}, ())]
    init = given.get("init_lora_weights")
    if isinstance(init, str) and _CHANGES_BASE.fullmatch(init.lower()):
        refused.append("init_lora_weights")
    if missing or refused or not base_model or given.get("bias", "none") != "none":
        raise AdapterError(
            "cannot write an adapter config: "
            f"missing {missing + ([] if base_model else ['base_model'])}; cannot be exported "
            f"{[f'{name}={given[name]!r}' for name in refused]}; bias={given.get('bias', 'none')!r} must be "
            "'none'; use a plain LoRA"
        )
    task = given.get("task_type")
    kept = {name: _plain(given[name], name) for name in _KEPT if given.get(name) is not None}
    return {
        "peft_type": "LORA",
        "task_type": None if task is None else _plain(task, "task_type"),
        **({"peft_version": peft_version} if peft_version else {}),
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        **{"bias": "none", **kept},
        "init_lora_weights": True,
    }


def read_config(path: Path) -> dict[str, Any]:
    """The settings in an adapter_config.json.

    Raises:
        AdapterError: the file is missing or holds something else.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AdapterError(
            f"cannot read the adapter config {path}: {reason}; give an {CONFIG_FILE} of this run"
        ) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA" or "r" not in settings:
        raise AdapterError(f"{path} is no config of a LoRA adapter; give an {CONFIG_FILE} of this run")
    return settings


def _plain(value: Any, name: str) -> Any:
    """JSON for a setting: sets sorted, a text kept whole, mappings in their order, which PEFT minds."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, set | frozenset | list | tuple):
        return sorted((_plain(item, name) for item in value), key=lambda item: (str(type(item)), item))
    raise AdapterError(f"cannot write an adapter config: {name}={value!r} is no JSON; give text or numbers")
