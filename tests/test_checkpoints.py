"""Checkpoints: whole or not there, the newest that can be trusted, and refused for another policy."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_maze import checkpoints
from skyrl_maze.checkpoints import (
    Policy,
    RunState,
    at,
    check_policy,
    newest,
    next_attempt,
    read_state,
    retain,
)
from skyrl_maze.errors import AdapterError, CheckpointError

RUN = "run-1"
POLICY = Policy("some/model", "", 8, 16.0, "all-linear", ".*visual.*")
CRASHES = Path(__file__).with_name("checkpoint_crashes.py")


def state_of(step, **changes):
    data = {"rows": 12, "batch_size": 4, "seed": 1}
    return dataclasses.replace(RunState(step, step + 1, data, 2, POLICY), **changes)


def saved(root, step, attempt=0, run_id=RUN, **changes):
    root.mkdir(exist_ok=True)
    fill = lambda scratch: (scratch / "a.safetensors").write_bytes(bytes([step]) * 100) and None  # noqa: E731
    return checkpoints.save(root, run_id, attempt, state_of(step, **changes), fill)


def names(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def passed_over(root, run_id=RUN):
    """The newest, and what was said about the others."""
    said = []
    return newest(root, run_id, said.append), said


def test_what_was_saved_is_found_and_read_back(tmp_path):
    made = saved(tmp_path / "c", 5)
    found, said = passed_over(tmp_path / "c")
    assert found == made == checkpoints.Checkpoint(0, 5, tmp_path / "c/global_step_5")
    assert said == []
    assert read_state(found) == state_of(5)
    assert (tmp_path / "c/latest_ckpt_global_step.txt").read_text() == "5"
    assert sorted(path.name for path in made.path.iterdir()) == ["COMPLETE", "a.safetensors", "state.json"]


def test_the_newest_step_of_the_newest_attempt_wins(tmp_path):
    for step, attempt in ((5, 0), (10, 0), (100, 0), (3, 1), (20, 1)):
        saved(tmp_path, step, attempt)
    assert passed_over(tmp_path)[0].step == 20
    assert next_attempt(tmp_path, RUN) == 2
    assert retain(tmp_path, RUN, 2) == [tmp_path / f"global_step_{step}" for step in (5, 10, 100)]
    assert names(tmp_path) == ["global_step_20", "global_step_3"]


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert passed_over(tmp_path) == (None, [])
    assert passed_over(tmp_path / "missing") == (None, [])
    assert next_attempt(tmp_path / "missing", RUN) == 0
    assert checkpoints.clean(tmp_path / "missing", 0) == []


def test_what_is_no_checkpoint_of_this_run_is_passed_over(tmp_path):
    good = saved(tmp_path, 5)
    saved(tmp_path, 50, run_id="other")
    (tmp_path / "global_step_60/policy").mkdir(parents=True)  # as SkyRL leaves it when it is killed
    (tmp_path / "global_step_70.tmp").mkdir()
    (tmp_path / "global_step_80").write_text("a file")
    (tmp_path / "global_step_90").symlink_to(good.path)
    (tmp_path / "latest_ckpt_global_step.txt").write_text("")
    found, said = passed_over(tmp_path)
    assert found == good
    assert [re.search(r"global_step_\d+", text)[0] for text in said] == ["global_step_50", "global_step_60"]


@pytest.mark.parametrize("file", ["COMPLETE", "a.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "torn", "flipped", "longer"])
def test_a_damaged_file_is_named_and_an_older_checkpoint_taken(tmp_path, file, damage):
    older, newer = saved(tmp_path, 5), saved(tmp_path, 6)
    path = newer.path / file
    content = path.read_bytes()
    changed = {
        "empty": b"",
        "torn": content[: len(content) // 2],
        "flipped": content[:20] + bytes([content[20] ^ 1]) + content[21:],
        "longer": content + b" x",
    }
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    found, said = passed_over(tmp_path)
    assert found == older
    assert len(said) == 1
    assert str(newer.path) in said[0]
    if file != "COMPLETE":
        assert file in said[0]
    with pytest.raises(CheckpointError, match="cannot resume from"):
        at(newer.path)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_in_silence(tmp_path):
    (saved(tmp_path, 5).path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"can be trusted; .*resume_mode=none"):
        passed_over(tmp_path)


def test_a_strange_file_beside_the_others_is_refused(tmp_path):
    (saved(tmp_path, 5).path / "b.safetensors").write_text("what is this?")
    with pytest.raises(CheckpointError, match="not listed"):
        passed_over(tmp_path)


def test_a_folder_named_by_hand_may_be_of_any_run(tmp_path):
    assert at(saved(tmp_path, 5, run_id="other").path).step == 5
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(f"cannot resume from {path}")):
            at(path)


def test_saving_a_step_again_replaces_it(tmp_path):
    saved(tmp_path, 5)
    again = saved(tmp_path, 5, attempt=1, position=99)
    assert passed_over(tmp_path)[0] == again
    assert read_state(again).position == 99
    assert names(tmp_path) == ["global_step_5"]


def test_what_another_run_saved_is_set_aside_and_kept(tmp_path):
    saved(tmp_path, 5, run_id="other")
    (tmp_path / "global_step_6").mkdir()
    mine = [saved(tmp_path, 5), saved(tmp_path, 6)]
    assert names(tmp_path) == [
        "aside-0-global_step_5",
        "aside-0-global_step_6",
        "global_step_5",
        "global_step_6",
    ]
    assert at(tmp_path / "aside-0-global_step_5").step == 5
    assert passed_over(tmp_path)[0] == mine[1]


def test_an_error_while_it_is_written_leaves_the_old_one(tmp_path):
    old = saved(tmp_path, 5)

    def fail(scratch):
        (scratch / "half").write_text("half")
        raise CheckpointError("rank 1 on 10.0.0.7: no room")

    with pytest.raises(CheckpointError, match="rank 1"):
        checkpoints.save(tmp_path, RUN, 0, state_of(6), fail)
    assert passed_over(tmp_path) == (old, [])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("keep", "left"), [(-1, 3), (1, 1), (2, 2), (5, 3)])
def test_retention(tmp_path, keep, left):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    saved(tmp_path, 9, run_id="other")
    (tmp_path / "global_step_8").mkdir()  # unfinished: it neither counts nor goes
    assert len(retain(tmp_path, RUN, keep)) == 3 - left
    assert {"global_step_3", "global_step_8", "global_step_9"} <= set(names(tmp_path))
    assert len(names(tmp_path)) == left + 2


def test_the_last_checkpoint_is_never_removed(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot keep 0"):
        retain(tmp_path, RUN, 0)
    assert passed_over(tmp_path)[0].step == 1


def test_leftovers_of_crashes_go_and_nothing_else(tmp_path):
    good = saved(tmp_path, 5)
    left = [tmp_path / name for name in (".global_step_6.abc", ".removed.global_step_5.1.2")]
    for path in (*left, tmp_path / ".hidden", tmp_path / "global_step_7"):
        path.mkdir()
    past = time.time() - 100
    os.utime(left[0], (past, past))
    assert checkpoints.clean(tmp_path, older_than_s=50) == left[:1]
    assert checkpoints.clean(tmp_path, older_than_s=0) == left[1:]
    assert names(tmp_path) == [".hidden", "global_step_5", "global_step_7"]
    assert passed_over(tmp_path)[0] == good


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 16}, "lora.rank: saved with 8, now 16"),
        ({"alpha": 8.0}, "lora.alpha: saved with 16.0, now 8.0"),
        ({"target_modules": "q_proj"}, "lora.target_modules: saved with 'all-linear', now 'q_proj'"),
        ({"exclude_modules": "None"}, "lora.exclude_modules: saved with '.*visual.*', now 'None'"),
        ({"base_model": "other/model"}, "model.path: saved with 'some/model', now 'other/model'"),
        ({"base_sha256": "a" * 64}, "the same path, other files"),
    ],
)
def test_another_policy_is_refused_with_what_differs(tmp_path, changes, said):
    found = saved(tmp_path, 5)
    check_policy(found, POLICY, POLICY)
    with pytest.raises(CheckpointError) as caught:
        check_policy(found, POLICY, dataclasses.replace(POLICY, **changes))
    assert said in str(caught.value)
    assert "another run.id" in str(caught.value)


def test_the_same_base_model_may_lie_elsewhere(tmp_path):
    here, there = (dataclasses.replace(POLICY, base_model=p, base_sha256="b" * 64) for p in ("/a", "/b"))
    check_policy(saved(tmp_path, 5), here, there)


def test_base_models_are_told_apart_by_their_files(tmp_path):
    def model(name, config="{}", weights=b"w" * 5_000_000):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        return checkpoints.base_digest(tmp_path / name)

    same = {model("a"), model("b")}
    others = [
        model("c", "{ }"),
        model("d", weights=b"w" * 5_000_001),
        model("e", weights=b"w" * 4_999_999 + b"x"),
    ]
    assert len(same) == 1
    assert len({*same, *others}) == 4
    assert checkpoints.base_digest(tmp_path / "hub-id") == ""


@pytest.mark.parametrize(
    ("key", "value"), [("position", -1), ("ranks", 0), ("step", 6), ("position", "2"), ("data", {"rows": 1})]
)
def test_a_state_that_cannot_be_is_refused(tmp_path, key, value):
    from skyrl_maze.durable import read_sealed, sealed

    found = saved(tmp_path, 5)
    record = read_sealed(found.path / "state.json")
    (found.path / "state.json").write_bytes(sealed({**record, key: value}))
    with pytest.raises(AdapterError, match=r"state\.json"):
        read_state(found)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "at_least"), [("kill", 60), ("full", 15)])
def test_at_whatever_moment_it_ends_a_whole_checkpoint_is_found(tmp_path, mode, at_least):
    done = subprocess.run(
        [sys.executable, CRASHES, mode, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CRASHES.parents[1]), str(CRASHES.parent)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= at_least
