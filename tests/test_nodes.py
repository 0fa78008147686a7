"""Questions to nodes: what is answered late or not at all is told of that node; the questions themselves."""

import fcntl
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_maze import nodes
from skyrl_maze.errors import SetupError
from skyrl_maze.nodes import Node

HERE, THERE = Node("a" * 56, "10.0.0.1", 0, True), Node("b" * 56, "10.0.0.2", 2, False)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Node, Any]], list[Any]]:
    """Ray in which a call is the node it went to; gives what was cancelled."""

    def set_up(outcomes: dict[Node, Any]) -> list[Any]:
        cancelled: list[Any] = []

        def wait(calls: list[Node], num_returns: int, timeout: float) -> tuple[list[Node], list[Node]]:
            assert (num_returns, timeout) == (len(calls), 3)
            return [c for c in calls if c in outcomes], [c for c in calls if c not in outcomes]

        def get(call: Node, timeout: float) -> Any:
            assert timeout > 0
            if isinstance(outcomes[call], Exception):
                raise outcomes[call]
            return outcomes[call]

        monkeypatch.setattr(nodes, "_call", lambda _question, node, *_arguments: node)
        monkeypatch.setattr(ray, "wait", wait)
        monkeypatch.setattr(ray, "get", get)
        monkeypatch.setattr(ray, "cancel", lambda call, force: cancelled.append((call, force)))
        return cancelled

    return set_up


def test_a_node_that_answers_late_is_named_and_its_task_ended(answering: Any) -> None:
    cancelled = answering({HERE: 7})
    answers = nodes.ask(nodes.present, [HERE, THERE], 3)
    assert answers.said == {HERE: 7}
    assert answers.problems == ["10.0.0.2 (bbbbbbbb): did not answer within 3 s"]
    assert cancelled == [(THERE, True)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ray.exceptions.TaskUnschedulableError("the node is away"), "was lost while it was asked"),
        (ModuleNotFoundError("No module named 'skyrl_maze'"), "ModuleNotFoundError: No module named"),
        (ray.exceptions.GetTimeoutError("late"), "GetTimeoutError: late"),
    ],
)
def test_a_node_that_fails_is_named_with_the_cause(answering: Any, error: Exception, said: str) -> None:
    answering({HERE: True, THERE: error})
    answers = nodes.ask(nodes.present, [HERE, THERE], 3)
    assert answers.said == {HERE: True}
    assert answers.silent[THERE].startswith(said)


def test_nobody_is_asked_where_there_is_nobody() -> None:
    assert nodes.ask(nodes.present, [], 3) == nodes.Answers({}, {})


def test_a_clock_is_compared_by_its_shortest_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three round trips of 4, 1 and 2 s to a clock that is 90 s ahead and read in the middle of each."""
    now, trips = [1000.0], iter([4.0, 1.0, 2.0])

    def get(_call: Any, timeout: float) -> float:
        assert timeout == 5
        trip_s = next(trips)
        now[0] += trip_s
        return now[0] - trip_s / 2 + 90

    monkeypatch.setattr(nodes, "_call", lambda _question, node: node)
    monkeypatch.setattr(ray, "get", get)
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(nodes.time, clock, lambda: now[0])
    assert nodes.clock_offset_s(THERE, 5) == (90, 0.5)


def test_a_clock_that_does_not_answer_names_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_call: Any, timeout: float) -> float:
        raise ray.exceptions.GetTimeoutError(f"not in {timeout} s")

    monkeypatch.setattr(nodes, "_call", lambda _question, node: node)
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(SetupError, match=r"10\.0\.0\.2 \(bbbbbbbb\): GetTimeoutError: not in 5 s"):
        nodes.clock_offset_s(THERE, 5)


@pytest.mark.parametrize("address", ["", "auto", "local", "name-without-port"])
def test_an_address_without_a_port_is_left_to_ray(address: str) -> None:
    nodes.check_address(address)


def test_a_cluster_that_does_not_answer_is_said() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(SetupError, match=f"RAY_ADDRESS={address} names a Ray cluster that does not answer"):
        nodes.check_address(address)


def test_a_cluster_that_is_deaf_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs, a stopped head among them, still has its connections accepted."""
    monkeypatch.setattr(nodes, "_CONNECT_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(SetupError, match=r"does not answer \(timed out\)"):
            nodes.check_address(address)


def test_whoever_speaks_grpc_answers() -> None:
    grpc_server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import grpc, sys, concurrent.futures as f; s = grpc.server(f.ThreadPoolExecutor(1)); "
            "print(s.add_insecure_port('127.0.0.1:0'), flush=True); s.start(); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with grpc_server:
        assert grpc_server.stdout is not None
        nodes.check_address(f"127.0.0.1:{int(grpc_server.stdout.readline())}")
        grpc_server.communicate("", timeout=30)


# --- Questions ---


class _Context:
    def get_node_id(self) -> str:
        return "abc"


def test_a_word_is_answered_only_where_it_is_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", _Context)
    assert nodes.exchange(str(tmp_path), "word").startswith("cannot see in ")
    (tmp_path / "word").write_text("another")
    assert "another file is there" in nodes.exchange(str(tmp_path), "word")
    assert {path.name for path in tmp_path.iterdir()} == {"word"}
    (tmp_path / "word").write_text("word")
    assert nodes.exchange(str(tmp_path), "word") == "abc"
    assert (tmp_path / "abc").read_text() == "word"


def test_a_lock_that_another_process_holds_is_held(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    code = f"from skyrl_maze.nodes import try_lock; print(try_lock({path!r}, 0))"
    command = [sys.executable, "-c", code]
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "held\n"
    assert nodes.try_lock(path, 0) == "taken"
    assert nodes.try_lock(path, 0) == "taken"  # it was given back


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: Any, _operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(nodes.fcntl, "flock", refuse)
    assert nodes.try_lock(str(tmp_path / "lock"), 5) == "flock fails: Function not implemented"


def test_versions_are_those_of_the_first_distribution_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("first", "1.0"), ("second", "2.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = nodes.versions({"a": ["first", "second"], "b": ["absent", "second"], "c": ["absent"]})
    assert {name: found[name] for name in "abc"} == {"a": "1.0", "b": "2.0", "c": "none"}
    assert found["python"].startswith("3.")


def test_missing_paths_and_free_room(tmp_path: Path) -> None:
    assert nodes.missing([str(tmp_path), str(tmp_path / "x")]) == [str(tmp_path / "x")]
    assert nodes.free_bytes(str(tmp_path)) > 0
