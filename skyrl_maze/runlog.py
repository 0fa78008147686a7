"""What a run tells about itself, as two files of JSON lines in its folder.

`events.jsonl` says what the run is doing, for whoever watches; `metrics.jsonl` keeps every metric of every
step, one record a step, for whoever asks later. A resumed run appends to both.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Appends to the two files; each record is one write, so that readers see whole lines."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def event(self, kind: str, **fields: Any) -> None:
        """Say what the run does now."""
        self._append(EVENTS_FILE, {"time_s": round(time.time(), 3), "event": kind, **fields})

    def metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Keep the finite numbers among a step's metrics."""
        numbers = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        self._append(METRICS_FILE, {"step": step, **numbers})

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self._root / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class EventReader:
    """Yields the events that were appended since it was made."""

    def __init__(self, root: Path) -> None:
        self._path = root / EVENTS_FILE
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The events since the last call; an unfinished last line is left for the next."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


def read_metrics(root: Path, skip: int = 0) -> list[dict[str, Any]]:
    """The metric records of a run, oldest first, without the first `skip`; empty if there are none."""
    return metric_lines(root)[0][skip:]


def metric_lines(root: Path) -> tuple[list[dict[str, Any]], int]:
    """The metric records of a run, oldest first, and how many lines are none: torn, or not finished."""
    path = root / METRICS_FILE
    if not path.is_file():
        return [], 0
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    records = [record for line in lines if (record := _record(line)) is not None]
    return records, len(lines) - len(records)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
