"""Versions: published whole or not at all, found newest first, kept as long as they are needed."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from adapter_files import RUN, published
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze import complete, durable, versions
from skyrl_maze.durable import FileRecord
from skyrl_maze.errors import AdapterError, SetupError
from skyrl_maze.versions import all_versions, clean_leftovers, latest, new_version, publish, retain

CRASHES = Path(__file__).with_name("adapter_crashes.py")


def two_files(folder):
    (folder / "a").write_bytes(b"aaa")
    (folder / "b").write_bytes(b"bb")


def quick(root, step, run_id=RUN):
    version = new_version(root, run_id, step)
    publish(version, two_files)
    return version


def names(found):
    return [version.path.name for version in found]


# --- making


def test_attempts_of_a_step_count_up(tmp_path):
    assert [new_version(tmp_path, RUN, 3).attempt for _ in range(3)] == [0, 1, 2]
    assert new_version(tmp_path, RUN, 4) == versions.Version(4, 0, tmp_path / RUN / "versions" / "4.0")
    assert new_version(tmp_path, "other", 3).attempt == 0


def test_callers_at_once_each_get_their_own(tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(new_version(tmp_path, RUN, 1))) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version.attempt for version in found) == list(range(12))


@pytest.mark.parametrize("run_id", ["", "..", ".", "a/b", "/a", ".hidden", "a\n", "ä", "a" * 201, 7])
def test_a_run_id_is_one_plain_name(tmp_path, run_id):
    for call in (lambda: new_version(tmp_path, run_id, 1), lambda: latest(tmp_path, run_id)):
        with pytest.raises(AdapterError, match="names a folder"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, True, 10**15])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(AdapterError, match="must be a whole number of 0 or more"):
        new_version(tmp_path, RUN, step)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), unique=True))
def test_versions_are_ordered_by_number(tmp_path_factory, numbers):
    root = tmp_path_factory.mktemp("order")
    folder = root / RUN / "versions"
    folder.mkdir(parents=True)
    for step, attempt in numbers:
        (folder / f"{step}.{attempt}").mkdir()
    for other in (".1.0", "01.0", "1", "1.0.x", "global_step_5"):
        (folder / other).mkdir()
    assert [(v.step, v.attempt) for v in all_versions(root, RUN)] == sorted(numbers)
    assert all(v.run_id == RUN for v in all_versions(root, RUN))


# --- publishing


def test_a_published_version_is_whole(tmp_path):
    version = published(tmp_path, 5)
    found = complete.verify(version.path, RUN)
    assert (found.run_id, found.step, found.attempt) == (RUN, 5, 0)
    assert [file.path for file in found.files] == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    ]
    assert sorted(path.name for path in version.path.iterdir()) == ["COMPLETE", "adapter", "shards"]
    assert latest(tmp_path, RUN) == version
    assert version.adapter.stat().st_mode & 0o777 == 0o755


def test_files_without_a_record_are_read(tmp_path):
    version = new_version(tmp_path, RUN, 1)
    assert publish(version, two_files) == complete.verify(version.path)


def test_all_is_synced_before_it_is_named(tmp_path, monkeypatch):
    """Names come after contents: adapter/ after its files, COMPLETE after adapter/."""
    version, done = new_version(tmp_path, RUN, 1), []
    fsync, link, rename = os.fsync, os.link, os.rename

    def name_of(handle):
        return re.sub(r"\.\w{8}$", "", Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    monkeypatch.setattr(os, "fsync", lambda handle: (fsync(handle), done.append(f"sync {name_of(handle)}")))
    monkeypatch.setattr(os, "link", lambda a, b: (link(a, b), done.append(f"name {Path(b).name}")))
    monkeypatch.setattr(os, "rename", lambda a, b: (rename(a, b), done.append(f"name {Path(b).name}")))
    publish(version, two_files)
    assert done == [
        *("sync a", "sync b", "sync .adapter", "name adapter", "sync 1.0"),
        *("sync .COMPLETE", "name COMPLETE", "sync 1.0"),
    ]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    version = new_version(tmp_path, RUN, 1)

    def fail(folder):
        two_files(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish(version, fail)
    assert list(version.path.iterdir()) == []
    publish(version, two_files)


@pytest.mark.parametrize("taken", ["COMPLETE", "adapter"])
def test_nothing_is_published_twice(tmp_path, taken):
    version = new_version(tmp_path, RUN, 1)
    (version.path / taken).mkdir()
    with pytest.raises(AdapterError, match="exists and is never overwritten; take a new attempt"):
        publish(version, two_files)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda folder: None, "no file at all was not written"),
        (lambda folder: (folder / ".hidden").touch(), "an adapter has no file of that name"),
        (lambda folder: (folder / "COMPLETE").touch(), "an adapter has no file of that name"),
        (lambda folder: (folder / "sub").mkdir(), "not a regular file"),
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "it is a symbolic link"),
        (lambda folder: [FileRecord("x", 1, "0" * 64)], "x was not written"),
        (
            lambda folder: [FileRecord("a", (folder / "a").write_text("abc") + 1, "0" * 64)],
            "a: it has not the size",
        ),
    ],
)
def test_a_build_must_make_files_and_say_the_truth(tmp_path, build, message):
    version = new_version(tmp_path, RUN, 1)
    with pytest.raises(AdapterError, match=message):
        publish(version, build)
    assert list(version.path.iterdir()) == []


# --- reading


def forge(path, **changes):
    (path / "COMPLETE").write_bytes(durable.sealed(durable.read_sealed(path / "COMPLETE") | changes))


@pytest.mark.parametrize("kept", [0, 1, 60, -2])
def test_a_torn_marker_is_refused(tmp_path, kept):
    path = quick(tmp_path, 1).path
    (path / "COMPLETE").write_bytes((path / "COMPLETE").read_bytes()[:kept])
    with pytest.raises(AdapterError, match=r"COMPLETE is torn or no JSON"):
        complete.verify(path)
    assert latest(tmp_path, RUN) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": []}, "lists no file"),
        ({"files": [{"path": "../x", "bytes": 1, "blake3": "0" * 64}]}, "path='../x': must be a file of"),
        ({"files": [{"path": "/x", "bytes": 1, "blake3": "0" * 64}]}, "path='/x': must be a file of"),
        ({"files": [{"path": "a/../../x", "bytes": 1, "blake3": "0" * 64}]}, "must be a file of"),
        ({"files": [{"path": "a/.x", "bytes": 1, "blake3": "0" * 64}]}, "must be a file of"),
        ({"files": [{"path": "a", "bytes": -1, "blake3": "0" * 64}]}, "bytes=-1: must be a whole number"),
        ({"files": [{"path": "a", "bytes": 1, "blake3": "0"}]}, "blake3='0': must be 64"),
        ({"files": 2 * [{"path": "a", "bytes": 1, "blake3": "0" * 64}]}, "lists no file, or one twice"),
        ({"files": [{"path": "adapter/c", "bytes": 1, "blake3": "0" * 64}]}, "adapter/a: is not listed"),
        ({"run_id": "other"}, "is of run other, version 1.0; it does not belong here"),
        ({"step": 2}, "is of run run-1, version 2.0; it does not belong here"),
        ({"attempt": 2}, "version 1.2; it does not belong here"),
        ({"schema": 9}, "schema=9: must be a whole number from 1 to 1"),
    ],
)
def test_a_marker_that_says_something_else_is_refused(tmp_path, changes, message):
    path = quick(tmp_path, 1).path
    forge(path, **changes)
    with pytest.raises(AdapterError, match=re.escape(message)):
        complete.verify(path)


def test_a_changed_marker_is_refused(tmp_path):
    path = quick(tmp_path, 1).path
    text = (path / "COMPLETE").read_text()
    (path / "COMPLETE").write_text(text.replace('"bytes": 3', '"bytes": 4'))
    with pytest.raises(AdapterError, match=r"COMPLETE is damaged: its content does not match its seal"):
        complete.verify(path)


@pytest.mark.parametrize(
    ("damage", "message", "seen_by_size"),
    [
        (lambda p: (p / "a").unlink(), "adapter/a: No such file", True),
        (lambda p: (p / "a").write_bytes(b"aa"), "adapter/a: has 2 bytes, must have 3", True),
        (lambda p: (p / "a").write_bytes(b"aac"), "adapter/a: its content has changed", False),
        (lambda p: (p / "adapter_model.bin").touch(), "adapter_model.bin: is not listed", True),
        (lambda p: ((p / "a").unlink(), (p / "a").symlink_to("b")), "adapter/a: has 1 bytes", True),
        (lambda p: ((p / "a").unlink(), (p / "a").symlink_to("./b")), "adapter/a: .* is a symbolic", True),
        (lambda p: (p.rename(p.parent / "x"), p.symlink_to("x")), "adapter: must be a folder", True),
    ],
)
def test_a_damaged_version_is_refused_by_name_and_passed_over(tmp_path, damage, message, seen_by_size):
    older, newer = quick(tmp_path, 1), quick(tmp_path, 2)
    damage(newer.adapter)
    with pytest.raises(AdapterError, match=message) as caught:
        complete.verify(newer.path)
    assert str(newer.path) in str(caught.value)
    assert latest(tmp_path, RUN, content=True) == older
    assert latest(tmp_path, RUN) == (older if seen_by_size else newer)


def test_an_adapter_of_another_run_is_refused(tmp_path):
    version = quick(tmp_path, 1)
    with pytest.raises(AdapterError, match="it is of run 'run-1', not of 'mine'"):
        complete.verify(version.path, "mine")


def test_a_version_without_a_marker_is_not_there(tmp_path):
    assert latest(tmp_path, RUN) is None
    new_version(tmp_path, RUN, 1)
    assert latest(tmp_path, RUN) is None


# --- keeping and cleaning


@pytest.mark.parametrize(
    ("keep", "in_use", "left"),
    [
        (1, [], ["4.0"]),
        (2, [], ["3.0", "4.0"]),
        (1, [0, 2], ["1.0", "3.0", "4.0"]),
        (9, [], ["1.0", "2.0", "3.0", "4.0"]),
    ],
)
def test_the_newest_and_those_in_use_are_kept(tmp_path, keep, in_use, left):
    made = [quick(tmp_path, step) for step in (1, 2, 3, 4)]
    unfinished = new_version(tmp_path, RUN, 5)
    removed = retain(tmp_path, RUN, keep, [made[at] for at in in_use])
    assert sorted(names(removed) + left) == names(made)
    assert names(all_versions(tmp_path, RUN)) == [*left, unfinished.path.name]
    assert [p.name for p in unfinished.path.parent.glob(".*")] == []


@pytest.mark.parametrize("keep", [0, -1, True])
def test_the_last_version_is_never_removed(tmp_path, keep):
    quick(tmp_path, 1)
    with pytest.raises(AdapterError, match="must be at least 1"):
        retain(tmp_path, RUN, keep)
    assert latest(tmp_path, RUN)


def test_a_damaged_newest_version_does_not_displace_a_good_one(tmp_path):
    older, newer = quick(tmp_path, 1), quick(tmp_path, 2)
    (newer.adapter / "a").unlink()
    assert retain(tmp_path, RUN, 1) == []
    assert latest(tmp_path, RUN) == older


def test_old_leftovers_go_and_nothing_else(tmp_path):
    good, damaged = quick(tmp_path, 1), quick(tmp_path, 2)
    (damaged.path / "COMPLETE").write_text("{")
    old, fresh = new_version(tmp_path, RUN, 3), new_version(tmp_path, RUN, 4)
    other = new_version(tmp_path, "other", 1)
    (fresh.path / "deep").mkdir()
    (fresh.path / "deep" / "now").touch()
    stray, marker = good.path.parent / ".removed.0.0.1", good.path / ".COMPLETE.x"
    stray.mkdir()
    marker.touch()
    past = time.time() - 100
    for path in (old.path, fresh.path, other.path, stray, marker, good.path, damaged.path):
        os.utime(path, (past, past))
    assert sorted(clean_leftovers(tmp_path, RUN, 50)) == sorted([old.path, stray, marker])
    assert names(all_versions(tmp_path, RUN)) == ["1.0", "2.0", "4.0"]
    assert clean_leftovers(tmp_path, RUN, 50) == []
    assert other.path.exists()
    assert latest(tmp_path, RUN) == good


# --- death and full disks


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "at_least"), [("kill", 100), ("full", 35)])
def test_at_whatever_step_it_ends_readers_find_a_whole_version(tmp_path, mode, at_least):
    done = subprocess.run(
        [sys.executable, CRASHES, mode, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CRASHES.parents[1]), str(CRASHES.parent)])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= at_least


def test_a_file_that_the_system_does_not_take_is_one_line(tmp_path):
    """The kernel itself refuses here, as it does when a quota is used up."""
    good = quick(tmp_path, 1)
    version = new_version(tmp_path, RUN, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(SetupError) as caught:
            publish(version, lambda folder: (folder / "big").write_bytes(bytes(1 << 17)) and None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert re.fullmatch(
        r"cannot publish step 2: \S+ has [\d,]+ bytes free and more are .*", str(caught.value)
    )
    assert list(version.path.iterdir()) == []
    assert latest(tmp_path, RUN, content=True) == good
