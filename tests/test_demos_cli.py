"""`skyrl-maze demos`: what it writes by which options, what it prints, and how it refuses."""

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skyrl_maze import recipes
from skyrl_maze.actions import STOP, parse_action
from skyrl_maze.dataset import MazeSetSpec, draw_set
from skyrl_maze.demonstrations import DemoSettings, demonstrate
from skyrl_maze.env import MazeConfig
from skyrl_maze.maze import Maze

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run_skyrl_maze: Run) -> Run:
    """Runs `skyrl-maze demos ...`."""
    return functools.partial(run_skyrl_maze, "demos")


@pytest.fixture
def rows(run: Run, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a command that must succeed; gives the rows of the parquet file that it wrote."""

    def rows(*argv: Any) -> list[dict[str, Any]]:
        code, _, err = run("--out", "demos.parquet", *argv)
        assert (code, err) == (0, "")
        table: list[dict[str, Any]] = pq.read_table(tmp_path / "demos.parquet").to_pylist()
        return table

    return rows


def test_what_was_written_is_told(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--out", "demos.parquet", "--count", 12, "--detours", 0.3, "--max-turns", 20)
    assert (code, err) == (0, "")
    told = {line[:9].strip(): line[10:].strip() for line in out.splitlines()}
    table = pq.read_table(tmp_path / "demos.parquet").to_pylist()
    turns = sum(len(row["images"]) for row in table)
    wrong = sum(row["wrong_turns"] for row in table)
    assert told.pop("sha256").endswith(" (of the episodes)")
    assert told == {
        "written": "demos.parquet",
        "episodes": "12",
        "rows": "12",
        "turns": f"{turns:,}, {wrong:,} of them wrong and recovered from",
        "pictures": f"{turns:,}",
        "bytes": f"{(tmp_path / 'demos.parquet').stat().st_size:,}",
        "left out": f"{told['left out'].split()[0]} mazes that take more turns than there are",
    }
    assert wrong > 0


def test_options_reach_the_episodes(rows: Callable[..., list[dict[str, Any]]]) -> None:
    table = rows(
        *("--sizes", "7,9", "--count", 8, "--grammar", "keyword", "--theme", "visgym", "--seed", 5),
        *("--goal-rule", "reach", "--max-turns", 40, "--detours", 0.2, "--braid", 0.5),
    )
    settings = DemoSettings(
        MazeConfig("visgym", grammar="keyword", goal_rule="reach"), 40, detours=0.2, seed=5
    )
    assert {row["size"] for row in table} == {7, 9}
    for row in table:
        demo = demonstrate(Maze.from_text(row["maze"]), settings)
        assert [image["bytes"] for image in row["images"]] == list(demo.pictures)
        said = [part["text"] for message in row["messages"] for part in message["content"] if part["text"]]
        assert said[1::2] == [message["content"] for message in demo.messages[1::2]]
        assert said[1].startswith("<action>")
    mazes = draw_set(MazeSetSpec(sizes=[7, 9], count=8, seed=5, braid=0.5))
    assert {row["maze_key"] for row in table} == {maze.key for maze in mazes}


def test_a_recipe_gives_the_settings_and_options_say_otherwise(
    rows: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    [row] = rows("--recipe", "maze_cpu", "--count", 1)
    facts = (row["size"], row["goal_rule"], row["max_turns"])
    assert facts == (5, "reach", 12)
    first = row["messages"][0]["content"][1]["text"]
    assert "<action>up</action>" in first
    assert "You have 12 turns." in first
    env = recipes.read_settings(["+recipe=maze_cpu"])["environment"]["skyrl_gym"]["maze"]
    demo = demonstrate(Maze.from_text(row["maze"]), DemoSettings(MazeConfig.from_any(env), 12))
    assert row["images"][0]["bytes"] == demo.pictures[0]

    (tmp_path / "demos.parquet").unlink()
    [row] = rows(
        *("--recipe", "maze_cpu", "--count", 1, "--sizes", 7, "--goal-rule", "stop", "--max-turns", 30),
        *("--theme", "visgym", "--grammar", "tuple"),
    )
    assert (row["size"], row["goal_rule"], row["max_turns"]) == (7, "stop", 30)
    assert parse_action(row["messages"][-1]["content"][0]["text"], "tuple") is STOP
    assert "Walls are gray" in row["messages"][0]["content"][1]["text"]


def test_a_recipes_evaluation_mazes_are_kept_out(rows: Callable[..., list[dict[str, Any]]], run: Run) -> None:
    spec = recipes.read_settings(["+recipe=maze_cpu"])["data"]["mazes"]["eval"]
    held_out = {maze.key for maze in draw_set(MazeSetSpec(**spec))}
    table = rows("--recipe", "maze_cpu", "--count", 16 - len(held_out))
    assert len({row["maze_key"] for row in table} | held_out) == 16, "all that 5x5 has"
    code, _, err = run("--out", "more.parquet", "--recipe", "maze_cpu", "--count", 17 - len(held_out))
    assert code == 2
    assert "found only 12 beside the" in err


def test_the_budget_is_twice_the_largest_size_by_default(
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    assert {row["max_turns"] for row in rows("--count", 3, "--sizes", "7,11")} == {22}


def test_a_row_for_each_answer_and_a_folder(run: Run, tmp_path: Path) -> None:
    assert run("--out", "demos", "--count", 3, "--per-turn", "--detours", 0.3)[0] == 0
    lines = (tmp_path / "demos/demonstrations.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 30
    for line in map(json.loads, lines):
        assert [m["loss"] for m in line["messages"][1::2]] == [False] * (len(line["images"]) - 1) + [True]
    assert {path.name for path in tmp_path.iterdir()} == {"demos"}


def test_a_terminal_sees_a_bar(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    code, _, err = run("--out", "demos.parquet", "--count", 40)
    assert code == 0
    assert "40/40" in err


def test_help_teaches_with_an_example(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "Example: skyrl-maze demos --out demos.parquet --recipe maze" in " ".join(out.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sizes", "9,x"], "cannot read the sizes '9,x': give whole numbers such as 9 or 9,11"),
        (["--sizes", "8"], "cannot draw mazes to demonstrate: sizes=[8]: cannot make a maze of size 8"),
        (["--sizes", "9,9"], "cannot draw mazes to demonstrate: sizes=[9, 9]: give at least one size, and"),
        (["--count", "0"], "cannot draw mazes to demonstrate: count=0: must be at least 1"),
        (["--seed", "-1"], "cannot draw mazes to demonstrate: seed: cannot draw a maze from seed -1"),
        (["--detours", "2"], "cannot demonstrate episodes with these settings:\n  - detours = 2.0: must be"),
        (
            ["--max-turns", "0"],
            "cannot demonstrate episodes with these settings:\n  - max_turns = 0: must be",
        ),
        (["--max-turns", "0", "--recipe", "maze"], "cannot demonstrate episodes with these settings:"),
        (["--grammar", "tupel"], "cannot use these settings of environment.skyrl_gym.maze:\n  - unknown gra"),
        (["--theme", "tokns"], "cannot use these settings of environment.skyrl_gym.maze:\n  - cannot draw a"),
        (["--recipe", "maz"], "no recipe 'maz'; did you mean 'maze'?"),
        (["--out", "demos.json"], "cannot write demonstrations to demos.json: give FILE.parquet (for TRL)"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(
    run: Run, tmp_path: Path, argv: list[str], message: str
) -> None:
    code, out, err = run("--out", "demos.parquet", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_of_another_shape_is_told(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for broken in ("data: 3", "data: {mazes: {eval: {sise: [9]}}}", "generator: {max_turns: many}"):
        path.write_text(f"extends: maze\n{broken}")
        code, _, err = run("--out", "demos.parquet", "--recipe", "mine.yaml")
        assert code == 2
        assert err.startswith("error: cannot take settings from recipe mine.yaml: it needs data.mazes, ")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["demos.parquet", "demos", "demos.jsonl"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, kind: str) -> None:
    script = (
        "import signal, sys; from skyrl_maze import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.argv = ['skyrl-maze', 'demos', '--out', {kind!r}, '--count', '100000']\n"
        "cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
