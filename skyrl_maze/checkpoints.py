"""The checkpoints of a run: each is there whole or not at all, and the newest that can be trusted is found.

    <folder>/global_step_<N>/shard-...safetensors   what is trained, by `training_state`
                            /rank-00000.json        what else a rank holds
                            /state.json             the trainer's part: `RunState`
                            /COMPLETE               files and checksums, see `complete`

While it is written it has a name that begins with a dot. A launch of the run counts as an attempt, and what
a later attempt saved is newer, at whatever step it stands.
"""

import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from loguru import logger

from skyrl_maze.complete import COMPLETE, read_complete, verify
from skyrl_maze.dataset import write_whole
from skyrl_maze.durable import DIGEST, Fields, explained, new_file, read_sealed, sealed
from skyrl_maze.errors import AdapterError, CheckpointError
from skyrl_maze.versions import changed_s, publish_folder, remove

STATE_FILE = "state.json"
LATEST_FILE = "latest_ckpt_global_step.txt"
SCHEMA = 1
_NAME = re.compile(r"global_step_(0|[1-9]\d{0,14})")
_SCRATCH = re.compile(rf"\.(?:removed\.)?{_NAME.pattern}\..*|\.{re.escape(LATEST_FILE)}\..*")
_EDGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Policy:
    """What the saved tensors belong to: they mean nothing on another base model, or with other settings."""

    base_model: str
    """The id, or the path."""
    base_sha256: str
    """Of the files at that path, see `base_digest`."""
    rank: int
    alpha: float
    target_modules: str
    exclude_modules: str


@dataclass(frozen=True)
class RunState:
    """The trainer's part of a checkpoint."""

    step: int
    position: int
    """Batches that were taken from the data, see `batches`."""
    data: dict[str, int]
    """What their order follows from."""
    ranks: int
    """Of the policy, when it was saved."""
    policy: Policy


@dataclass(frozen=True, order=True)
class Checkpoint:
    """One complete checkpoint; a later attempt, then a later step, is newer."""

    attempt: int
    step: int
    path: Path


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"global_step_{step}"


def save(root: Path, run_id: str, attempt: int, state: RunState, build: Callable[[Path], None]) -> Checkpoint:
    """Let `build` fill a scratch folder, which then becomes the checkpoint of this step.

    Raises:
        AdapterError: something cannot be written. Nothing is left of the attempt then.
        SetupError: the disk is full; likewise.
    """
    path = folder_of(root, state.step)
    _set_aside(path, run_id)

    def build_all(scratch: Path) -> None:
        build(scratch)
        with new_file(scratch / STATE_FILE) as file:
            file.write(sealed({"schema": SCHEMA, **asdict(state)}))

    publish_folder(path, build_all, run_id, state.step, attempt, replace=True)
    with explained(f"write {LATEST_FILE}", root):  # for people and SkyRL's tools; `newest` does not read it
        write_whole(root / LATEST_FILE, lambda file: file.write(str(state.step).encode()))
    return Checkpoint(attempt, state.step, path)


