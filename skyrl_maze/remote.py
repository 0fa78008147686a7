"""Adapters published to an object store, such as S3: each version once, and complete or not to be used.

The files of a version lie below `ADDRESS/NAME/`. The marker `COMPLETE` is written last, after the sizes there
were compared, and only if there is none: a reader that waits for it never meets half a version.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from skyrl_maze.errors import AdapterError, SetupError

MARKER = "COMPLETE"

Progress = Callable[[int, int], None]

_ATTEMPTS, _LONGEST_WAIT_S = 4, 8.0
_NEEDED = ("adapter_config.json", "adapter_model.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_ADDRESS = re.compile(r"[a-z][a-z0-9]*://[^\s?#@]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")
# No second try mends a lack of rights, a bucket that is not there, or a version that is.
_LASTING = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
# Faults of the network as botocore raises them: no OSErrors, and not installed beside every store.
_PASSING_NAMES = {"ConnectionError", "HTTPClientError", "IncompleteReadError"}
_SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SECRET_WORDS = r"(?i)((signature|credential|token|secret|password|access.?key)[\w-]*\s*[=:]\s*)[^\s&,;]+"
_SECRETS = (
    (re.compile(r"://[^/\s@]+@"), "://***@"),
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b"), "***"),
    (re.compile(_SECRET_WORDS), r"\1***"),
)


@dataclass(frozen=True)
class _Local:
    """A file of the adapter; `name` is its path below the folder, with slashes."""

    name: str
    path: Path
    size_bytes: int
    sha256: str


def upload_adapter(folder: Path, address: str, name: str, progress: Progress | None = None) -> str:
    """Publish an adapter folder as version `name` and return where it lies: `ADDRESS/NAME`.

    What an interrupted upload left is written over; a version with its marker never is. A version has one
    writer: two at once are not kept apart until the marker. Faults that pass are tried four times.

    Args:
        folder: holds `adapter_model.safetensors` and `adapter_config.json`; hidden files stay behind.
        address: `s3://bucket/prefix`, or any other address that fsspec has a driver for. Credentials come
            from the environment or the machine's role.
        name: of the version, such as `maze-8b-step-120`: letters, digits and `. _ = -`.
        progress: called with (bytes uploaded, bytes in all).

    Raises:
        AdapterError: the folder, address or name cannot be used, the version exists, or the store refuses.
        SetupError: the driver for the address is not installed.
    """
    _check_target(address, name)
    files = _local_files(folder)
    where = f"{address.rstrip('/')}/{name}"
    store, root = _opened(where)
    try:
        if _tried(_size, store, f"{root}/{MARKER}") is not None:
            raise _exists(where)
        strays = _tried(_listing, store, root).keys() - {file.name for file in files}
        if strays:
            raise AdapterError(
                f"cannot publish to {where}: it holds {', '.join(sorted(strays))}, which {folder} does not; "
                "give another name, or remove them first"
            )
        done, total = 0, sum(file.size_bytes for file in files)
        for file in files:
            _tried(store.put_file, str(file.path), f"{root}/{file.name}")
            done += file.size_bytes
            if progress:
                progress(done, total)
        _check_sizes(where, _tried(_listing, store, root), files)
        _tried(_mark, store, f"{root}/{MARKER}", files)
    except FileExistsError:
        raise _exists(where) from None
    except AdapterError:
        raise
    except Exception as error:  # each store has its own errors
        # Without the original error, which may quote a signed address.
        raise AdapterError(
            f"cannot publish {folder} to {where}: {_cause(error)}; without its {MARKER} it is not to be "
            "used: check the address, the rights and the network, then upload again"
        ) from None
    return where


def _check_target(address: str, name: str) -> None:
    if not _ADDRESS.fullmatch(address) or "::" in address:
        raise AdapterError(
            f"cannot publish to {_without_secrets(address)!r}: give an address such as s3://bucket/prefix, "
            "without user, password or query; credentials come from the environment or the machine's role"
        )
    if not _NAME.fullmatch(name):
        raise AdapterError(
            f"cannot publish a version named {name!r}: give up to 128 letters, digits and . _ = -, the first "
            "a letter or digit, such as maze-8b-step-120"
        )


def _local_files(folder: Path) -> list[_Local]:
    if missing := [name for name in _NEEDED if not (folder / name).is_file()]:
        raise AdapterError(
            f"no adapter at {folder}: {' and '.join(missing)} missing; give the folder of a saved adapter"
        )
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = [(path.relative_to(folder).as_posix(), path) for path in paths]
    named = [(name, path) for name, path in named if name != MARKER and not re.search(r"(^|/)\.", name)]
    if pickles := [name for name, _ in named if name.endswith(_PICKLES)]:
        raise AdapterError(
            f"cannot publish {folder}: {', '.join(pickles)} may run code where they are loaded; an adapter "
            "is safetensors, JSON and text: remove them"
        )
    try:
        return [_Local(name, path, path.stat().st_size, _sha256(path)) for name, path in named]
    except OSError as error:
        raise AdapterError(
            f"cannot publish {folder}: {error.filename}: {error.strerror}; make it readable"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(where: str) -> tuple[Any, str]:
    """The store's file system and the path in it."""
    try:
        from fsspec.core import url_to_fs

        store, root = url_to_fs(where)
    except ImportError as error:
        scheme = where.partition("://")[0]
        raise SetupError(
            f"cannot publish to {where}: the driver for {scheme}:// is not installed ({error}); for s3:// it "
            "comes with the extra s3: pip install 'skyrl_maze[s3]'"
        ) from error
    except Exception as error:  # each store has its own errors
        raise AdapterError(
            f"cannot publish to {where}: {_cause(error)}; give an address such as s3://bucket/prefix"
        ) from None
    return store, str(root).rstrip("/")


