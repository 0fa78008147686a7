"""Which tensor of a base model a LoRA adapter adds to, decided from names and shapes alone.

A PEFT adapter names modules as the training model does, a checkpoint names tensors as its writer did. Most
often they agree; `_ROOTS` holds the spellings of the same module that are known, and no other is guessed.
What has no certain place is refused: a merge that leaves out a part of the adapter looks like a good one.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_maze.errors import AdapterError

Shape = tuple[int, ...]

# Spellings of one root, first match first: Qwen3-VL as transformers names and saves it, the same as vLLM and
# older multimodal checkpoints name it, and language models that stand alone.
_ROOTS = (
    ("model.language_model.", "text."),
    ("language_model.model.", "text."),
    ("model.layers.", "text.layers."),
    ("model.embed_tokens.", "text.embed_tokens."),
    ("model.visual.", "vision."),
    ("visual.", "vision."),
    ("language_model.lm_head.", "head."),
    ("lm_head.", "head."),
)
_HEAD, _EMBEDDING = "head.weight", "text.embed_tokens.weight"

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+?)\.(?P<kind>(lora_\w+|base_layer)(\..+)?)")
_A, _B = "lora_A.weight", "lora_B.weight"

# Settings of a LoRA that say nothing about the sum; every other one must be at rest, unknown ones included.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # parts of `init_lora_weights`
    *("megatron_config", "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
_AT_REST: tuple[Any, ...] = (None, False, "none", [], {})
# The others (PiSSA, OLoRA, CorDA, LoftQ) change the base as well, which the adapter does not hold.
_PLAIN_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
_WHY_NOT = {
    "use_dora": "DoRA rescales the sum by norms",
    "fan_in_fan_out": "it is for transposed weights, which Qwen models do not have",
    "modules_to_save": "it replaces whole modules instead of adding to them",
    "trainable_token_indices": "it replaces rows of the embedding",
}


@dataclass(frozen=True)
class Merge:
    """`scale * (b @ a)` is added to tensor `target` of the base; `a` and `b` are names in the adapter."""

    target: str
    a: str
    b: str
    scale: float


@dataclass(frozen=True)
class ExportPlan:
    """Every tensor of an adapter in its place; no two merges have the same target."""

    merges: tuple[Merge, ...]


def plan_export(
    base_shapes: Mapping[str, Shape],
    adapter_shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    tied: bool = False,
) -> ExportPlan:
    """Place every tensor of a LoRA adapter on a tensor of its base.

    Args:
        base_shapes: the base model's tensors, named as on disk.
        adapter_shapes: the adapter's tensors, named as PEFT saves them.
        config: the content of `adapter_config.json`.
        tied: the base's configuration ties `lm_head` to the embedding; a base without a tensor of the head
            is taken for tied whatever is said.

    Raises:
        AdapterError: a setting, or a tensor, that cannot be merged; lists all of them.
    """
    problems = _setting_problems(config)
    if problems:
        raise _refusal(problems)
    places, twice = _places(base_shapes)
    tied = tied or _HEAD not in places
    modules, problems = _by_module(adapter_shapes)
    merges: dict[str, Merge] = {}
    for module, tensors in modules.items():
        name = f"{module}.weight"
        place = _canonical(name)
        target = name if name in base_shapes else places.get(place)
        if tied and place in (_HEAD, _EMBEDDING):
            problems.append(
                f"{module}: the base ties lm_head to the embedding, so that one tensor serves both, and a "
                "sum made for one would change the other; train without lm_head and embed_tokens"
            )
        elif set(tensors) != {_A, _B}:
            problems.append(f"{module}: holds {', '.join(sorted(tensors))}; {_only_pairs(tensors)}")
        elif target is None:
            problems.append(f"{module}: the base has no tensor of that name or another spelling of it")
        elif place in twice or target in merges:
            problems.append(f"{module}: cannot tell its place, two tensors are spellings of {place}")
        elif problem := _shape_problem(module, config, base_shapes[target], tensors):
            problems.append(f"{module}: {problem}")
        else:
            prefix = f"base_model.model.{module}."
            merges[target] = Merge(target, prefix + _A, prefix + _B, _scale(module, config))
    if not adapter_shapes:
        problems.append("it holds no tensor")
    if problems:
        raise _refusal(problems)
    return ExportPlan(tuple(merges.values()))


def _only_pairs(tensors: Mapping[str, Shape]) -> str:
    if "base_layer.weight" in tensors:
        return "the copy of the base's weight cannot be added; save with save_embedding_layers=False"
    return f"only {_A} with {_B} can be merged"


def _refusal(problems: list[str]) -> AdapterError:
    listed = "\n  - ".join(["", *problems])
    return AdapterError(f"cannot merge the adapter; nothing was written. Mend all of these:{listed}")


def _setting_problems(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type={config.get('peft_type')!r}: only 'LORA' can be merged")
    for name in ("r", "lora_alpha"):
        if not _is_positive(config.get(name)):
            problems.append(f"{name}={config.get(name)!r}: must be a number above 0")
    for name in ("rank_pattern", "alpha_pattern"):
        problems += _pattern_problems(name, config.get(name) or {})
    beginning = config.get("init_lora_weights", True)
    if beginning not in _PLAIN_BEGINNINGS:
        problems.append(
            f"init_lora_weights={beginning!r}: it changed the base's weights before training; "
            "convert the adapter with PEFT's path_initial_model_for_weight_conversion first"
        )
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT | _READ and value not in _AT_REST:
            reason = _WHY_NOT.get(name, "this export knows no sum for it")
            problems.append(f"{name}={value!r}: {reason}; merge with PEFT's merge_and_unload instead")
    return problems


def _pattern_problems(name: str, patterns: Any) -> list[str]:
    if not isinstance(patterns, Mapping):
        return [f"{name}={patterns!r}: must be a mapping of module patterns to numbers"]
    problems = []
    for pattern, value in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"{name}: {pattern!r} is no regular expression: {error}")
        if not _is_positive(value):
            problems.append(f"{name}: {pattern!r} is {value!r}: must be a number above 0")
    return problems


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _canonical(name: str) -> str:
    for prefix, root in _ROOTS:
        if name.startswith(prefix):
            return root + name.removeprefix(prefix)
    return name


def _places(base_shapes: Mapping[str, Shape]) -> tuple[dict[str, str], set[str]]:
    """Tensors of the base by canonical name, and the canonical names that more than one of them has."""
    places: dict[str, str] = {}
    twice = set()
    for name in base_shapes:
        place = _canonical(name)
        if place in places:
            twice.add(place)
        places[place] = name
    return places, twice


def _by_module(adapter_shapes: Mapping[str, Shape]) -> tuple[dict[str, dict[str, Shape]], list[str]]:
    """The adapter's tensors by module and kind; a problem for each that is of no LoRA."""
    modules: dict[str, dict[str, Shape]] = {}
    problems = []
    for name, shape in adapter_shapes.items():
        if match := _TENSOR.fullmatch(name):
            modules.setdefault(match["module"], {})[match["kind"]] = shape
        else:
            problems.append(f"{name}: no part of a LoRA as PEFT saves it (base_model.model.MODULE.{_A})")
    return modules, problems


def _shape_problem(
    module: str, config: Mapping[str, Any], target: Shape, tensors: Mapping[str, Shape]
) -> str | None:
    a, b, rank = tensors[_A], tensors[_B], _setting(module, config, "rank_pattern", "r")
    if len(target) != 2:
        return f"the base's tensor is {_text(target)}, not a matrix; only linear layers can be merged"
    if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != target or a[0] != b[1]:
        return f"A {_text(a)} and B {_text(b)} do not make {_text(target)}; is it another base?"
    if a[0] != rank:
        return f"A has {a[0]} rows, the adapter's configuration says rank {rank}"
    return None


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _scale(module: str, config: Mapping[str, Any]) -> float:
    rank = _setting(module, config, "rank_pattern", "r")
    alpha = _setting(module, config, "alpha_pattern", "lora_alpha")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _setting(module: str, config: Mapping[str, Any], patterns: str, otherwise: str) -> Any:
    """A module's own value, matched as PEFT does: the whole name or its end, the first pattern wins."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config[otherwise]
