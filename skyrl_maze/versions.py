"""Versions of an adapter in a shared folder: published whole or not at all, and never changed afterwards.

    <root>/<run_id>/versions/<step>.<attempt>/shards/     what the ranks wrote
                                             /adapter/    what PEFT and vLLM load
                                             /COMPLETE    the files of adapter/, written last

A reader trusts only what COMPLETE lists. All that is unfinished has a name that begins with a dot, or lies in
a version without COMPLETE.
"""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_maze.complete import COMPLETE, VERSION_NAME, VERSIONS, Complete, complete_bytes, verify
from skyrl_maze.durable import (
    COMPONENT,
    FileRecord,
    explained,
    new_file,
    record_of,
    refuse_existing,
    sync_folder,
)
from skyrl_maze.errors import AdapterError

ADAPTER, SHARDS = "adapter", "shards"
Build = Callable[[Path], Iterable[FileRecord] | None]


@dataclass(frozen=True, order=True)
class Version:
    """One attempt to share the adapter of one step; a later step, then a later attempt, is newer."""

    step: int
    attempt: int
    path: Path

    @property
    def run_id(self) -> str:
        return self.path.parent.parent.name

    @property
    def shards(self) -> Path:
        return self.path / SHARDS

    @property
    def adapter(self) -> Path:
        return self.path / ADAPTER


def versions_folder(root: Path, run_id: str) -> Path:
    """Where a run's versions lie; AdapterError unless its id is a plain folder name."""
    if not isinstance(run_id, str) or not COMPONENT.fullmatch(run_id):
        raise AdapterError(
            f"run id {run_id!r} names a folder: it must begin with a letter or digit and go on with "
            "letters, digits and . _ - only, at most 200 in all"
        )
    return root / run_id / VERSIONS


def all_versions(root: Path, run_id: str) -> list[Version]:
    """A run's versions, complete or not, oldest first."""
    folder = versions_folder(root, run_id)
    if not folder.exists():
        return []
    with explained("list versions", folder), os.scandir(folder) as entries:
        found = [(VERSION_NAME.fullmatch(e.name), e) for e in entries if e.is_dir(follow_symlinks=False)]
    return sorted(Version(int(m[1]), int(m[2]), folder / e.name) for m, e in found if m)


def new_version(root: Path, run_id: str, step: int) -> Version:
    """Make the folder of a step's next attempt; of several callers at once each gets its own.

    Raises:
        AdapterError: the run id or the step cannot be, or the folder cannot be made.
        SetupError: the disk is full.
    """
    folder = versions_folder(root, run_id)
    if isinstance(step, bool) or not 0 <= step < 10**15:
        raise AdapterError(f"step={step!r}: must be a whole number of 0 or more")
    with explained("make a version", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder.parent, root, root.parent):
            sync_folder(parent)
        attempt = max((v.attempt + 1 for v in all_versions(root, run_id) if v.step == step), default=0)
        while True:
            version = Version(step, attempt, folder / f"{step}.{attempt}")
            with contextlib.suppress(FileExistsError):
                version.path.mkdir()
                sync_folder(folder)
                return version
            attempt += 1


def publish(version: Version, build: Build) -> Complete:
    """Let `build` fill a scratch folder, which then becomes the version's adapter; COMPLETE comes last.

    Args:
        build: writes the files into the folder it gets. It may return records of what it wrote and synced
            itself, such as `apply_merge` does; other files are read again and synced.

    Raises:
        AdapterError: the version was published, or begun, before; or `build` made something but files.
        SetupError: the disk is full. Nothing is left of the attempt then, and older versions stay.
    """
    with explained(f"publish step {version.step}", version.path):
        refuse_existing(version.path / COMPLETE)
        refuse_existing(version.adapter)
        scratch = Path(tempfile.mkdtemp(prefix=f".{ADAPTER}.", dir=version.path))
        try:
            files = _built(scratch, build)
            os.rename(scratch, version.adapter)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        sync_folder(version.path)
        listed = tuple(FileRecord(f"{ADAPTER}/{file.path}", file.bytes, file.blake3) for file in files)
        complete = Complete(version.run_id, version.step, version.attempt, listed)
        with new_file(version.path / COMPLETE) as marker:
            marker.write(complete_bytes(complete))
    return complete