def _exists(where: str) -> AdapterError:
    return AdapterError(
        f"cannot publish to {where}: it is there and {MARKER}, and nothing is overwritten; give another name"
    )


def _tried(call: Callable[..., Any], *given: Any) -> Any:
    """The result of a call, tried again while its fault is one that passes; its last error otherwise."""
    again = Retrying(
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_WAIT_S),
        retry=retry_if_exception(_passes),
        reraise=True,
    )
    return again(call, *given)


def _passes(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return not isinstance(error, _LASTING)
    return any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__)


def _size(store: Any, path: str) -> int | None:
    """Bytes of an object, None if there is none; `exists` of fsspec takes every fault for absence."""
    store.invalidate_cache()
    try:
        return int(store.info(path)["size"])
    except FileNotFoundError:
        return None


def _listing(store: Any, root: str) -> dict[str, int]:
    """Bytes of every object of the version, by its name below `root`."""
    store.invalidate_cache()
    found = store.find(root, detail=True)
    sizes = {path.removeprefix(f"{root}/"): int(info["size"]) for path, info in found.items()}
    return {name: size for name, size in sizes.items() if name and not name.endswith("/")}


def _check_sizes(where: str, found: dict[str, int], files: Iterable[_Local]) -> None:
    wrong = [
        f"{file.name}: {found.get(file.name, 'no')} bytes of {file.size_bytes}"
        for file in files
        if found.get(file.name) != file.size_bytes
    ]
    if wrong:
        raise AdapterError(
            f"the upload to {where} arrived incomplete: {'; '.join(wrong)}; it has no {MARKER} and is not to "
            "be used: upload again, and let nothing write to the folder meanwhile"
        )


def _mark(store: Any, path: str, files: Iterable[_Local]) -> None:
    """Write the marker if there is none; one that says the same is that of a try whose answer was lost."""
    sizes = {file.name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for file in files}
    marker = json.dumps({"files": sizes}, indent=2, sort_keys=True).encode()
    try:
        store.pipe_file(path, marker, mode="create")
    except FileExistsError:
        if store.cat_file(path) != marker:
            raise


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {_without_secrets(' '.join(str(error).split()))}"


def _without_secrets(text: str) -> str:
    for variable in _SECRET_VARIABLES:
        if value := os.environ.get(variable):
            text = text.replace(value, "***")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
