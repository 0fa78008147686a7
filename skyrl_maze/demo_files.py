"""Demonstrations on disk: a parquet file, or JSON lines with a folder of pictures; whole or not there.

Demonstrations pass through one by one. The same ones give the same bytes, as long as pyarrow is the same.
"""

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_maze.dataset import write_whole
from skyrl_maze.demo_rows import dataset_info, llama_factory_row, trl_row, trl_schema
from skyrl_maze.demonstrations import Demonstration, Demonstrations
from skyrl_maze.errors import ConfigError, DatasetError, SetupError

Progress = Callable[[int, int], None]

FOLDER_ENTRY = "demonstrations"  # the name within a folder of its own
_INFO = "dataset_info.json"
_ROWS_PER_GROUP = 64  # few, because `datasets` reads whole groups to show or shuffle rows
_EPISODES_PER_FOLDER = 1000
_SAMPLE = 32  # episodes whose size tells that of all
_MARGIN = 1.1


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        episodes: demonstrations.
        rows: as many, or one for each right answer.
        turns: answers of all episodes.
        wrong_turns: answers that are detours.
        pictures: pictures of all episodes.
        bytes: size of the rows and the pictures.
        sha256: of the episodes themselves, the same whatever they are written as.
    """

    episodes: int
    rows: int
    turns: int
    wrong_turns: int
    pictures: int
    bytes: int
    sha256: str


class _Tally:
    """Counts the demonstrations that pass, and tells how far it is."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._hash = total, progress, hashlib.sha256()
        self.episodes = self.rows = self.turns = self.wrong_turns = self.pictures = self.bytes = 0

    def watch(self, demos: Iterable[Demonstration]) -> Iterator[Demonstration]:
        for demo in demos:
            yield demo
            self.episodes += 1
            self.turns += len(demo.right)
            self.wrong_turns += demo.wrong_turns
            self.pictures += len(demo.pictures)
            digests = [hashlib.sha256(picture).hexdigest() for picture in demo.pictures]
            facts = [demo.maze.to_text(), demo.goal_rule, demo.max_turns, demo.right]
            self._hash.update(json.dumps([*facts, demo.messages, digests], sort_keys=True).encode())
            if self._progress:
                self._progress(self.episodes, self._total)

    def report(self) -> Report:
        counts = (self.episodes, self.rows, self.turns, self.wrong_turns, self.pictures, self.bytes)
        return Report(*counts, self._hash.hexdigest())


def write_demonstrations(
    out: Path, demos: Demonstrations, per_turn: bool = False, progress: Progress | None = None
) -> Report:
    """Write demonstrations to `out`, which must not exist.

    Args:
        out: `FILE.parquet`, for TRL; a folder to make, for LLaMA-Factory; or `FILE.jsonl`, which puts the
            rows, the folder `FILE-pictures` and an entry in `dataset_info.json` into a folder that exists.
        demos: what to write.
        per_turn: a row for each right answer, which it ends with, instead of one for each episode.
        progress: called with (episodes written, episodes in all).

    Raises:
        ConfigError: `out` exists, or is the name of neither.
        DatasetError: it cannot be written, or the demonstrations cannot be made.
        SetupError: the disk has too little room.
    """
    write = {".parquet": _write_parquet, ".jsonl": _write_beside, "": _write_folder}.get(out.suffix)
    if write is None:
        raise ConfigError(
            f"cannot write demonstrations to {out}: give FILE.parquet (for TRL), FILE.jsonl (for "
            "LLaMA-Factory) or the name of a folder, without a dot"
        )
    for path in _names(out):
        if os.path.lexists(path):
            raise ConfigError(f"cannot write demonstrations to {out}: {path} exists; give another name")
    tally = _Tally(demos.count, progress)
    try:
        stream = iter(demos)
        sample = list(itertools.islice(stream, _SAMPLE))
        _require_space(out, sample, demos.count, per_turn)
        write(out, tally.watch(itertools.chain(sample, stream)), per_turn, tally)
    except OSError as error:
        raise DatasetError(
            f"cannot write demonstrations to {out}: {error.strerror or error}; "
            "free space or give another place"
        ) from error
    return tally.report()


def _names(out: Path) -> list[Path]:
    """What must not exist."""
    return [out, _pictures_beside(out)] if out.suffix == ".jsonl" else [out]


def _pictures_beside(lines: Path) -> Path:
    return lines.with_name(f"{lines.stem}-pictures")


def _rows_of(demo: Demonstration, per_turn: bool) -> Iterator[Demonstration]:
    return demo.up_to_each_answer() if per_turn else iter([demo])


def _write_parquet(out: Path, demos: Iterator[Demonstration], per_turn: bool, tally: _Tally) -> None:
    def write(file: BinaryIO) -> None:
        tally.rows, tally.bytes = _write_groups(file, demos, per_turn)

    write_whole(out, write)