def _set_aside(path: Path, run_id: str) -> None:
    """Give what lies at `path` another name if it is not the run's own: it is not this run's to remove."""
    if not path.exists():
        return
    try:
        if read_complete(path).run_id == run_id:
            return
    except AdapterError as error:
        logger.warning(f"{path} is no checkpoint of this run and is set aside: {error}")
    number = next(n for n in itertools.count() if not _aside(path, n).exists())
    os.rename(path, _aside(path, number))


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"aside-{number}-{path.name}")


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        found = [e.name for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return [root / name for name in sorted(found)]


def _of_run(root: Path, run_id: str) -> Iterator[tuple[Path, Checkpoint | AdapterError | None]]:
    """Each folder with what its COMPLETE says; None: unfinished, or another run's."""
    for path in _folders(root):
        if not os.path.lexists(path / COMPLETE):
            yield path, None
            continue
        try:
            complete = read_complete(path)
            mine = complete.run_id == run_id
            yield path, Checkpoint(complete.attempt, complete.step, path) if mine else None
        except AdapterError as error:
            yield path, error


def next_attempt(root: Path, run_id: str) -> int:
    """The number of the launch that begins now."""
    return max((c.attempt + 1 for _, c in _of_run(root, run_id) if isinstance(c, Checkpoint)), default=0)


def newest(root: Path, run_id: str, notify: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of the run whose files are all as they were written, or None.

    Args:
        notify: is told of each folder that is passed over, and why.

    Raises:
        CheckpointError: there are finished ones, and all are damaged.
    """
    finished, damaged = [], []
    for path, found in _of_run(root, run_id):
        if isinstance(found, Checkpoint):
            finished.append(found)
        elif isinstance(found, AdapterError):
            damaged.append(str(found))
        else:
            notify(f"{path} is passed over: it is unfinished, or of another run than {run_id!r}")
    for checkpoint in sorted(finished, reverse=True):
        try:
            verify(checkpoint.path, run_id)
        except AdapterError as error:
            damaged.append(str(error))
            continue
        for problem in damaged:
            notify(f"a checkpoint is passed over: {problem}")
        return checkpoint
    if damaged:
        raise CheckpointError.from_problems(
            f"no checkpoint of run {run_id!r} in {root} can be trusted; bring one back from a copy, or begin "
            "anew with trainer.resume_mode=none:",
            damaged,
        )
    return None


def at(path: Path) -> Checkpoint:
    """The checkpoint in a folder that was named by hand, of whatever run.

    Raises:
        CheckpointError: it is none that is whole; says what was wrong.
    """
    try:
        complete = verify(path)
    except AdapterError as error:
        raise CheckpointError(
            f"cannot resume from {path}: {error}; give a folder global_step_<N> of this package that holds "
            f"{COMPLETE} (checkpoints of SkyRL itself do not)"
        ) from error
    return Checkpoint(complete.attempt, complete.step, path)


def read_state(checkpoint: Checkpoint) -> RunState:
    """The trainer's part of a checkpoint that was verified; AdapterError if it is damaged."""
    where, record = str(checkpoint.path / STATE_FILE), read_sealed(checkpoint.path / STATE_FILE)
    fields = Fields(record, where, "schema step position data ranks policy")
    fields.integer("schema", SCHEMA, SCHEMA)
    keys = "base_model base_sha256 rank alpha target_modules exclude_modules"
    policy = Fields(record["policy"], f"{where}: policy", keys)
    policy.integer("rank", 1)
    policy.text("base_sha256", re.compile(rf"(?:{DIGEST.pattern})?"), "64 hexadecimal digits, or empty")
    Fields(record["data"], f"{where}: data", "rows batch_size seed")
    return RunState(
        fields.integer("step", checkpoint.step, checkpoint.step),
        fields.integer("position"),
        record["data"],
        fields.integer("ranks", 1),
        Policy(**record["policy"]),
    )


def check_policy(checkpoint: Checkpoint, saved: Policy, now: Policy) -> None:
    """Refuse to go on with another policy than the one that was saved.

    Raises:
        CheckpointError: they differ; lists how.
    """
    setting = {
        "rank": "trainer.policy.model.lora.rank",
        "alpha": "trainer.policy.model.lora.alpha",
        "target_modules": "trainer.policy.model.lora.target_modules",
        "exclude_modules": "trainer.policy.model.lora.exclude_modules",
    }
    problems = [
        f"{name}: saved with {getattr(saved, field)!r}, now {getattr(now, field)!r}"
        for field, name in setting.items()
        if getattr(saved, field) != getattr(now, field)
    ]
    # The same files may lie elsewhere now; a hub id has no files to compare.
    same_files = saved.base_sha256 and saved.base_sha256 == now.base_sha256
    if not same_files and (saved.base_model, saved.base_sha256) != (now.base_model, now.base_sha256):
        other = " (the same path, other files)" if saved.base_model == now.base_model else ""
        problems.append(
            f"trainer.policy.model.path: saved with {saved.base_model!r}, now {now.base_model!r}{other}"
        )
    if problems:
        raise CheckpointError.from_problems(
            f"cannot continue {checkpoint.path} with these settings; set them as they were, or begin anew "
            "with another run.id:",
            problems,
        )


def base_digest(path: Path) -> str:
    """A checksum that tells base models apart: of config.json whole, of weights their sizes, starts and ends.

    Empty if `path` is no folder.
    """
    if not path.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted((*path.glob("config.json"), *path.glob("*.safetensors"), *path.glob("*.bin"))):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(_EDGE_BYTES))
            content.seek(max(0, size - _EDGE_BYTES))
            digest.update(content.read(_EDGE_BYTES))
    return digest.hexdigest()


def retain(root: Path, run_id: str, keep: int) -> list[Path]:
    """Remove the run's complete checkpoints but the newest `keep`; all stay if it is negative."""
    if keep == 0:
        raise CheckpointError("cannot keep 0 checkpoints; give 1 or more, or -1 to keep all")
    mine = sorted(found for _, found in _of_run(root, run_id) if isinstance(found, Checkpoint))
    old = [checkpoint.path for checkpoint in mine[:-keep]] if keep > 0 else []
    for path in old:
        remove(path)
    return old


def clean(root: Path, older_than_s: float) -> list[Path]:
    """Remove what crashed attempts left, if nothing in it changed for `older_than_s` seconds."""
    left = [path for path in root.glob(".*") if _SCRATCH.fullmatch(path.name)]
    old = [path for path in sorted(left) if time.time() - changed_s(path) >= older_than_s]
    for path in old:
        remove(path)
    return old
