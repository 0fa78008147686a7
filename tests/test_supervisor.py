"""What follows after each end of a job, and the loop around it, with a faked server."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.errors import NotReadyError
from skyrl_maze.job_server import JobState
from skyrl_maze.supervisor import LOST, LogView, Supervisor, verdict


@pytest.mark.parametrize(
    ("state", "again", "exit_code"),
    [
        (JobState("SUCCEEDED", 0, ""), False, 0),
        (JobState("FAILED", 1, "a rank died"), True, 1),
        (JobState("FAILED", 2, "settings"), False, 2),
        (JobState("FAILED", 75, "no GPUs yet"), True, 75),
        (JobState("FAILED", 126, "not executable"), False, 126),
        (JobState("FAILED", 127, "no such command"), False, 127),
        (JobState("FAILED", 130, "a pod that is drained interrupts it"), True, 130),
        (JobState("FAILED", -9, "out of memory"), True, 137),
        (JobState("FAILED", None, "its node died"), True, 1),
        (JobState("FAILED", None, "placed on a lost node", began=False), True, 1),
        (JobState("STOPPED", None, "ray job stop"), False, 130),
        (JobState("STOPPED", 143, "ray job stop"), False, 143),
        (JobState(LOST, None, ""), True, 1),
    ],
)
def test_what_follows(state: JobState, again: bool, exit_code: int) -> None:
    found = verdict(state)
    assert (found.again, found.exit_code) == (again, exit_code)
    assert found.why


@given(st.sampled_from(["FAILED", "STOPPED", LOST]), st.none() | st.integers(-64, 255))
def test_only_success_is_reported_as_success(status: str, code: int | None) -> None:
    if (status, code) != ("FAILED", 0):  # which Ray does not say
        assert verdict(JobState(status, code, "")).exit_code != 0
    assert not verdict(JobState("SUCCEEDED", code, "")).again


@given(st.text(max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20))
def test_a_log_is_written_once_however_it_is_read(log: str, pieces: list[tuple[int, int]]) -> None:
    written: list[str] = []
    view, reached = LogView(written.append), 0
    for at, length in pieces:
        if at <= reached:  # a connection begins at the first character and leaves none out
            view.take(at, log[at : at + length])
            reached = max(reached, min(at + length, len(log)))
    view.take(0, log)
    assert "".join(written) == log


def test_the_log_tells_steps_and_the_error() -> None:
    lines = [
        "  training step 3 of 6                        16.8 s   solve rate 0.156",
        "error: first",
        "  training step 4 of 6                         9.0 s",
        "error: ActorDiedError: gone; the whole story: logs",
        "  training step 5 of 6",
    ]
    view, log = LogView(lambda _: None), "\n".join(lines)
    view.take(0, log[:5])
    assert view.last_step is None
    view.take(0, log)
    assert (view.first_step, view.last_step, view.steps) == (3, 4, 6)
    assert view.error == "ActorDiedError: gone; the whole story: logs"


class Server:
    """Ends each submitted job in the state that is next."""

    def __init__(self, *ends: JobState | None, log: str = "") -> None:
        self.ends, self.printed = list(ends), log
        self.submitted: list[tuple[str, str]] = []

    def submit(self, job: str, entrypoint: str) -> None:
        self.submitted.append((job, entrypoint))

    def state(self, job: str) -> JobState | None:
        return self.ends.pop(0)

    def log(self, job: str) -> str:
        if not self.printed:
            raise NotReadyError("the log cannot be read")
        return self.printed

    def follow(self, job: str, take: Callable[[int, str], None], stop: threading.Event) -> None:
        take(0, self.printed[:4])


def supervisor(server: Any, said: list[str] | None = None, tries: int = 3) -> Supervisor:
    heard = [] if said is None else said
    return Supervisor(server, "train", "maze", tries, 0.0, lambda _: None, heard.append, poll_s=0.0)


RUNNING = JobState("RUNNING", None, "")
FAILED = JobState("FAILED", 1, "a rank died")
DONE = JobState("SUCCEEDED", 0, "")


def test_it_tries_until_it_is_done() -> None:
    server, said = Server(RUNNING, RUNNING, FAILED, None, DONE, log="all\n"), []
    watched = supervisor(server, said)
    assert watched.run().exit_code == 0
    assert server.submitted == [("maze-1", "train"), ("maze-2", "train"), ("maze-3", "train")]
    assert [this.state for this in watched.tries] == [FAILED, JobState(LOST, None, ""), DONE]
    assert "maze-1 has ended: it failed (a rank died)" in said


def test_tries_are_bounded_and_the_last_one_counts() -> None:
    watched = supervisor(Server(FAILED, JobState("FAILED", 75, ""), FAILED))
    assert watched.run().exit_code == 1
    assert len(watched.tries) == 3


NEVER_BEGAN = JobState("FAILED", None, "Job supervisor actor died:\n  its node has died.", began=False)


def test_a_job_that_never_began_uses_up_no_try() -> None:
    watched = supervisor(Server(FAILED, NEVER_BEGAN, NEVER_BEGAN, DONE), said := [], tries=3)
    assert watched.run().exit_code == 0
    assert [this.began for this in watched.tries] == [True, False, False, True]
    assert "maze-2 has ended: it never began (Job supervisor actor died: its node has died.)" in said
    assert [text.partition(" is ")[0] for text in said if text.startswith("try ")] == [
        *("try 1 of 3", "try 2 of 3", "try 3 of 4", "try 4 of 5")
    ]


def test_jobs_that_never_begin_are_bounded_too() -> None:
    watched = supervisor(Server(*[NEVER_BEGAN] * 3, DONE))
    assert watched.run().exit_code == 1
    assert len(watched.tries) == 3


def test_what_another_try_cannot_mend_is_not_tried() -> None:
    watched = supervisor(
        Server(JobState("FAILED", 2, "exit code 2"), DONE, log="error: no such setting\n"), said := []
    )
    assert watched.run().exit_code == 2
    assert len(watched.tries) == 1
    assert said[-1].endswith("it could not start; mend what it says and submit anew (no such setting)")


def test_a_log_that_cannot_be_read_does_not_end_the_watch() -> None:
    watched = supervisor(Server(FAILED, DONE), said := [])
    assert watched.run().exit_code == 0
    assert any("its end may be missing here" in text for text in said)


def test_a_job_that_runs_when_it_is_interrupted_has_no_end() -> None:
    class Interrupted(Server):
        def state(self, job: str) -> JobState | None:
            raise KeyboardInterrupt

    watched = supervisor(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        watched.run()
    assert [this.state for this in watched.tries] == [None]
