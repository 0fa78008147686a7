"""Maze sets: the ones that ship, the ones a recipe describes, and the parquet rows SkyRL trains on.

Seeds are not mazes: 5x5 has 16 distinct puzzles, 7x7 has 768, and other seeds draw the same ones again.
Sets are therefore kept apart by `Maze.key`: no training set holds a puzzle of an evaluation set.
"""

import hashlib
import importlib.resources
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Optional

import numpy as np

from skyrl_maze import __version__
from skyrl_maze.actions import GoalRule
from skyrl_maze.errors import DatasetError, MazeError, closest
from skyrl_maze.maze import MIN_SIZE, Cell, Maze, check_size, generate_maze

_SHIPPED = importlib.resources.files("skyrl_maze") / "maze_sets"
# This many draws in a row without a new puzzle, and the sizes are taken to have no more.
_PATIENCE = 10_000


@dataclass
class MazeSetSpec:
    """A maze set: a shipped one by name, or one that is drawn.

    Attributes:
        name: a shipped set, see `shipped_sets()`; the other fields then say nothing.
        sizes: maze sizes; with several, each maze's size is drawn by weight.
        weights: how often each of `sizes` is drawn, in their order; equally if None.
        count: number of mazes.
        seed: of the draws.
        braid: share of dead ends that get one more opening; 0 for perfect mazes.
    """

    name: Optional[str] = None  # noqa: UP045  SkyRL's config builder knows Optional only
    # Lists, because a recipe that extends another replaces a list and adds to a mapping.
    sizes: list[int] = field(default_factory=lambda: [9])
    weights: Optional[list[float]] = None  # noqa: UP045  SkyRL's config builder knows Optional only
    count: int = 256
    seed: int = 0
    braid: float = 0.0

    def problems(self) -> list[str]:
        """One line for each impossible value."""
        if self.name is not None:
            allowed = shipped_sets()
            if self.name in allowed:
                return []
            hint = closest(self.name, allowed)
            return [f"name={self.name!r}: no such maze set{hint}; shipped: {', '.join(allowed)}"]
        found = []
        if isinstance(self.count, bool) or self.count < 1:
            found.append(f"count={self.count}: must be at least 1")
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            found.append(f"sizes={self.sizes}: give at least one size, and each once")
        if self.weights is not None and not _usable(self.weights, len(self.sizes)):
            found.append(
                f"weights={self.weights}: give one finite number of 0 or more for each of "
                f"sizes={self.sizes}, at least one above 0"
            )
        checks: list[tuple[str, Callable[[], object]]] = [
            *[(f"sizes={self.sizes}", partial(check_size, size)) for size in self.sizes],
            ("seed", partial(generate_maze, MIN_SIZE, self.seed)),
            ("braid", partial(generate_maze, MIN_SIZE, 0, self.braid)),
        ]
        for field_name, check in checks:
            try:
                check()
            except MazeError as error:
                found.append(f"{field_name}: {error}")
        return found


def _usable(weights: list[float], count: int) -> bool:
    return len(weights) == count and all(w >= 0 for w in weights) and 0 < sum(weights) < np.inf


def shipped_sets() -> list[str]:
    """Names of the evaluation sets that come with the package."""
    return sorted(
        entry.name.removesuffix(".txt") for entry in _SHIPPED.iterdir() if entry.name.endswith(".txt")
    )


def load_set(name: str) -> list[Maze]:
    """The mazes of a shipped set, in their fixed order.

    Raises:
        DatasetError: there is no such set.
    """
    if name not in shipped_sets():
        allowed = shipped_sets()
        raise DatasetError(f"no maze set {name!r}{closest(name, allowed)}; shipped: {', '.join(allowed)}")
    text = (_SHIPPED / f"{name}.txt").read_text(encoding="utf-8")
    return [Maze.from_text(line) for line in text.splitlines()]


def evaluation_keys() -> set[str]:
    """Keys of every puzzle of every shipped set: none of them is ever trained on."""
    return {maze.key for name in shipped_sets() for maze in load_set(name)}


def draw_set(spec: MazeSetSpec, exclude: Iterable[str] = ()) -> list[Maze]:
    """`spec.count` distinct mazes, none with a key in `exclude`; the same ones for the same arguments.

    Raises:
        DatasetError: the spec is impossible, or its sizes hold fewer distinct puzzles than that.
    """
    return list(draw_mazes(spec, exclude))


def draw_mazes(
    spec: MazeSetSpec, exclude: Iterable[str] = (), wanted: Callable[[Maze], bool] = lambda _: True
) -> Iterator[Maze]:
    """The mazes of `draw_set` one by one; those that are not `wanted` are passed over.

    Raises:
        DatasetError: as `draw_set` does, when the first maze, or one that is not there, is asked for.
    """
    if problems := spec.problems():
        raise DatasetError(f"cannot draw a maze set: {'; '.join(problems)}")
    rng = np.random.default_rng(spec.seed)
    weights = np.array(spec.weights or [1.0] * len(spec.sizes))
    excluded = set(exclude)
    taken, found, misses = set(excluded), 0, 0
    while found < spec.count:
        size = int(rng.choice(spec.sizes, p=weights / weights.sum()))
        maze = generate_maze(size, int(rng.integers(2**63)), spec.braid)
        if maze.key not in taken and wanted(maze):
            taken.add(maze.key)
            found, misses = found + 1, 0
            yield maze
        elif (misses := misses + 1) >= _PATIENCE:
            raise DatasetError(
                f"cannot draw {spec.count} distinct mazes of sizes {spec.sizes}: found only {found} "
                f"beside the {len(excluded)} puzzles kept out for evaluation (5x5 has 16 puzzles, 7x7 768); "
                "lower count or take larger sizes"
            )


