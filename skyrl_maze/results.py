"""A result folder: one evaluation of one policy on one set of mazes, on disk.

    <folder>/settings.json    what `play` was asked for; there first, and only where it was `play`
            /episodes.jsonl   one record a line, see `records`; `play` appends them as they end
            /summary.json     the figures; there last, whole or not at all

A folder without summary.json is not finished. Only the last line of episodes.jsonl may be torn.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from skyrl_maze.dataset import write_whole
from skyrl_maze.durable import NO_SPACE
from skyrl_maze.errors import RecordError, SetupError
from skyrl_maze.evaluate import figures
from skyrl_maze.records import (
    EpisodeRecord,
    Figures,
    Summary,
    episode_line,
    read_episode,
    read_summary,
    summary_bytes,
)

SETTINGS_FILE, EPISODES_FILE, SUMMARY_FILE = "settings.json", "episodes.jsonl", "summary.json"
EVALUATIONS = "evaluations"

Settings = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A finished evaluation; its episodes are in the order of (index, sample)."""

    folder: Path
    summary: Summary
    episodes: tuple[EpisodeRecord, ...]


def step_folder(run_root: Path, step: int) -> Path:
    """Where a run keeps its evaluation after `step`."""
    return run_root / EVALUATIONS / f"step-{step:08d}"


def read_result(folder: Path) -> Result:
    """A finished result folder; of a run's folder, its newest evaluation.

    Raises:
        RecordError: it is none, is not finished, is damaged, or its figures are not those of its episodes.
    """
    folder = _newest(folder)
    if not (folder / SUMMARY_FILE).is_file():
        raise RecordError(_no_result(folder))
    summary = read_summary(_bytes(folder / SUMMARY_FILE), str(folder / SUMMARY_FILE))
    episodes, whole_bytes = read_episodes(folder)
    if whole_bytes < (folder / EPISODES_FILE).stat().st_size:
        raise RecordError(f"{folder / EPISODES_FILE}: its last line is torn, and {SUMMARY_FILE} is there")
    for record in episodes:
        if (record.goal_rule, record.max_turns) != (summary.goal_rule, summary.max_turns):
            raise RecordError(
                f"{folder / EPISODES_FILE}: maze {record.index} was played by rule {record.goal_rule} with "
                f"{record.max_turns} turns, and the summary says {summary.goal_rule} with {summary.max_turns}"
            )
    if _coarse(figures(episodes)) != _coarse(summary.figures):
        raise RecordError(f"{folder / SUMMARY_FILE}: its figures are not those of the episodes beside it")
    return Result(folder, summary, tuple(episodes))


def _coarse(found: Figures) -> Any:
    """The figures without the last digits, in which the mathematics of two machines may differ."""
    return json.loads(json.dumps(asdict(found)), parse_float=lambda digits: round(float(digits), 9))


def _newest(folder: Path) -> Path:
    evaluations = folder / EVALUATIONS
    if (folder / SUMMARY_FILE).exists() or not evaluations.is_dir():
        return folder
    steps = sorted(path for path in evaluations.glob("step-*") if path.is_dir())
    if not steps:
        raise RecordError(f"the run {folder} has not been evaluated: {evaluations} holds no step-*")
    return steps[-1]


def _no_result(folder: Path) -> str:
    if not folder.is_dir():
        return f"no result folder {folder}: give one that skyrl-maze play --out made, or a run's folder"
    if not (folder / EPISODES_FILE).exists():
        return f"{folder} is no result folder: it has neither {SUMMARY_FILE} nor {EVALUATIONS}/"
    count = len(read_episodes(folder)[0])
    return (
        f"{folder} is not finished: it holds {count} episodes and no {SUMMARY_FILE}; "
        "call skyrl-maze play again with the same --out, and it goes on"
    )