def _write_groups(file: BinaryIO, demos: Iterable[Demonstration], per_turn: bool) -> tuple[int, int]:
    """Write a parquet file; gives its rows and bytes."""
    schema, count = trl_schema(per_turn), 0
    rows = (trl_row(part, per_turn) for demo in demos for part in _rows_of(demo, per_turn))
    # A wording or a picture that comes again within a group is kept once.
    fixed = {"compression": "zstd", "compression_level": 3, "version": "2.6", "data_page_version": "1.0"}
    with pq.ParquetWriter(file, schema, use_dictionary=True, write_statistics=False, **fixed) as writer:
        for group in itertools.batched(rows, _ROWS_PER_GROUP):
            writer.write_table(pa.Table.from_pylist(list(group), schema))
            count += len(group)
    return count, file.tell()


def _write_folder(out: Path, demos: Iterator[Demonstration], per_turn: bool, tally: _Tally) -> None:
    with _scratch_folder(out) as scratch:
        lines = scratch / f"{FOLDER_ENTRY}.jsonl"
        _fill(lines, demos, per_turn, tally)
        _add_entry(scratch / _INFO, {}, FOLDER_ENTRY, lines.name)
        os.sync()  # one call, where syncing each of a million small files takes hours
        os.rename(scratch, out)


def _write_beside(out: Path, demos: Iterator[Demonstration], per_turn: bool, tally: _Tally) -> None:
    info = out.with_name(_INFO)
    _read_entries(info, out.stem)  # what is wrong with it is told now, not after hours
    with _scratch_folder(out) as scratch:
        lines = scratch / out.name
        _fill(lines, demos, per_turn, tally)
        os.sync()
        made = list[Path]()
        try:
            for part in (_pictures_beside(lines), lines):
                os.rename(part, out.with_name(part.name))
                made.append(out.with_name(part.name))
            _add_entry(info, _read_entries(info, out.stem), out.stem, out.name)
        except BaseException:
            for path in made:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _scratch_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, of which nothing is left unless it got another name."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        scratch.chmod(0o755)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fill(lines: Path, demos: Iterator[Demonstration], per_turn: bool, tally: _Tally) -> None:
    """Write the rows to `lines` and the pictures beside it."""
    with lines.open("w", encoding="utf-8", newline="\n") as file:
        for index, demo in enumerate(demos):
            names = _picture_names(_pictures_beside(lines).name, index, demo)
            for name, picture in dict(zip(names, demo.pictures, strict=True)).items():
                path = lines.parent / name
                path.parent.mkdir(parents=True, exist_ok=True)
                tally.bytes += path.write_bytes(picture)
            for part in _rows_of(demo, per_turn):
                tally.bytes += file.write(_line(part, names, per_turn))
                tally.rows += 1


def _picture_names(folder: str, index: int, demo: Demonstration) -> list[str]:
    """Paths of the pictures, relative to the rows; what looks the same is one file."""
    place = f"{folder}/{index // _EPISODES_PER_FOLDER:04d}/{index:07d}"
    return [f"{place}-{row}-{col}.png" for row, col in demo.positions]


def _line(demo: Demonstration, names: list[str], per_turn: bool) -> str:
    """ASCII, so that its length is its size in bytes."""
    return json.dumps(llama_factory_row(demo, names[: len(demo.pictures)], per_turn)) + "\n"


def _read_entries(info: Path, name: str) -> dict[str, Any]:
    """The entries of a `dataset_info.json`, none if there is no such file."""
    if not info.exists():
        return {}
    try:
        entries = json.loads(info.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"cannot add an entry to {info}: it is no JSON ({error}); mend it first") from error
    if not isinstance(entries, dict) or name in entries:
        what = f"it has an entry {name!r}" if isinstance(entries, dict) else "it holds no object"
        raise ConfigError(f"cannot add an entry to {info}: {what}; take another name or another folder")
    return entries


def _add_entry(info: Path, entries: dict[str, Any], name: str, file_name: str) -> None:
    text = json.dumps({**entries, name: dataset_info(file_name)}, indent=2, ensure_ascii=False)
    write_whole(info, lambda file: file.write(f"{text}\n".encode()))


def _require_space(out: Path, sample: list[Demonstration], count: int, per_turn: bool) -> None:
    """Raise SetupError unless the disk has room for `count` demonstrations like those of the sample."""
    disk = os.statvfs(out.parent)
    scale = _MARGIN * count / len(sample)
    if out.suffix == ".parquet":
        files, size = 1, _write_groups(io.BytesIO(), sample, per_turn)[1]
    else:
        files, size = 1, 0
        for index, demo in enumerate(sample):
            names = _picture_names(out.name, index, demo)
            pictures = dict(zip(names, demo.pictures, strict=True)).values()
            files += len(pictures)
            # A small file takes whole blocks.
            size += sum(-(-len(picture) // disk.f_frsize) * disk.f_frsize for picture in pictures)
            size += sum(len(_line(part, names, per_turn)) for part in _rows_of(demo, per_turn))
    what = f"cannot write {count:,} demonstrations to {out}: they take about"
    free, needed = disk.f_bavail * disk.f_frsize, math.ceil(size * scale)
    if free < needed:
        raise SetupError(
            f"{what} {needed:,} bytes and {free:,} are free; free some, take fewer or give another place"
        )
    # Some file systems have no fixed number of files and say 0.
    if disk.f_files and disk.f_favail < files * scale:
        raise SetupError(
            f"{what} {math.ceil(files * scale):,} files and the file system allows {disk.f_favail:,} more; "
            "write parquet, which is one file"
        )
