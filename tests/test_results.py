"""Result folders: whole or not there, continued after a crash, and read without trust."""

import contextlib
import json
import os
import resource
import subprocess
import sys

import pytest
from walks import solved, walked

from skyrl_maze import results
from skyrl_maze.actions import GoalRule
from skyrl_maze.errors import RecordError, SetupError
from skyrl_maze.evaluate import figures
from skyrl_maze.records import Conditions, Summary, episode_line
from skyrl_maze.results import (
    EPISODES_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    EpisodeLog,
    read_result,
    step_folder,
    write_result,
    write_summary,
)

SETTINGS = {"policy": "oracle", "max_turns": 5, "temperature": 0.0, "prompt_template": None}
EPISODES = [solved(seed=i, index=i) for i in range(3)]


def summary_of(episodes, **conditions):
    rules = {"goal_rule": GoalRule.STOP, "max_turns": 5, "grammar": "keyword", "theme": "tokens"}
    told = Conditions(**{"policy": "oracle", "temperature": 0.0, **rules, **conditions})
    return Summary.of(told, figures(episodes))


@contextlib.contextmanager
def room_for(size):
    """No file may grow beyond `size` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- folders that are written at once


def test_a_result_comes_back_in_the_order_of_the_set(tmp_path):
    write_result(tmp_path / "run" / "x", summary_of(EPISODES), [EPISODES[2], EPISODES[0], EPISODES[1]])
    result = read_result(tmp_path / "run" / "x")
    assert list(result.episodes) == EPISODES
    assert result.summary == summary_of(EPISODES)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["x"]


def test_a_newer_result_takes_the_place_of_an_older_one(tmp_path):
    write_result(tmp_path / "x", summary_of(EPISODES), EPISODES)
    (tmp_path / "x" / "left-over").touch()
    write_result(tmp_path / "x", summary_of(EPISODES[:1]), EPISODES[:1])
    assert read_result(tmp_path / "x").episodes == (EPISODES[0],)
    assert sorted(os.listdir(tmp_path / "x")) == [EPISODES_FILE, SUMMARY_FILE]
    assert os.listdir(tmp_path) == ["x"]


def test_the_older_result_is_back_if_the_newer_one_cannot_take_its_place(tmp_path, monkeypatch):
    write_result(tmp_path / "x", summary_of(EPISODES), EPISODES)
    rename = os.rename

    def fails_once(source, target):
        if target == tmp_path / "x" and os.path.basename(source) != "old":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(results.os, "rename", fails_once)
    with pytest.raises(RecordError, match="Input/output error"):
        write_result(tmp_path / "x", summary_of(EPISODES[:1]), EPISODES[:1])
    assert len(read_result(tmp_path / "x").episodes) == 3
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_leaves_the_older_result(tmp_path):
    write_result(tmp_path / "x", summary_of(EPISODES), EPISODES)
    with room_for(1000), pytest.raises(SetupError, match=r"cannot write the evaluation .*free some space"):
        write_result(tmp_path / "x", summary_of(EPISODES[:2]), EPISODES[:2])
    assert len(read_result(tmp_path / "x").episodes) == 3
    assert os.listdir(tmp_path) == ["x"]


def test_a_run_gives_its_newest_evaluation(tmp_path):
    for step, count in ((0, 1), (10, 2), (9, 3)):
        write_result(step_folder(tmp_path, step), summary_of(EPISODES[:count], step=step), EPISODES[:count])
    assert read_result(tmp_path).summary.step == 10
    assert read_result(tmp_path).folder == tmp_path / "evaluations" / "step-00000010"
    assert len(read_result(step_folder(tmp_path, 9)).episodes) == 3


# --- reading without trust


@pytest.fixture
def folder(tmp_path):
    write_result(tmp_path / "x", summary_of(EPISODES), EPISODES)
    return tmp_path / "x"


def refused(folder):
    with pytest.raises(RecordError) as found:
        read_result(folder)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_no_folder_and_other_folders_are_refused(tmp_path):
    assert refused(tmp_path / "none").startswith("no result folder")
    assert "neither summary.json nor evaluations/" in refused(tmp_path)
    (tmp_path / "evaluations").mkdir()
    assert "has not been evaluated" in refused(tmp_path)


def test_a_damaged_line_is_named(folder):
    path = folder / EPISODES_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{\n" + lines[2])
    assert f"{path}:2: Invalid JSON" in refused(folder)


def test_a_torn_line_of_a_finished_result_is_refused(folder):
    path = folder / EPISODES_FILE
    path.write_bytes(path.read_bytes()[:-1])
    assert "its last line is torn" in refused(folder)


def test_a_summary_of_other_episodes_is_refused(folder):
    flat = json.loads((folder / SUMMARY_FILE).read_bytes())
    (folder / SUMMARY_FILE).write_text(json.dumps({**flat, "solve_rate": 0.9}))
    assert "its figures are not those of the episodes beside it" in refused(folder)
    (folder / SUMMARY_FILE).write_text(json.dumps({**flat, "solve_rate": flat["solve_rate"] - 1e-14}))
    assert read_result(folder).episodes
    (folder / SUMMARY_FILE).write_text(json.dumps({**flat, "max_turns": 6}))
    assert "maze 0 was played by rule stop with 5 turns, and the summary says stop with 6" in refused(folder)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder):
    (folder / EPISODES_FILE).unlink()
    os.mkfifo(folder / EPISODES_FILE)
    assert "there is no such file" in refused(folder)


# --- folders that grow


def test_episodes_are_kept_as_they_end_and_another_call_goes_on(tmp_path):
    with EpisodeLog(tmp_path / "x", SETTINGS) as log:
        assert log.done == []
        log.append(EPISODES[2])
        log.append(EPISODES[0])
    assert "is not finished: it holds 2 episodes" in refused(tmp_path / "x")
    with EpisodeLog(tmp_path / "x", SETTINGS) as log:
        assert log.done == [EPISODES[0], EPISODES[2]]
        log.append(EPISODES[1])
        write_summary(tmp_path / "x", summary_of(EPISODES))
    assert list(read_result(tmp_path / "x").episodes) == EPISODES


@pytest.mark.parametrize("cut", [1, 2, 200])
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    with EpisodeLog(tmp_path / "x", SETTINGS) as log:
        log.append(EPISODES[0])
        log.append(EPISODES[1])
    path = tmp_path / "x" / EPISODES_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    with EpisodeLog(tmp_path / "x", SETTINGS) as log:
        assert log.done == [EPISODES[0]]
        log.append(EPISODES[2])
    assert path.read_bytes() == episode_line(EPISODES[0]) + episode_line(EPISODES[2])


def test_a_process_that_is_killed_leaves_whole_records(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from walks import solved\n"
        "from skyrl_maze.results import EpisodeLog\n"
        f"log = EpisodeLog(Path(sys.argv[1]), {SETTINGS!r})\n"
        "log.append(solved(index=0)); log._path.open('ab').write(b'{\"sche'); os.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    killed = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x"], env={**os.environ, "PYTHONPATH": path}, timeout=60
    )
    assert killed.returncode == -9
    with EpisodeLog(tmp_path / "x", SETTINGS) as log:
        assert log.done == [solved(index=0)]


def test_other_settings_are_named(tmp_path):
    EpisodeLog(tmp_path / "x", SETTINGS).__exit__()
    with pytest.raises(RecordError) as found:
        EpisodeLog(tmp_path / "x", {**SETTINGS, "max_turns": 6, "seed": 3})
    assert "max_turns is 5 there and 6 now; seed is None there and 3 now" in str(found.value)
    with EpisodeLog(tmp_path / "x", SETTINGS):
        pass


@pytest.mark.parametrize("content", ["", "[]", "nonsense"])
def test_settings_that_cannot_be_read_are_refused(tmp_path, content):
    (tmp_path / SETTINGS_FILE).write_text(content)
    with pytest.raises(RecordError, match="give --out a new folder"):
        EpisodeLog(tmp_path, SETTINGS)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RecordError, match=r"it holds thesis\.tex and no settings\.json"):
        EpisodeLog(tmp_path, SETTINGS)
    assert sorted(os.listdir(tmp_path)) in (["thesis.tex"], [".lock", "thesis.tex"])


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(RecordError, match="cannot write results to"):
        EpisodeLog(tmp_path / "x", SETTINGS)


def test_two_processes_do_not_share_a_folder(tmp_path):
    with EpisodeLog(tmp_path / "x", SETTINGS), pytest.raises(RecordError, match="another process does"):
        EpisodeLog(tmp_path / "x", SETTINGS)


def test_a_full_disk_leaves_no_half_a_record(tmp_path):
    with EpisodeLog(tmp_path / "x", SETTINGS) as log:
        log.append(EPISODES[0])
        size = (tmp_path / "x" / EPISODES_FILE).stat().st_size
        with room_for(size + 100), pytest.raises(SetupError, match=r"cannot append to .*free some space"):
            log.append(EPISODES[1])
        assert (tmp_path / "x" / EPISODES_FILE).stat().st_size == size
        log.append(EPISODES[2])
    with EpisodeLog(tmp_path / "x", SETTINGS) as log:
        assert log.done == [EPISODES[0], EPISODES[2]]


def test_episodes_cut_from_outside_are_kept(tmp_path):
    cut = [walked([], index=0, max_turns=5)]
    write_result(tmp_path / "x", summary_of(cut), cut)
    assert read_result(tmp_path / "x").summary.stop_reasons == {"running": 1}