def mazes_of(spec: MazeSetSpec) -> list[Maze]:
    """The mazes of an evaluation set: shipped if the spec names one, drawn otherwise."""
    return load_set(spec.name) if spec.name else draw_set(spec)


def rows(mazes: Iterable[Maze], set_name: str) -> list[dict[str, Any]]:
    """What SkyRL reads: a placeholder prompt, the environment's name, and columns that `MazeEnv` gets."""
    return [
        {
            "prompt": [{"role": "user", "content": "maze"}],
            "env_class": "maze",
            "data_source": set_name,
            "maze": maze.to_text(),
            "size": maze.size,
            "shortest_path": len(maze.shortest_path()),
        }
        for maze in mazes
    ]


def write_rows(path: Path, table_rows: list[dict[str, Any]]) -> None:
    """Write a parquet file whole or not at all; leave an existing one as it is.

    Raises:
        DatasetError: it cannot be written there.
    """
    import pyarrow as pa  # here, since whoever only draws mazes or writes files does not need it
    import pyarrow.parquet as pq

    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: pq.write_table(pa.Table.from_pylist(table_rows), file))
    except OSError as error:
        raise DatasetError(
            f"cannot write the data set {path}: {error.strerror or error}; "
            "free space, or give another folder in the recipe's section data"
        ) from error


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a scratch file, which then replaces `path`; on any error nothing is left of it."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def load_file(path: Path) -> list[Maze]:
    """The mazes of a parquet file such as `write_rows` makes.

    Raises:
        DatasetError: it cannot be read, is not parquet, or has no column `maze` that holds mazes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            texts = file.read(columns=["maze"]).to_pydict().get("maze")
        if texts is not None:
            return [Maze.from_text(text) for text in texts]
    except (OSError, pa.ArrowException, MazeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DatasetError(
            f"cannot read mazes from {path}: {reason}; give a parquet file of maze rows"
        ) from error
    raise DatasetError(
        f"cannot read mazes from {path}: it has no column 'maze', only "
        f"{', '.join(columns) or 'none at all'}; give a parquet file of maze rows"
    )


def load(source: str) -> list[Maze]:
    """The mazes of a shipped set, or of a .parquet file.

    Raises:
        DatasetError: it is neither, or cannot be read.
    """
    shipped = shipped_sets()
    if source in shipped:
        return load_set(source)
    if Path(source).exists():
        return load_file(Path(source))
    raise DatasetError(
        f"no maze set or file {source!r}{closest(source, shipped)}; shipped: {', '.join(shipped)}; "
        "or give the path of a .parquet file"
    )


def prepare(train: MazeSetSpec, evaluation: MazeSetSpec, folder: Path) -> tuple[Path, Path]:
    """Make both sets of a run, unless they exist, and return their files (training, evaluation).

    A file's name holds a digest of all that its content follows from, so that changed settings never meet
    an old file.

    Raises:
        DatasetError: a set cannot be drawn, or not be written.
    """
    eval_mazes = mazes_of(evaluation)
    if train.name:
        raise DatasetError(f"cannot train on {train.name!r}: it is an evaluation set; give sizes and count")
    held_out = evaluation_keys() | {maze.key for maze in eval_mazes}
    eval_path = folder / f"{evaluation.name or 'eval'}-{_digest(evaluation)}.parquet"
    train_path = folder / f"train-{_digest(train, evaluation)}.parquet"
    if not train_path.exists():
        write_rows(train_path, rows(draw_set(train, held_out), "train"))
    write_rows(eval_path, rows(eval_mazes, evaluation.name or "held-out"))
    return train_path, eval_path


def _digest(*specs: MazeSetSpec) -> str:
    settings = json.dumps([__version__, *map(asdict, specs)], sort_keys=True, default=str)
    return hashlib.sha256(settings.encode()).hexdigest()[:12]


def turns_needed(maze: Maze, goal_rule: str, position: Cell | None = None) -> int:
    """Turns of a shortest episode: the moves, and one for the final stop if the rule asks for it.

    `position` is the open cell that it begins at; the maze's start if None.
    """
    moves = maze.distance_to_goal[maze.start if position is None else position]
    return int(moves) + (goal_rule == GoalRule.STOP)


def solvable(mazes: Iterable[Maze], goal_rule: str, max_turns: int) -> int:
    """How many of `mazes` can be solved at all within `max_turns` turns under `goal_rule`."""
    return sum(turns_needed(maze, goal_rule) <= max_turns for maze in mazes)
