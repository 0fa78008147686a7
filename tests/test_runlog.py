"""What a run writes about itself can be read back, also while it is being written."""

import json
from pathlib import Path

from skyrl_maze.runlog import EVENTS_FILE, METRICS_FILE, EventReader, RunLog, metric_lines, read_metrics


def test_a_reader_sees_each_event_once_and_only_those_after_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.event("before")
    reader = EventReader(tmp_path)
    assert list(reader.new()) == []
    log.event("training", step=1, steps=6)
    log.event("saved", step=1, path="x")
    assert [(e["event"], e["step"]) for e in reader.new()] == [("training", 1), ("saved", 1)]
    assert list(reader.new()) == []


def test_a_reader_starts_before_the_file_exists(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert list(reader.new()) == []
    RunLog(tmp_path).event("training", step=1)
    assert [e["event"] for e in reader.new()] == ["training"]


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    path = tmp_path / EVENTS_FILE
    path.write_text('{"event": "a"}\n{"event": ', encoding="utf-8")
    assert [e["event"] for e in reader.new()] == ["a"]
    with path.open("a", encoding="utf-8") as file:
        file.write('"b"}\n')
    assert [e["event"] for e in reader.new()] == ["b"]


def test_metrics_keep_finite_numbers_only(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    log = RunLog(tmp_path)
    log.metrics(3, {"loss": 0.5, "count": 2, "nan": float("nan"), "text": "x", "flag": True, "list": [1]})
    log.metrics(4, {"loss": float("inf")})
    assert read_metrics(tmp_path) == [{"step": 3, "loss": 0.5, "count": 2}, {"step": 4}]


def test_lines_that_are_no_record_are_counted_and_left_out(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n\n{"st\n[]\n{"step": 2}\n{"step": 3')
    assert metric_lines(tmp_path) == ([{"step": 1}, {"step": 2}], 3)
    assert read_metrics(tmp_path, skip=1) == [{"step": 2}]


def test_every_record_is_one_line_of_json(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.event("odd", text='new\nline and "quotes"')
    lines = (tmp_path / EVENTS_FILE).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["text"] == 'new\nline and "quotes"'
