"""The rows of LoRA matrices that one rank holds, as a safetensors file and a manifest that vouches for it.

FSDP splits every matrix along its rows: rank 3 may hold rows 48 to 63 of one, and none of a small one. Each
rank writes its own, without talking to the others; `merge` proves that they fit together.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_maze.durable import (
    COMPONENT,
    DIGEST,
    Fields,
    explained,
    new_file,
    read_sealed,
    refuse_existing,
    require_space,
    sealed,
)
from skyrl_maze.errors import AdapterError

if TYPE_CHECKING:
    import torch

SCHEMA = 1
BYTES_OF = {"F32": 4, "F16": 2, "BF16": 2}
_DTYPE = re.compile("|".join(BYTES_OF))
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,499}")
_MAX_RANKS = 1 << 20
_MANIFEST_ROOM = 1 << 20  # more than the manifest of a thousand matrices takes


@dataclass(frozen=True)
class ShardTensor:
    """The rows of one matrix in one shard: `rows` of them from `row_offset` on; none if `rows` is 0."""

    name: str
    shape: tuple[int, ...]
    """Of the whole matrix."""
    row_offset: int
    rows: int
    dtype: str
    """As safetensors says it: F32, F16 or BF16."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.rows, *self.shape[1:])


@dataclass(frozen=True)
class ShardManifest:
    """What a rank says about the shard that it wrote; `bytes` and `blake3` are those of `file`."""

    run_id: str
    step: int
    attempt: int
    rank: int
    world_size: int
    tensors: tuple[ShardTensor, ...]
    file: str
    bytes: int
    blake3: str


def shard_name(rank: int) -> str:
    """The name of a rank's files, without their endings."""
    return f"rank-{rank:05d}"


def tensor_order(name: str, dtype: str) -> tuple[int, str]:
    """Sorts tensors as they lie in a file: the widest first, so that each is aligned."""
    return -BYTES_OF[dtype], name


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file, up to the first byte of data.

    Args:
        tensors: name, dtype and shape of each, in the order of their data.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + BYTES_OF[dtype] * prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shard_header(tensors: Iterable[ShardTensor]) -> bytes:
    """The start of a shard file with these tensors."""
    return safetensors_header((t.name, t.dtype, t.local_shape) for t in tensors)


def shard_bytes(tensors: tuple[ShardTensor, ...]) -> int:
    """The size of a shard file with these tensors."""
    return len(shard_header(tensors)) + sum(BYTES_OF[t.dtype] * prod(t.local_shape) for t in tensors)


def write_shard(
    folder: Path,
    rank: int,
    world_size: int,
    tensors: Mapping[str, tuple["torch.Tensor", tuple[int, ...], int]],
    wire_dtype: "torch.dtype | None" = None,
    *,
    run_id: str,
    step: int,
    attempt: int,
) -> ShardManifest:
    """Write a rank's rows, then the manifest; either is there whole or not at all, and never overwritten.

    Args:
        folder: where the shards of this version lie; made if only itself is missing.
        tensors: for each name the local rows (float, on any device), the shape of the whole matrix and the
            number of the first row. A rank without rows of a matrix gives an empty tensor. Each row comes
            from one rank: where several hold the same rows, all but one give none.
        wire_dtype: bfloat16 unless given; float32 and float16 work as well.

    Raises:
        AdapterError: an argument is impossible, the files exist, or they cannot be written.
        SetupError: the disk is too full.
    """
    import torch

    dtype = wire_dtype or torch.bfloat16
    code = _code_of(dtype)
    given = (_entry(name, *rows, code) for name, rows in tensors.items())
    entries = tuple(sorted(given, key=lambda entry: tensor_order(entry.name, entry.dtype)))
    name, size = shard_name(rank), shard_bytes(entries)
    manifest = ShardManifest(
        run_id, step, attempt, rank, world_size, entries, f"{name}.safetensors", size, "0" * 64
    )
    _check_writable(manifest)
    with explained(f"write the shard of rank {rank}", folder, size + _MANIFEST_ROOM):
        folder.mkdir(exist_ok=True)
        require_space(folder, size + _MANIFEST_ROOM)
        refuse_existing(folder / f"{name}.json")
        with new_file(folder / manifest.file) as file:
            file.write(shard_header(entries))
            for entry in filter(lambda entry: entry.rows, entries):
                file.write(_bytes_of(tensors[entry.name][0], dtype))
        manifest = replace(manifest, blake3=file.hexdigest())
        try:
            with new_file(folder / f"{name}.json") as json_file:
                json_file.write(sealed(_record(manifest)))
        except BaseException:
            (folder / manifest.file).unlink(missing_ok=True)
            raise
    return manifest


