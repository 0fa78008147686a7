"""`skyrl-maze report`, as it is called."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import report_folders as folders

from skyrl_maze.maze import generate_maze
from skyrl_maze.results import SUMMARY_FILE, step_folder

MAZES = [generate_maze(5, seed) for seed in range(6)]


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    run_skyrl_maze: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs `skyrl-maze report` in a folder with the run runs/maze-cpu."""
    folders.write_run(tmp_path / "runs/maze-cpu", MAZES, {0: 0.3, 6: 0.9})
    return functools.partial(run_skyrl_maze, "report")


def test_a_page_is_made_and_said_to_be(call, tmp_path: Path) -> None:
    code, out, err = call("runs/maze-cpu", "--out", "report.html")
    assert (code, err) == (0, "")
    size = (tmp_path / "report.html").stat().st_size
    assert out == f"page         report.html, {size:,} bytes\nevaluations  2\nepisodes     12\n"


def test_two_runs_and_a_page_made_again(call, tmp_path: Path) -> None:
    folders.write(tmp_path / "oracle", folders.play_all(MAZES, folders.oracle, 0), "oracle")
    assert call("runs/maze-cpu")[0] == 0
    code, out, _ = call("runs/maze-cpu", "oracle")
    assert code == 0
    assert "evaluations  3\nepisodes     18\n" in out


def test_what_was_left_out_is_said(call, tmp_path: Path) -> None:
    (step_folder(tmp_path / "runs/maze-cpu", 6) / SUMMARY_FILE).unlink()
    code, out, _ = call("runs/maze-cpu")
    assert code == 0
    assert "evaluations  1\n" in out
    assert "note         maze-cpu: left out: " in out


def test_another_file_is_not_overwritten(call, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<p>mine</p>")
    code, _, err = call("runs/maze-cpu")
    assert code == 2
    assert err.startswith("error: cannot write the page report.html: ")
    assert err.count("\n") == 1
    assert (tmp_path / "report.html").read_text() == "<p>mine</p>"
    assert call("runs/maze-cpu", "--force")[0] == 0


def test_a_wrong_folder_is_one_line(call) -> None:
    code, _, err = call("runs")
    assert code == 2
    assert err.startswith("error: cannot show runs: it has no metrics.jsonl")
    assert err.count("\n") == 1


def test_help_shows_an_example(call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    assert "Example: skyrl-maze report runs/maze-cpu" in out
