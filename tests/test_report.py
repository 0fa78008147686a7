"""What the page is given: the files' own figures, every turn of every episode, notes of what was left out."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_folders as folders
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze.actions import ACTIONS, Action
from skyrl_maze.episode import Episode
from skyrl_maze.errors import ReportError
from skyrl_maze.maze import Maze, generate_maze
from skyrl_maze.report import PUBLISHED, gather
from skyrl_maze.results import EPISODES_FILE, SUMMARY_FILE, read_result, step_folder

MAZES = [generate_maze(size, seed) for seed, size in enumerate((5, 7, 9, 7))]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with evaluations after steps 0, 2 and 10."""
    root = tmp_path / "mine"
    folders.write_run(root, MAZES, {0: 0.2, 2: 0.6, 10: 1.0})
    return root


def steps(curve: list[dict[str, Any]]) -> list[int | None]:
    return [point["step"] for point in curve]


def test_a_run_is_its_evaluations_in_the_order_of_their_steps(run: Path) -> None:
    data = gather([run])
    assert [shown["name"] for shown in data["runs"]] == ["mine"]
    curve = data["runs"][0]["curve"]
    assert steps(curve) == [0, 2, 10]
    assert data["runs"][0]["notes"] == []
    for point in curve:
        summary = read_result(step_folder(run, point["step"])).summary
        interval = (summary.solve_rate_low, summary.solve_rate_high)
        assert (point["rate"], point["low"], point["high"]) == (summary.solve_rate, *interval)
        assert point["episodes"] == summary.episodes == len(point["evaluation"]["episodes"]) == len(MAZES)
        assert point["evaluation"]["summary"]["spl"] == summary.spl
        assert point["evaluation"]["summary"]["adapter"] == f"{point['step']}.0"


def test_the_published_run_is_the_one_of_the_article(run: Path) -> None:
    assert PUBLISHED["points"] == [[0, 28 / 64], [100, 0.75], [160, 62 / 64]]
    assert "another model and other mazes" in str(PUBLISHED["name"])
    assert gather([run])["published"] == PUBLISHED


def test_a_step_without_episodes_keeps_the_rate_of_the_metrics(run: Path) -> None:
    shutil.rmtree(step_folder(run, 2))
    with (run / "metrics.jsonl").open("a") as file:
        # A resumed run measures a step again; the later record counts.
        interval = {"eval/solve_rate_low": 0.25, "eval/solve_rate_high": 0.875}
        for record in (
            {"step": 2, "eval/solve_rate": 0.5},
            {"step": 12, "eval/solve_rate": 0.75, **interval},
        ):
            print(json.dumps(record), file=file)
        for odd in (1.5, -1, "half", None, True, float("nan")):
            print(json.dumps({"step": 14, "eval/solve_rate": odd}), file=file)
        print(json.dumps({"step": True, "eval/solve_rate": 0.5}), file=file)
    curve = gather([run])["runs"][0]["curve"]
    assert steps(curve) == [0, 2, 10, 12]
    bare = {"episodes": None, "evaluation": None}
    assert curve[1] == {"step": 2, "rate": 0.5, "low": None, "high": None, **bare}
    assert curve[3] == {"step": 12, "rate": 0.75, "low": 0.25, "high": 0.875, **bare}


def tear_metrics(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "eval/so')


def forget_summary(run: Path) -> None:
    (step_folder(run, 10) / SUMMARY_FILE).unlink()


def tear_summary(run: Path) -> None:
    path = step_folder(run, 10) / SUMMARY_FILE
    path.write_bytes(path.read_bytes()[:-40])


def tear_episodes(run: Path) -> None:
    path = step_folder(run, 10) / EPISODES_FILE
    path.write_bytes(path.read_bytes()[:-40])


def edit_an_episode(run: Path) -> None:
    path = step_folder(run, 10) / EPISODES_FILE
    path.write_bytes(path.read_bytes().replace(b'"success": true', b'"success": false', 1))


def leave_garbage(run: Path) -> None:
    (step_folder(run, 10) / EPISODES_FILE).write_bytes(b"\x00\xff\n[]\n")


def lose_episodes(run: Path) -> None:
    (step_folder(run, 10) / EPISODES_FILE).unlink()


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        (tear_metrics, "metrics.jsonl: 1 line unfinished or damaged"),
        (forget_summary, "is not finished: it holds 4 episodes and no summary.json"),
        (tear_summary, "summary.json"),
        (tear_episodes, "episodes.jsonl"),
        (edit_an_episode, "episodes.jsonl:1: success is False"),
        (leave_garbage, "episodes.jsonl:1"),
        (lose_episodes, "episodes.jsonl"),
    ],
)
def test_what_is_torn_is_left_out_and_noted(run: Path, harm: Callable[[Path], None], note: str) -> None:
    whole = gather([run])["runs"][0]["curve"]
    harm(run)
    (shown,) = gather([run])["runs"]
    assert len(shown["notes"]) == 1
    assert note in shown["notes"][0]
    assert steps(shown["curve"]) == [0, 2, 10]
    assert shown["curve"][:2] == whole[:2]
    # The metrics still tell the rate of what cannot be read.
    assert shown["curve"][2]["rate"] == whole[2]["rate"]
    assert (shown["curve"][2]["evaluation"] is None) == (harm is not tear_metrics)