def read_episodes(folder: Path) -> tuple[list[EpisodeRecord], int]:
    """The whole records of a folder, in the order of (index, sample), and how many bytes they take.

    What follows those bytes is a torn last line.

    Raises:
        RecordError: the file cannot be read, or one of its lines is no record; names the line.
    """
    path = folder / EPISODES_FILE
    whole, _, _torn = _bytes(path).rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    found = [read_episode(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return sorted(found, key=lambda r: (r.index, r.sample)), len(whole) + bool(whole)


def write_result(folder: Path, summary: Summary, episodes: Sequence[EpisodeRecord]) -> None:
    """Make a result folder, or put it in the place of an older one: no reader meets a mix of the two.

    Raises:
        SetupError: the disk is full.
        RecordError: it cannot be written.
    """
    ordered = sorted(episodes, key=lambda r: (r.index, r.sample))
    with explained(f"write the evaluation {folder}", folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            scratch.chmod(0o755)
            lines = b"".join(map(episode_line, ordered))
            write_whole(scratch / EPISODES_FILE, lambda file: file.write(lines))
            write_whole(scratch / SUMMARY_FILE, lambda file: file.write(summary_bytes(summary)))
            _put_in_place(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Rename; the older folder steps aside first, since a rename does not replace a folder with files."""
    if not os.path.lexists(folder):
        os.rename(scratch, folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "old"
    os.rename(folder, aside)
    try:
        os.rename(scratch, folder)
    except OSError:
        os.rename(aside, folder)
        aside.parent.rmdir()
        raise
    shutil.rmtree(aside.parent, ignore_errors=True)


def write_summary(folder: Path, summary: Summary) -> None:
    """Finish a folder whose episodes are all there; raises as `write_result` does."""
    with explained(f"write {folder / SUMMARY_FILE}", folder):
        write_whole(folder / SUMMARY_FILE, lambda file: file.write(summary_bytes(summary)))


class EpisodeLog:
    """Appends to episodes.jsonl of a folder, for settings that stay the same and for one process at a time.

    Args:
        folder: made if it is not there.
        settings: JSON values by name; all that the outcome of an episode depends on.

    Attributes:
        done: the records that were there already; a torn last line is cut off.

    Raises:
        RecordError: the folder holds something else, was made with other settings, is damaged or in use.
        SetupError: the disk is full.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._path, self._folder = folder / EPISODES_FILE, folder
        self._lock = filelock.FileLock(folder / ".lock")
        with explained(f"write results to {folder}", folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                _keep_settings(folder, settings)
                self._path.touch()
                self.done, whole_bytes = read_episodes(folder)
                os.truncate(self._path, whole_bytes)
            except BaseException:
                self._lock.release()
                raise

    def _take_lock(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise RecordError(
                f"cannot write results to {self._folder}: another process does; "
                "wait for it, or give another --out"
            ) from None

    def __enter__(self) -> "EpisodeLog":
        return self

    def __exit__(self, *_exc: object) -> None:
        self._lock.release()

    def append(self, record: EpisodeRecord) -> None:
        """Keep a record: all of it on disk when this returns, or none of it.

        Raises:
            SetupError: the disk is full.
            RecordError: it cannot be written.
        """
        with explained(f"append to {self._path}", self._folder), self._path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                data = memoryview(episode_line(record))
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise


def _keep_settings(folder: Path, settings: Settings) -> None:
    if not (folder / SETTINGS_FILE).exists():
        if strange := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
            raise RecordError(
                f"cannot write results to {folder}: it holds {strange[0]} and no {SETTINGS_FILE}; "
                "give --out a new folder"
            )
        data = json.dumps(settings, indent=1).encode() + b"\n"
        write_whole(folder / SETTINGS_FILE, lambda file: file.write(data))
    refuse_other_settings(folder, settings)


def refuse_other_settings(folder: Path, settings: Settings) -> None:
    """Raise RecordError, with every difference, unless the folder was made with these settings."""
    path = folder / SETTINGS_FILE
    try:
        there = json.loads(_bytes(path))
    except ValueError as error:
        raise RecordError(f"{path} is no JSON ({error}); give --out a new folder") from error
    if not isinstance(there, dict):
        raise RecordError(f"{path} holds no object; give --out a new folder")
    wanted = json.loads(json.dumps(settings))
    names = [*wanted, *(name for name in there if name not in wanted)]
    differ = [
        f"{name} is {there.get(name)!r} there and {wanted.get(name)!r} now"
        for name in names
        if there.get(name) != wanted.get(name)
    ]
    if differ:
        raise RecordError(
            f"cannot continue {folder}: it was made with other settings: {'; '.join(differ)}; "
            "give those again, or another --out"
        )


def _bytes(path: Path) -> bytes:
    if not path.is_file():  # a pipe would be waited for
        raise RecordError(f"cannot read {path}: there is no such file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def explained(what: str, folder: Path) -> Iterator[None]:
    """Turn an OSError into one line: SetupError if the disk is full, RecordError otherwise."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise SetupError(
                f"cannot {what}: {error.strerror}; free some space, or take another disk"
            ) from error
        reason = error.strerror or error
        raise RecordError(f"cannot {what}: {reason}; check {folder}, then try again") from error
