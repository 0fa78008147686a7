"""Files that survive a crash, and files that are read without trust.

A new file is written under a hidden temporary name, synced, and only then given its name, so that whoever
sees the name sees all of it. Records are JSON with a checksum of themselves. No symbolic link is followed.
Checksums are BLAKE3: as strict as SHA-256, and several times faster, so that disks set the pace.
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from skyrl_maze.errors import AdapterError, SetupError

COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
DIGEST = re.compile(r"[0-9a-f]{64}")
CHUNK_BYTES = 1 << 20
_SEAL = "seal"
_MAX_RECORD_BYTES = 64 << 20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its path below a folder, its size in bytes and its checksum."""

    path: str
    bytes: int
    blake3: str


class HashedFile:
    """A file that is written once, front to back, and knows its size and checksum."""

    def __init__(self, handle: int) -> None:
        self._handle, self._checksum, self.bytes = handle, blake3(), 0
        self._buffer, self._filled = memoryview(bytearray(CHUNK_BYTES)), 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; small pieces are gathered first."""
        rest = memoryview(data).cast("B")
        self.bytes += len(rest)
        if len(rest) >= CHUNK_BYTES:
            self.flush()
            self._put(rest)
            return
        while rest:
            count = min(len(rest), CHUNK_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == CHUNK_BYTES:
                self.flush()

    def flush(self) -> None:
        """Hand what was gathered to the system."""
        self._put(self._buffer[: self._filled])
        self._filled = 0

    def _put(self, data: memoryview) -> None:
        self._checksum.update(data)
        while data:
            data = data[os.write(self._handle, data) :]

    def hexdigest(self) -> str:
        """The checksum of all that was written so far, but for what was not yet flushed."""
        return self._checksum.hexdigest()

    def record(self, path: str) -> FileRecord:
        """The record of a file that is whole."""
        return FileRecord(path, self.bytes, self.hexdigest())


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[HashedFile]:
    """A file that gets its name when it is whole and on disk; on any error nothing is left of it.

    Raises:
        AdapterError: something has that name already.
    """
    refuse_existing(path)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb", buffering=0):
            os.fchmod(handle, 0o644)
            file = HashedFile(handle)
            yield file
            file.flush()
            os.fsync(handle)
        _give_name(scratch, path)
        sync_folder(path.parent)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _give_name(scratch: str, path: Path) -> None:
    try:
        os.link(scratch, path)  # unlike a rename, this never replaces a file
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            refuse_existing(path)
            raise
        refuse_existing(path)
        os.rename(scratch, path)


def refuse_existing(path: Path) -> None:
    """Raise AdapterError if anything has this name, be it a broken link."""
    if os.path.lexists(path):
        raise AdapterError(f"cannot write {path}: it exists and is never overwritten; take a new attempt")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(folder: Path, needed: int) -> None:
    """Raise SetupError unless `needed` bytes are free where `folder` lies."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(_no_space(folder, free, needed))


@contextlib.contextmanager
def explained(what: str, folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError into one line: SetupError if the disk is full, AdapterError otherwise."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            free = shutil.disk_usage(folder).free if folder.is_dir() else 0
            raise SetupError(f"cannot {what}: {_no_space(folder, free, needed)}") from error
        raise AdapterError(
            f"cannot {what} in {folder}: {error.strerror or error}; check that folder, then try again"
        ) from error


def _no_space(folder: Path, free: int, needed: int | None) -> str:
    wanted = f"{needed:,} are needed" if needed is not None else "more are needed"
    return (
        f"{folder} has {free:,} bytes free and {wanted} (a quota may allow less than is free); "
        "free some, or keep adapters in another place"
    )


def open_regular(folder: Path, name: str) -> io.FileIO:
    """Open a regular file of `folder` for reading, following no link.

    Raises:
        AdapterError: it is missing, cannot be read, or is no regular file.
    """
    path = folder / name
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise AdapterError(f"cannot read {path}: {reason}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise AdapterError(f"cannot read {path}: it is not a regular file")
    return io.FileIO(handle, "rb")


def record_of(folder: Path, name: str) -> FileRecord:
    """The size and checksum of a file of `folder` as it is now."""
    with open_regular(folder, name) as file, explained(f"read {name}", folder):
        digest = blake3()
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        return FileRecord(name, file.tell(), digest.hexdigest())


def sealed(record: dict[str, Any]) -> bytes:
    """A record as JSON that holds its own checksum."""
    return json.dumps({**record, _SEAL: _digest(record)}).encode() + b"\n"


def _digest(record: dict[str, Any]) -> str:
    return blake3(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_sealed(path: Path) -> dict[str, Any]:
    """The record in a file that `sealed` made.

    Raises:
        AdapterError: the file is missing, torn, damaged or something else.
    """
    with open_regular(path.parent, path.name) as file, explained(f"read {path.name}", path.parent):
        size = os.fstat(file.fileno()).st_size
        data = file.readall() if size <= _MAX_RECORD_BYTES else b""
    try:
        record = json.loads(data, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is torn or no JSON ({error}); it must be written anew") from error
    if not isinstance(record, dict) or record.pop(_SEAL, None) != _digest(record):
        raise AdapterError(f"{path} is damaged: its content does not match its seal; it must be written anew")
    return record


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(names := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return names


class Fields:
    """The values of one JSON object, each checked; raises AdapterError that names the file and the key."""

    def __init__(self, value: Any, where: str, keys: str) -> None:
        self._where = where
        if not isinstance(value, dict) or set(value) != set(keys.split()):
            raise AdapterError(f"{where}: must be an object with exactly the keys {', '.join(keys.split())}")
        self._values: dict[str, Any] = value

    def refuse(self, key: str, rule: str) -> AdapterError:
        """The error for a value that breaks `rule`."""
        return AdapterError(f"{self._where}: {key}={self._values[key]!r:.200}: must be {rule}")

    def integer(self, key: str, low: int = 0, high: int = 1 << 53) -> int:
        """A whole number from `low` to `high`."""
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"a whole number from {low} to {high}")
        return value

    def text(self, key: str, pattern: re.Pattern[str], rule: str) -> str:
        """A text that `pattern` matches as a whole."""
        value = self._values[key]
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.refuse(key, rule)
        return value

    def items(self, key: str) -> list[Any]:
        """A list."""
        value = self._values[key]
        if not isinstance(value, list):
            raise self.refuse(key, "a list")
        return value