def test_folders_that_are_no_evaluation_are_passed_over(run: Path) -> None:
    (run / "evaluations" / ".step-00000012-abc").mkdir()
    (run / "evaluations" / "step-latest").mkdir()
    assert steps(gather([run])["runs"][0]["curve"]) == [0, 2, 10]
    assert gather([run])["runs"][0]["notes"] == []


def test_a_result_is_a_curve_of_one_point_without_a_step(tmp_path: Path) -> None:
    folders.write(tmp_path / "oracle", folders.play_all(MAZES, folders.oracle, 0), "oracle")
    (shown,) = gather([tmp_path / "oracle"])["runs"]
    (point,) = shown["curve"]
    assert (shown["name"], point["step"], point["rate"], point["episodes"]) == ("oracle", None, 1.0, 4)
    assert point["evaluation"]["summary"]["policy"] == "oracle"


def test_a_result_that_is_not_finished_is_noted(tmp_path: Path) -> None:
    folders.write(tmp_path / "late", folders.play_all(MAZES, folders.oracle, 0), "oracle")
    (tmp_path / "late" / SUMMARY_FILE).unlink()
    (shown,) = gather([tmp_path / "late"])["runs"]
    assert shown["curve"] == []
    assert "it holds 4 episodes and no summary.json" in shown["notes"][0]


def test_two_folders_share_their_mazes_and_texts(run: Path, tmp_path: Path) -> None:
    folders.write(tmp_path / "oracle", folders.play_all(MAZES, folders.oracle, 0), "oracle")
    data = gather([run, tmp_path / "oracle"])
    assert [shown["name"] for shown in data["runs"]] == ["mine", "oracle"]
    assert sorted(maze["key"] for maze in data["mazes"]) == sorted(maze.key for maze in MAZES)
    assert len(data["texts"]) == len(set(data["texts"]))


def test_the_path_of_a_maze_is_a_shortest_one(run: Path) -> None:
    for shown in gather([run])["mazes"]:
        maze = Maze.from_text(shown["text"])
        assert (shown["key"], shown["size"]) == (maze.key, maze.size)
        path = shown["path"]
        assert (path[0], path[-1]) == (shown["start"], shown["goal"]) == (maze.start, maze.goal)
        assert len(path) == len(maze.shortest_path()) + 1
        assert all(maze.is_open(cell) for cell in path)
        assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in itertools.pairwise(path))


answers = st.lists(st.tuples(st.text(), st.sampled_from([*ACTIONS, None])), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 200), said=st.lists(answers, min_size=1, max_size=4))
def test_every_turn_comes_through(tmp_path_factory: pytest.TempPathFactory, seed: int, said: Any) -> None:
    def speaker(lines: Any) -> folders.Policy:
        def act(episode: Episode, _rng: random.Random) -> tuple[str, Action | None]:
            text, action = lines[episode.turns % len(lines)]
            return str(text), action

        return act

    maze = generate_maze(7, seed)
    episodes = [folders.play(maze, speaker(lines), random.Random(0), 0, i) for i, lines in enumerate(said)]
    folder = tmp_path_factory.mktemp("results") / "one"
    folders.write(folder, episodes, "speaker")
    data = gather([folder])
    shown = data["runs"][0]["curve"][0]["evaluation"]["episodes"]
    assert len(shown) == len(episodes)
    for packed, episode in zip(shown, episodes, strict=True):
        assert data["mazes"][packed["maze"]]["key"] == episode.maze_key
        assert (packed["stop_reason"], packed["success"]) == (episode.stop_reason, episode.success)
        assert (packed["return"], packed["error"]) == (episode.return_, episode.error)
        turns = [(data["texts"][text], *rest) for text, *rest in packed["turns"]]
        assert turns == [
            (t.text, t.action, t.parse_failure, int(t.bumped), *t.position, t.reward) for t in episode.turns
        ]


def test_a_name_that_is_no_text_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = tmp_path / b"od\xffd".decode("utf-8", "surrogateescape")
    folders.write(folder, folders.play_all(MAZES, folders.oracle, 0), "oracle")
    assert gather([folder])["runs"][0]["name"] == "od?d"


def test_a_disk_that_fails_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ReportError, match=r"cannot show .*mine: Input/output error; check that folder"):
        gather([run])


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(run: Path) -> None:
    for path in (run / "metrics.jsonl", step_folder(run, 2) / EPISODES_FILE):
        path.unlink()
        os.mkfifo(path)
    (shown,) = gather([run])["runs"]
    assert steps(shown["curve"]) == [0, 10]
    assert len(shown["notes"]) == 1


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two_folders_are_shown(run: Path, count: int) -> None:
    with pytest.raises(ReportError, match=f"cannot show {count} folders on one page: give one, or two"):
        gather([run] * count)


def test_another_folder_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="there is no such folder; give the folder of a run or of a result"):
        gather([tmp_path / "none"])
    with pytest.raises(ReportError, match=r"it has no metrics\.jsonl or evaluations/ \(a run\), or summary"):
        gather([tmp_path])
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match=r"cannot show .*file: there is no such folder"):
        gather([tmp_path / "file"])
