"""From shards to one adapter: first a proof that every row is there once, then one pass over the bytes.

`plan_merge` looks at manifests only. `apply_merge` reads all shards side by side, each front to back, checks
them on the way and writes the adapter front to back, so that no matrix is ever held in memory.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from skyrl_maze.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_problems
from skyrl_maze.durable import (
    CHUNK_BYTES,
    FileRecord,
    HashedFile,
    explained,
    new_file,
    open_regular,
    require_space,
)
from skyrl_maze.errors import AdapterError
from skyrl_maze.shards import (
    BYTES_OF,
    ShardManifest,
    ShardTensor,
    safetensors_header,
    shard_header,
)

_SHOWN = 30


@dataclass(frozen=True)
class MergedTensor:
    """A whole matrix, and the ranks that hold rows of it, in the order of the rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    """(rank, bytes) of each."""


@dataclass(frozen=True)
class MergePlan:
    """Shards that were proven to make up one adapter, and how; `manifests` by rank."""

    run_id: str
    step: int
    attempt: int
    manifests: tuple[ShardManifest, ...]
    tensors: tuple[MergedTensor, ...]
    """In the order of their data, which is that of every shard."""

    @property
    def header(self) -> bytes:
        """The start of the merged file."""
        return safetensors_header((t.name, t.dtype, t.shape) for t in self.tensors)

    @property
    def bytes(self) -> int:
        """The size of the merged file."""
        return len(self.header) + sum(size for t in self.tensors for _, size in t.pieces)


