"""What the page of a run or of a result folder shows, as plain data.

Nothing is computed here but shortest paths: curves, figures and episodes are those of the files. Whatever is
not whole yet, or damaged, is left out and noted, so that a page can be made at any time of a run.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_maze.errors import RecordError, ReportError
from skyrl_maze.maze import Maze, is_int
from skyrl_maze.records import EpisodeRecord, Summary, TurnRecord
from skyrl_maze.results import EPISODES_FILE, EVALUATIONS, SETTINGS_FILE, SUMMARY_FILE, read_result
from skyrl_maze.runlog import METRICS_FILE, metric_lines

SOLVE_RATE = "eval/solve_rate"
_STEP = re.compile(r"step-(\d{1,15})")

# AWS Machine Learning Blog, "Accelerate multimodal RL training with SkyRL on Amazon SageMaker HyperPod".
PUBLISHED = {
    "name": "published run: another model and other mazes, 75 % near step 100",
    "points": [[0, 0.4375], [100, 0.75], [160, 0.96875]],
}

_SUMMARY_FIELDS = (
    *("policy", "endpoint", "adapter", "mazes", "goal_rule", "max_turns", "grammar", "theme", "temperature"),
    *("errors", "solve_rate", "solve_rate_low", "solve_rate_high", "spl", "mean_excess_steps", "turns"),
    *("parse_failures", "wall_bumps", "by_size", "by_shortest_path"),
)

Point = dict[str, Any]


def gather(folders: Sequence[Path]) -> dict[str, Any]:
    """The data of a page of one run or result folder, or of two side by side.

    Returns:
        `runs`: for each folder its `name`, its `notes` (a line for each thing left out) and its `curve`.
        A curve is points by `step`, with `rate`, `low`, `high`, `episodes` and `evaluation`, each
        None where unknown. An evaluation has the `summary` and the `episodes`, whose turns are lists
        `[text, action, parse_failure, bumped, row, col, reward]`. `texts` and `mazes` hold each of them once;
        an episode has their places.

    Raises:
        ReportError: there are not one or two folders, or one of them is no run and no result, or cannot be
            read.
    """
    if not 1 <= len(folders) <= 2:
        raise ReportError(f"cannot show {len(folders)} folders on one page: give one, or two to compare")
    shelf = _Shelf()
    runs = []
    for folder in folders:
        try:
            runs.append(_run(folder, shelf))
        except OSError as error:
            reason = error.strerror or error
            raise ReportError(f"cannot show {folder}: {reason}; check that folder, then try again") from error
    return {
        "runs": runs,
        "published": PUBLISHED,
        "texts": list(shelf.texts),
        "mazes": list(shelf.mazes.values()),
    }


class _Shelf:
    """Texts and mazes, each kept once: every evaluation has the same mazes, and a model repeats itself."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.mazes: dict[str, dict[str, Any]] = {}
        self._places: dict[str, int] = {}

    def text(self, text: str) -> int:
        """The place of a text."""
        return self.texts.setdefault(text, len(self.texts))

    def maze(self, text: str) -> int:
        """The place of a maze."""
        if text not in self._places:
            maze = Maze.from_text(text)
            cells = [maze.start]
            for move in maze.shortest_path():
                cells.append(maze.step(cells[-1], move))
            entry = {"key": maze.key, "text": text, "size": maze.size, "start": maze.start, "goal": maze.goal}
            self.mazes[text] = {**entry, "path": cells}
            self._places[text] = len(self._places)
        return self._places[text]


def _run(folder: Path, shelf: _Shelf) -> dict[str, Any]:
    """One of the `runs` of `gather`."""
    notes: list[str] = []
    if any((folder / file).is_file() for file in (SUMMARY_FILE, EPISODES_FILE, SETTINGS_FILE)):
        point = _evaluated(folder, shelf, notes)
        points = [point] if point else []
    elif (folder / METRICS_FILE).is_file() or (folder / EVALUATIONS).is_dir():
        points = _points_of_run(folder, shelf, notes)
    else:
        known = f"{METRICS_FILE} or {EVALUATIONS}/ (a run), or {SUMMARY_FILE} (a result of skyrl-maze play)"
        found = "there is no such folder" if not folder.is_dir() else f"it has no {known}"
        raise ReportError(f"cannot show {folder}: {found}; give the folder of a run or of a result")
    name = _as_text(folder.name or folder.resolve().name or folder)
    return {"name": name, "notes": notes, "curve": points}


def _points_of_run(root: Path, shelf: _Shelf, notes: list[str]) -> list[Point]:
    """The points of a run by step: from its evaluations, and where there is none from its metrics."""
    points: dict[int, Point] = {}
    records, damaged = metric_lines(root)
    if damaged:
        notes.append(f"{METRICS_FILE}: {damaged} {'line' if damaged == 1 else 'lines'} unfinished or damaged")
    for record in records:
        step = record.get("step")
        rate, low, high = (_share(record.get(f"{SOLVE_RATE}{bound}")) for bound in ("", "_low", "_high"))
        if is_int(step) and rate is not None:
            points[step] = _point(step, rate, low, high)
    for folder in sorted((root / EVALUATIONS).glob("step-*")):
        if (match := _STEP.fullmatch(folder.name)) and (point := _evaluated(folder, shelf, notes)):
            points[int(match[1])] = {**point, "step": int(match[1])}
    return [points[step] for step in sorted(points)]


def _evaluated(folder: Path, shelf: _Shelf, notes: list[str]) -> Point | None:
    """The point of a finished evaluation; None, and a note, if it is not finished or damaged."""
    try:
        result = read_result(folder)
    except (RecordError, OSError) as error:
        notes.append(f"left out: {_as_text(error)}")
        return None
    summary = result.summary
    point = _point(summary.step, summary.solve_rate, summary.solve_rate_low, summary.solve_rate_high)
    evaluation = {
        "summary": _summary(summary),
        "episodes": [_episode(episode, shelf) for episode in result.episodes],
    }
    return {**point, "episodes": summary.episodes, "evaluation": evaluation}


def _point(step: int | None, rate: float, low: float | None, high: float | None) -> Point:
    return {"step": step, "rate": rate, "low": low, "high": high, "episodes": None, "evaluation": None}


def _share(value: object) -> float | None:
    """The value if it is a number from 0 to 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        return None
    return float(value)


def _summary(summary: Summary) -> dict[str, Any]:
    shown = asdict(summary)
    return {name: shown[name] for name in _SUMMARY_FIELDS}


def _episode(episode: EpisodeRecord, shelf: _Shelf) -> dict[str, Any]:
    return {
        "index": episode.index,
        "sample": episode.sample,
        "maze": shelf.maze(episode.maze),
        "stop_reason": episode.stop_reason,
        "success": episode.success,
        "return": episode.return_,
        "error": episode.error,
        "turns": [_turn(turn, shelf) for turn in episode.turns],
    }


def _turn(turn: TurnRecord, shelf: _Shelf) -> list[Any]:
    place = shelf.text(turn.text)
    return [place, turn.action, turn.parse_failure, int(turn.bumped), *turn.position, turn.reward]


def _as_text(value: object) -> str:
    """One line that any encoding takes: names on disk may hold bytes that are no text."""
    return " ".join(str(value).encode("utf-8", "replace").decode().split())
