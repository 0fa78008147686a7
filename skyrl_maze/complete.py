"""COMPLETE, the file that says what a finished adapter consists of, and the check that it still does."""

import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from skyrl_maze.durable import COMPONENT, DIGEST, Fields, FileRecord, read_sealed, record_of, sealed
from skyrl_maze.errors import AdapterError

COMPLETE = "COMPLETE"
VERSIONS = "versions"
VERSION_NAME = re.compile(r"(0|[1-9]\d{0,14})\.(0|[1-9]\d{0,14})")
SCHEMA = 1
_FILE = re.compile(rf"(?:{COMPONENT.pattern}/)?{COMPONENT.pattern}")


@dataclass(frozen=True)
class Complete:
    """What COMPLETE says: whose adapter it is, and every file of it, by its path from COMPLETE's folder."""

    run_id: str
    step: int
    attempt: int
    files: tuple[FileRecord, ...]


def complete_bytes(complete: Complete) -> bytes:
    """The content of COMPLETE."""
    return sealed({"schema": SCHEMA, **asdict(complete)})


def read_complete(folder: Path) -> Complete:
    """What COMPLETE in a folder says; AdapterError if it is missing, damaged or of another place."""
    path = folder / COMPLETE
    fields = Fields(read_sealed(path), str(path), "schema run_id step attempt files")
    fields.integer("schema", SCHEMA, SCHEMA)
    files = []
    for item in fields.items("files"):
        entry = Fields(item, f"{path}: file", "path bytes blake3")
        name = entry.text("path", _FILE, "a file of this folder, or of a folder in it")
        size, digest = entry.integer("bytes"), entry.text("blake3", DIGEST, "64 hexadecimal digits")
        files.append(FileRecord(name, size, digest))
    if not files or len({file.path for file in files}) < len(files):
        raise AdapterError(f"{path}: lists no file, or one twice")
    run_id = fields.text("run_id", COMPONENT, "a folder's name")
    complete = Complete(run_id, fields.integer("step"), fields.integer("attempt"), tuple(files))
    place = folder.absolute()
    if VERSION_NAME.fullmatch(place.name) and place.parent.name == VERSIONS:
        said = (complete.run_id, f"{complete.step}.{complete.attempt}")
        if said != (place.parent.parent.name, place.name):
            raise AdapterError(f"{path}: is of run {said[0]}, version {said[1]}; it does not belong here")
    return complete


def verify(folder: Path, run_id: str | None = None, content: bool = True) -> Complete:
    """Check every file that COMPLETE lists, and that nothing else lies beside them.

    Args:
        folder: the one that holds COMPLETE.
        run_id: whose adapter it must be, if that matters.
        content: whether to read the files and compare checksums, not only sizes.

    Raises:
        AdapterError: one cannot be trusted; lists every problem.
    """
    complete = read_complete(folder)
    problems = []
    if run_id is not None and complete.run_id != run_id:
        problems.append(f"it is of run {complete.run_id!r}, not of {run_id!r}")
    for parent in sorted({PurePosixPath(file.path).parent for file in complete.files}):
        problems += _folder_problems(folder, parent, complete)
    if not problems:
        for file in complete.files:
            problems += _file_problems(folder, file, content)
    if problems:
        title = f"{folder} cannot be trusted; take another version, or have this one written anew:"
        raise AdapterError("\n  - ".join([title, *problems]))
    return complete


def _folder_problems(folder: Path, parent: PurePosixPath, complete: Complete) -> list[str]:
    place = folder / parent
    try:
        if parent.name and not stat.S_ISDIR(place.lstat().st_mode):
            return [f"{parent}: must be a folder, and no link to one"]
        present = {str(parent / name) for name in os.listdir(place)}
    except OSError as error:
        return [f"{parent}: {error.strerror}"]
    strange = sorted(present - {file.path for file in complete.files} - {COMPLETE})
    return [f"{name}: is not listed in {COMPLETE}" for name in strange]


def _file_problems(folder: Path, file: FileRecord, content: bool) -> list[str]:
    place = folder / PurePosixPath(file.path).parent
    name = PurePosixPath(file.path).name
    try:
        size = (place / name).lstat().st_size
        if size != file.bytes:
            return [f"{file.path}: has {size:,} bytes, must have {file.bytes:,}"]
        if content and record_of(place, name).blake3 != file.blake3:
            return [f"{file.path}: its content has changed (checksum)"]
        if not content and not stat.S_ISREG((place / name).lstat().st_mode):
            return [f"{file.path}: is not a regular file"]
    except OSError as error:
        return [f"{file.path}: {error.strerror}"]
    except AdapterError as error:
        return [f"{file.path}: {error}"]
    return []