def plan_merge(manifests: Iterable[ShardManifest], allow_vision: bool = False) -> MergePlan:
    """Prove that these shards make up one adapter.

    All ranks must be there once and agree on run, step, attempt and world size; every rank must name every
    matrix, with the same shape and dtype; and each row must come from exactly one rank. A copy of rows that
    another rank writes is refused even if it were equal: replicas write 0 rows.

    Raises:
        AdapterError: they do not; lists every problem.
    """
    shards = sorted(manifests, key=lambda manifest: manifest.rank)
    problems = _rank_problems(shards)
    names = {tensor.name for shard in shards for tensor in shard.tensors}
    parts: dict[str, list[tuple[int, ShardTensor]]] = {name: [] for name in names}
    for shard in shards:
        for tensor in shard.tensors:
            parts[tensor.name].append((shard.rank, tensor))
    for name, held in sorted(parts.items()):
        problems += _tensor_problems(name, held, {shard.rank for shard in shards}, complete=not problems)
    problems += adapter_problems({name: held[0][1].shape for name, held in parts.items()}, allow_vision)
    if problems:
        shown = problems[:_SHOWN] + [f"and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)
        title = f"{len(shards)} shards do not make up an adapter; let the ranks write them anew:"
        raise AdapterError("\n  - ".join([title, *shown]))
    first = shards[0]
    return MergePlan(
        first.run_id,
        first.step,
        first.attempt,
        tuple(shards),
        tuple(_merged(parts[tensor.name]) for tensor in first.tensors),
    )


def _rank_problems(shards: list[ShardManifest]) -> list[str]:
    if not shards:
        return ["there are none"]
    problems = []
    for field in ("run_id", "step", "attempt", "world_size"):
        ranks: dict[Any, list[int]] = {}
        for shard in shards:
            ranks.setdefault(getattr(shard, field), []).append(shard.rank)
        if len(ranks) > 1:
            said = "; ".join(f"{value!r} on ranks {_listed(found)}" for value, found in ranks.items())
            problems.append(f"the ranks disagree on {field}: {said}")
    present = [shard.rank for shard in shards]
    world_size = shards[0].world_size
    if missing := sorted(set(range(world_size)) - set(present)):
        problems.append(f"no shard of ranks {_listed(missing)} of {world_size}")
    if extra := [rank for rank in present if rank >= world_size]:
        problems.append(f"ranks {_listed(extra)} are beyond the world size {world_size}")
    if twice := sorted({rank for rank in present if present.count(rank) > 1}):
        problems.append(f"several shards of ranks {_listed(twice)}")
    return problems


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _tensor_problems(
    name: str, held: list[tuple[int, ShardTensor]], ranks: set[int], complete: bool
) -> list[str]:
    """What is wrong with one matrix; its rows are counted only where every rank had its say."""
    for field in ("shape", "dtype"):
        if len(values := {getattr(tensor, field) for _, tensor in held}) > 1:
            return [f"{name}: the ranks disagree on its {field}: {', '.join(map(str, sorted(values)))}"]
    if silent := sorted(ranks - {rank for rank, _ in held}):
        return [f"{name}: ranks {_listed(silent)} do not name it; without rows of it they write 0 rows"]
    if not complete:
        return []
    problems, row, before = [], 0, -1
    for rank, tensor in _by_row(held):
        start = tensor.row_offset
        if start > row:
            problems.append(f"{name}: no rank holds rows {row} to {start - 1}")
        elif start < row:
            problems.append(f"{name}: ranks {before} and {rank} both hold row {start}; a replica gives none")
        row, before = max(row, start + tensor.rows), rank
    if row < held[0][1].shape[0]:
        problems.append(f"{name}: no rank holds rows {row} to {held[0][1].shape[0] - 1}")
    return problems


def _by_row(held: list[tuple[int, ShardTensor]]) -> list[tuple[int, ShardTensor]]:
    return sorted((part for part in held if part[1].rows), key=lambda part: (part[1].row_offset, part[0]))


def _merged(held: list[tuple[int, ShardTensor]]) -> MergedTensor:
    whole = held[0][1]
    pieces = tuple((rank, BYTES_OF[t.dtype] * prod(t.local_shape)) for rank, t in _by_row(held))
    return MergedTensor(whole.name, whole.dtype, whole.shape, pieces)


class _ShardReader:
    """Reads a shard front to back; what it read is trusted only after `finish`."""

    def __init__(self, folder: Path, manifest: ShardManifest) -> None:
        self._path, self._manifest = folder / manifest.file, manifest
        self._file = open_regular(folder, manifest.file)
        self._checksum = blake3()
        self._buffer, self._ready = memoryview(bytearray(CHUNK_BYTES)), memoryview(b"")

    def __enter__(self) -> "_ShardReader":
        return self

    def __exit__(self, *_exc: object) -> None:
        self._file.close()

    def check_start(self) -> None:
        """Check the size, and that the file holds what its manifest says."""
        size, header = os.fstat(self._file.fileno()).st_size, shard_header(self._manifest.tensors)
        if size != self._manifest.bytes:
            raise self._damaged(f"it has {size:,} bytes, its manifest says {self._manifest.bytes:,}")
        rest = memoryview(header)
        for chunk in self.chunks(len(header)):
            expected, rest = rest[: len(chunk)], rest[len(chunk) :]
            if chunk != expected:
                raise self._damaged("its header is not what its manifest says")

    def chunks(self, count: int) -> Iterator[memoryview]:
        """The next `count` bytes; each chunk holds only until the next is asked for."""
        while count:
            if not self._ready and not self._read_on():
                raise self._damaged("it ends too early")
            chunk = self._ready[:count]
            self._ready = self._ready[len(chunk) :]
            count -= len(chunk)
            yield chunk

    def _read_on(self) -> int:
        got = self._file.readinto(self._buffer)
        self._ready = self._buffer[:got]
        self._checksum.update(self._ready)
        return got

    def finish(self) -> None:
        """Check that all was read and what was read is what the rank wrote."""
        if self._ready or self._read_on() or self._checksum.hexdigest() != self._manifest.blake3:
            raise self._damaged("its checksum is not that of its manifest")

    def _damaged(self, why: str) -> AdapterError:
        return AdapterError(
            f"{self._path} is damaged: {why}; let rank {self._manifest.rank} write it anew, as a new attempt"
        )


def apply_merge(
    plan: MergePlan,
    shards_folder: Path,
    out_folder: Path,
    adapter_config: Mapping[str, Any],
    progress: Callable[[int], None] = lambda size: None,
) -> list[FileRecord]:
    """Write the adapter of a plan into an empty folder, and say what the files are.

    Memory: a chunk of 1 MiB a rank. On any error no file is left with a final name.

    Args:
        adapter_config: such as `peft_config` gives.
        progress: gets the number of bytes just written.

    Raises:
        AdapterError: a shard is not what its manifest says, or the config does not fit the matrices.
        SetupError: the disk is too full.
    """
    config = config_bytes(adapter_config)
    _check_ranks(plan, adapter_config)
    needed = plan.bytes + len(config)
    with contextlib.ExitStack() as stack, explained("merge shards", out_folder, needed):
        require_space(out_folder, needed)
        readers = [stack.enter_context(_ShardReader(shards_folder, m)) for m in plan.manifests]
        for reader in readers:
            reader.check_start()
        with new_file(out_folder / WEIGHTS_FILE) as weights:
            _copy(plan, readers, weights, progress)
            for reader in readers:
                reader.finish()
        with new_file(out_folder / CONFIG_FILE) as file:
            file.write(config)
        _read_back(plan, out_folder / WEIGHTS_FILE)
    return [weights.record(WEIGHTS_FILE), file.record(CONFIG_FILE)]


def _read_back(plan: MergePlan, path: Path) -> None:
    """Let safetensors, which every loader uses, judge the file's structure."""
    try:
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
    except SafetensorError as error:
        raise AdapterError(f"safetensors does not read {path}: {error}") from error
    if names != {tensor.name for tensor in plan.tensors}:
        raise AdapterError(f"safetensors finds other matrices in {path} than were written")


def _copy(
    plan: MergePlan, readers: list[_ShardReader], out: HashedFile, progress: Callable[[int], None]
) -> None:
    out.write(plan.header)
    progress(len(plan.header))
    for tensor in plan.tensors:
        for rank, size in tensor.pieces:
            for chunk in readers[rank].chunks(size):
                out.write(chunk)
            progress(size)


def config_bytes(adapter_config: Mapping[str, Any]) -> bytes:
    """The content of adapter_config.json; AdapterError if it is no JSON."""
    try:
        return json.dumps(dict(adapter_config), indent=2, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise AdapterError(f"cannot write the adapter config: {error}; make it with peft_config") from error


def _check_ranks(plan: MergePlan, config: Mapping[str, Any]) -> None:
    """Refuse a config of another rank: engines would scale, or refuse, what they load."""
    patterns = config.get("rank_pattern") or {}
    allowed = {config.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())}
    for tensor in plan.tensors:
        if ".lora_A." in tensor.name and tensor.shape[0] not in allowed:
            raise AdapterError(
                f"{tensor.name} is of rank {tensor.shape[0]}, the adapter config says r={config.get('r')!r} "
                f"and rank_pattern={patterns!r}; give the config that it was trained with"
            )
