"""The two folders that an export reads: a base model and a LoRA adapter, both in safetensors.

Nothing is trusted to be complete: shards are held against their index, and a file that is missing, damaged
or a link to somewhere else is an error here, before anything is written.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from skyrl_maze.errors import AdapterError

ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Other copies of the weights would be unmerged, and pickles run code when they are loaded.
_NOT_COPIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".onnx", ".gguf"),
    ".index.json",
)


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor; `dtype` is spelled as safetensors does, such as `BF16`."""

    shard: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BaseModel:
    """A model folder that is complete: `others` are its files without weights, relative to `folder`."""

    folder: Path
    shards: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    others: tuple[Path, ...]
    tied: bool


@dataclass(frozen=True)
class Adapter:
    """An adapter folder: its tensors and the content of `adapter_config.json`."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]


def read_base(folder: Path) -> BaseModel:
    """Read the headers of a base model, one safetensors file or sharded with an index.

    Raises:
        AdapterError: it is no folder, incomplete, quantised, or links to files elsewhere.
        OSError: a file cannot be read.
    """
    shards = _shards(folder)
    others = _other_files(folder, shards)
    tensors = _tensors(folder, shards)
    if shards != [_WEIGHTS]:
        _check_index(folder, tensors)
    config = _read_json(folder / "config.json")
    if config.get("quantization_config"):
        raise AdapterError(
            f"the base {folder} is quantised, and nothing can be added to its numbers; give the full model"
        )
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    tied = any(part.get("tie_word_embeddings") for part in parts)
    return BaseModel(folder, tuple(shards), tensors, tuple(others), tied)


def read_adapter(folder: Path) -> Adapter:
    """Read the headers and the configuration of a PEFT adapter; pickles (`.bin`) are not looked at.

    Raises:
        AdapterError: a file is missing or damaged.
        OSError: a file cannot be read.
    """
    if not (folder / ADAPTER_FILE).is_file():
        raise AdapterError(
            f"no adapter at {folder}: {ADAPTER_FILE} is missing, and nothing else is read, pickles (.bin) "
            "neither; give the folder that PEFT's save_pretrained wrote"
        )
    return Adapter(folder, _tensors(folder, [ADAPTER_FILE]), _read_json(folder / _ADAPTER_CONFIG))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"cannot read {path}: there is no such file; give a complete folder") from None
    except ValueError as error:
        raise AdapterError(f"cannot read {path}: not JSON ({error}); copy the folder again") from error
    if not isinstance(content, dict):
        raise AdapterError(f"cannot read {path}: a JSON object is needed; copy the folder again")
    return content


def _shards(folder: Path) -> list[str]:
    """Names of the files that hold the base's weights."""
    if not folder.is_dir():
        raise AdapterError(
            f"no base model at {folder}: it is not a folder; a model of the hub is put into one with "
            "`hf download ID --local-dir FOLDER`"
        )
    if (folder / _ADAPTER_CONFIG).exists():
        raise AdapterError(f"{folder} holds an adapter itself; give the model that it was trained on")
    whole, index = (folder / _WEIGHTS).exists(), (folder / _INDEX).exists()
    if whole and index:
        raise AdapterError(f"{folder} has both {_WEIGHTS} and {_INDEX}; remove the one that is not meant")
    if whole:
        return [_WEIGHTS]
    if not index:
        raise AdapterError(
            f"{folder} has neither {_WEIGHTS} nor {_INDEX}: only safetensors are read, pickles (.bin) are "
            "not; save the model with save_pretrained first"
        )
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AdapterError(f"{folder / _INDEX} has no weight_map; copy the base again")
    names = sorted({str(name) for name in weight_map.values()})
    if wrong := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise AdapterError(f"{folder / _INDEX} names {wrong[0]!r}, which is no safetensors file beside it")
    return names


def _tensors(folder: Path, shards: Sequence[str]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for shard in shards:
        with _opened(folder / shard) as file:
            for name in file.keys():  # noqa: SIM118  # it is not a mapping
                part = file.get_slice(name)
                if name in found:
                    raise AdapterError(f"{name} is in both {found[name].shard} and {shard} of {folder}")
                found[name] = TensorInfo(shard, tuple(part.get_shape()), part.get_dtype())
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except FileNotFoundError:
        raise AdapterError(f"{path} is missing; copy the folder again") from None
    except SafetensorError as error:
        raise AdapterError(f"cannot read {path}: {error}; it is damaged, copy the folder again") from error


def _check_index(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    indexed = _read_json(folder / _INDEX)["weight_map"]
    if wrong := indexed.items() ^ {(name, tensor.shard) for name, tensor in tensors.items()}:
        names = ", ".join(sorted({name for name, _ in wrong}))
        raise AdapterError(f"{folder / _INDEX} disagrees with its shards on {names}; copy the base again")


def _other_files(folder: Path, shards: Sequence[str]) -> list[Path]:
    """Relative paths of what is no weight, no pickle and not hidden; links may not lead out of the folder."""
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":  # the hub's cache: a snapshot is made of links into its `blobs`
        allowed.append(root.parent.parent / "blobs")
    found = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    others = [
        path
        for path in found
        if not any(part.startswith(".") for part in path.parts)
        and (str(path) == _INDEX or not path.name.endswith(_NOT_COPIED))
    ]
    away = []
    for path in [*others, *map(Path, shards)]:
        target = (folder / path).resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            away.append(str(path))
    if away:
        raise AdapterError(
            f"{folder} links to files outside of it: {', '.join(away)}; put the files themselves there"
        )
    return [path for path in others if (folder / path).is_file()]