def _code_of(dtype: "torch.dtype") -> str:
    """What safetensors calls a dtype."""
    import torch

    codes = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if dtype not in codes:
        raise AdapterError(f"cannot write a shard as {dtype}; allowed: float32, float16, bfloat16")
    return codes[dtype]


def _bytes_of(rows: "torch.Tensor", dtype: "torch.dtype") -> memoryview:
    import torch

    return memoryview(rows.detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy())


def _entry(
    name: str, rows: "torch.Tensor", shape: tuple[int, ...], row_offset: int, dtype: str
) -> ShardTensor:
    count = int(rows.shape[0]) if rows.ndim and rows.numel() else 0
    entry = ShardTensor(name, tuple(int(n) for n in shape), int(row_offset), count, dtype)
    if not rows.is_floating_point() or (count and tuple(rows.shape) != entry.local_shape):
        raise AdapterError(
            f"cannot write {name}: the local rows are {rows.dtype} {list(rows.shape)}; "
            f"allowed: floating point rows of a matrix {list(entry.shape)}"
        )
    return entry


def _check_writable(manifest: ShardManifest) -> None:
    """Refuse what no reader would take."""
    _parse(json.loads(json.dumps(_record(manifest))), f"shard of rank {manifest.rank}")


def _record(manifest: ShardManifest) -> dict[str, Any]:
    tensors = [vars(tensor) for tensor in manifest.tensors]  # asdict would copy each of a thousand
    return {"schema": SCHEMA, **vars(manifest), "tensors": tensors}


def read_manifest(path: Path) -> ShardManifest:
    """Read a manifest; every type, range and name in it is checked.

    Raises:
        AdapterError: it is missing, torn, damaged, of another schema, or says something impossible.
    """
    manifest = _parse(read_sealed(path), str(path))
    if path.name != f"{shard_name(manifest.rank)}.json":
        raise AdapterError(f"{path}: is the manifest of rank {manifest.rank}; it has the wrong name")
    return manifest


def read_manifests(folder: Path) -> list[ShardManifest]:
    """All manifests in a folder, by rank.

    Raises:
        AdapterError: there are none, or some cannot be used; lists each of those.
    """
    manifests, problems = [], []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            manifests.append(read_manifest(path))
        except AdapterError as error:
            problems.append(str(error))
    if problems:
        raise AdapterError("\n  - ".join([f"{folder} holds manifests that cannot be used:", *problems]))
    if not manifests:
        raise AdapterError(f"{folder} holds no shards (rank-00000.json and so on); give a folder that does")
    return sorted(manifests, key=lambda manifest: manifest.rank)


def _parse(record: Any, where: str) -> ShardManifest:
    keys = "schema run_id step attempt rank world_size tensors file bytes blake3"
    fields = Fields(record, where, keys)
    fields.integer("schema", SCHEMA, SCHEMA)
    world_size = fields.integer("world_size", 1, _MAX_RANKS)
    rank = fields.integer("rank", 0, world_size - 1)
    file = f"{shard_name(rank)}.safetensors"
    tensors = tuple(_parse_tensor(item, f"{where}: tensor") for item in fields.items("tensors"))
    order = [tensor_order(tensor.name, tensor.dtype) for tensor in tensors]
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise AdapterError(f"{where}: names a tensor twice")
    if order != sorted(order):
        raise AdapterError(f"{where}: its tensors are not in the order of their data")
    size = shard_bytes(tensors)
    return ShardManifest(
        fields.text("run_id", COMPONENT, "a folder's name: letters, digits and . _ -"),
        fields.integer("step"),
        fields.integer("attempt"),
        rank,
        world_size,
        tensors,
        fields.text("file", re.compile(re.escape(file)), f"{file!r}, in the same folder"),
        fields.integer("bytes", size, size),
        fields.text("blake3", DIGEST, "64 hexadecimal digits"),
    )


def _parse_tensor(item: Any, where: str) -> ShardTensor:
    fields = Fields(item, where, "name shape row_offset rows dtype")
    name = fields.text("name", _NAME, "a parameter's name")
    fields = Fields(item, f"{where} {name}", "name shape row_offset rows dtype")
    shape = fields.items("shape")
    if not 1 <= len(shape) <= 8 or not all(type(n) is int and 0 < n < 1 << 40 for n in shape):
        raise fields.refuse("shape", "1 to 8 whole numbers above 0")
    row_offset = fields.integer("row_offset", 0, shape[0])
    rows = fields.integer("rows", 0, shape[0] - row_offset)
    dtype = fields.text("dtype", _DTYPE, f"one of {', '.join(BYTES_OF)}")
    return ShardTensor(name, tuple(shape), row_offset, rows, dtype)