def publish_folder(
    out: Path, build: Build, run_id: str, step: int, attempt: int, replace: bool = False
) -> Complete:
    """As `publish`, but as one folder of its own that holds the files and COMPLETE beside them.

    Args:
        replace: whether a folder of that name may be there; it goes when the new one is whole.
    """
    out = out.absolute()
    with explained(f"write {out.name}", out.parent):
        if not replace:
            refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            complete = Complete(run_id, step, attempt, _built(scratch, build))
            with new_file(scratch / COMPLETE) as marker:
                marker.write(complete_bytes(complete))
            if replace:
                remove(out)
            os.rename(scratch, out)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        sync_folder(out.parent)
    return complete


def _built(scratch: Path, build: Build) -> tuple[FileRecord, ...]:
    """Run `build`; all it made is on disk when this returns."""
    scratch.chmod(0o755)
    known = {record.path: record for record in build(scratch) or ()}
    files = []
    for path in sorted(scratch.iterdir()):
        if not COMPONENT.fullmatch(path.name) or path.name == COMPLETE:
            raise AdapterError(f"cannot publish {path.name!r}: an adapter has no file of that name")
        record = known.pop(path.name, None)
        if record is None:
            record = record_of(scratch, path.name)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.lstat().st_size != record.bytes:
            raise AdapterError(f"cannot publish {path.name}: it has not the size that it was written with")
        files.append(record)
    if known or not files:
        raise AdapterError(f"cannot publish: {', '.join(known) or 'no file at all'} was not written")
    sync_folder(scratch)
    return tuple(files)


def complete_versions(root: Path, run_id: str, content: bool = False) -> list[Version]:
    """A run's usable versions, oldest first; damaged ones are left out."""
    return [version for version in all_versions(root, run_id) if _usable(version, run_id, content)]


def _usable(version: Version, run_id: str, content: bool) -> bool:
    try:
        verify(version.path, run_id, content)
    except AdapterError:
        return False
    return True


def latest(root: Path, run_id: str, content: bool = False) -> Version | None:
    """The newest usable version, or None; sizes are checked, and with `content` the checksums too."""
    newest_first = reversed(all_versions(root, run_id))
    return next((version for version in newest_first if _usable(version, run_id, content)), None)


def retain(root: Path, run_id: str, keep: int, in_use: Iterable[Version] = ()) -> list[Version]:
    """Remove complete versions but the newest `keep` and those in use; return what was removed."""
    if isinstance(keep, bool) or keep < 1:
        raise AdapterError(f"keep={keep!r}: must be at least 1, so that one version stays")
    used = {(version.step, version.attempt) for version in in_use}
    old = [v for v in complete_versions(root, run_id)[:-keep] if (v.step, v.attempt) not in used]
    for version in old:
        remove(version.path)
    return old


def clean_leftovers(root: Path, run_id: str, older_than_s: float) -> list[Path]:
    """Remove what crashed attempts left, if nothing in it changed for `older_than_s` seconds.

    That is: versions without COMPLETE, and entries of any version whose names begin with a dot. A version
    whose COMPLETE is there stays, be it damaged.
    """
    folder = versions_folder(root, run_id)
    leftovers = [v.path for v in all_versions(root, run_id) if not os.path.lexists(v.path / COMPLETE)]
    for place in [folder, *(v.path for v in all_versions(root, run_id) if v.path not in leftovers)]:
        leftovers += [path for path in place.glob(".*") if path.name.startswith(".")]
    now = time.time()
    removed = [path for path in leftovers if now - changed_s(path) >= older_than_s]
    for path in removed:
        remove(path)
    return removed


def changed_s(path: Path) -> float:
    """When anything in `path` last changed, in seconds since 1970; now, if it changes at this moment."""
    try:
        times = [path.lstat().st_mtime]
        for parent, folders, files in os.walk(path):
            times += [os.lstat(os.path.join(parent, name)).st_mtime for name in folders + files]
    except FileNotFoundError:
        return time.time()
    return max(times)


def remove(path: Path) -> None:
    """Remove a file, or a folder that is gone for every reader before the first of its files is."""
    with explained(f"remove {path.name}", path.parent), contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        hidden: Any = path
        if not path.name.startswith("."):
            hidden = path.with_name(f".removed.{path.name}.{os.getpid()}.{time.monotonic_ns()}")
            os.rename(path, hidden)
        shutil.rmtree(hidden)
