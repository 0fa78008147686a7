"""`skyrl-maze resubmit` against Ray's own job server; the jobs are a line of shell each."""

import contextlib
import io
import json
import signal
import socket
import socketserver
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_cluster import CLEAN, PATH, LocalCluster, free_port, job_client, local_cluster

from skyrl_maze import resubmit_cli
from skyrl_maze.errors import ConfigError
from skyrl_maze.job_server import JobState
from skyrl_maze.resubmit_cli import shell_command, table
from skyrl_maze.supervisor import LogView, Try

PROGRAM = Path(sysconfig.get_path("scripts")) / "skyrl-maze"
SHOW = [sys.executable, "-c", "import os, sys, json; print(json.dumps([os.environ.get('A'), sys.argv[1:]]))"]


@settings(max_examples=20)
@given(
    st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), max_size=3),
)
def test_a_shell_reads_the_words_as_they_were(value: str | None, words: list[str]) -> None:
    command = [*([] if value is None else [f"A={value}"]), *SHOW, *words]
    done = subprocess.run(["sh", "-c", shell_command(command)], env={}, capture_output=True, timeout=60)
    assert json.loads(done.stdout) == [value, words]


def test_only_leading_words_set_variables() -> None:
    assert shell_command(["A=1 2", "run.sh", "b=c d"]) == "A='1 2' run.sh 'b=c d'"


@pytest.mark.parametrize("words", [["A=1"], ["A=", "B_2=x y"], []])
def test_variables_alone_are_no_command(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="is no command; give one"):
        shell_command(words)


def test_a_name_that_no_shell_takes_sets_no_variable() -> None:
    assert shell_command(["AÄ=1", "B=c d"]) == "'AÄ=1' 'B=c d'"


def test_a_log_may_hold_what_the_terminal_cannot_show(run_skyrl_maze, monkeypatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", shown)
    run_skyrl_maze("--version")
    resubmit_cli._write("\N{FULL BLOCK} \ud800")
    assert shown.buffer.getvalue().endswith(b"\\u2588 \\ud800")


def test_the_table_says_how_each_try_ended() -> None:
    log = LogView(lambda _: None)
    log.take(0, "  training step 1 of 9   2.0 s\n  training step 2 of 9   2.0 s\nerror: a rank died\n")
    ended = Try("maze-1", 0.0, log, JobState("FAILED", 1, ""), seconds=90.0)
    silent = LogView(lambda _: None)
    unbegun = Try("maze-2", 0.0, silent, JobState("FAILED", None, "its node has died", began=False))
    going_on = Try("maze-3", 0.0, silent)
    columns = [list(column.cells) for column in table([ended, unbegun, going_on]).columns]
    assert columns == [
        ["1", "2", "3"],
        ["maze-1", "maze-2", "maze-3"],
        ["1.5", "0.0", "0.0"],
        ["1 to 2 of 9", "none", "none"],
        ["failed, exit code 1: a rank died", "failed: it never began", "had not ended"],
    ]


def test_an_address_where_nobody_answers_is_said_at_once(
    run_skyrl_maze: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, err = run_skyrl_maze("resubmit", "--address", f"http://127.0.0.1:{free_port()}", "--", "true")
    assert code == 2
    assert err.startswith("error: cannot reach Ray's dashboard at http://127.0.0.1:")
    assert len(err.splitlines()) == 1


def test_a_name_that_cannot_be_an_id_is_said(run_skyrl_maze: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run_skyrl_maze("resubmit", "--address", "http://x", "--name", "a b", "--", "true")
    assert code == 2
    assert "--name 'a b' becomes part of the jobs' ids" in err


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head alone."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        local_cluster(Path(folder), {**CLEAN, "PATH": PATH}) as made,
    ):
        job_client(made.dashboard)
        yield made


@contextlib.contextmanager
def started(address: str, *command: str, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [PROGRAM, "resubmit", "--address", address, "--wait", "0", *options, "--", *command],
        env={**CLEAN, "COLUMNS": "200", "RAY_ADDRESS": "http://127.0.0.1:9"},  # which is not to be asked
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    """Read what it prints, up to this line; Ray has its own to say before."""
    assert process.stdout is not None
    assert any(said == f"{line}\n" for said in process.stdout)


def ran(address: str, *command: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    with started(address, *command, options=options) as process:
        out, err = process.communicate(timeout=240)
    return process.returncode, out, err


# Fails as long as the file has fewer lines than the number given, and adds one each time.
COUNTED = 'echo try >> "$0"; echo "said $(wc -l < "$0") of $1"; [ "$(wc -l < "$0")" -ge "$1" ] || exit 1'


def said(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("said ")]


@pytest.mark.slow
def test_a_job_that_fails_is_submitted_again_until_it_is_done(cluster: LocalCluster, tmp_path: Path) -> None:
    code, out, err = ran(cluster.dashboard, "sh", "-c", COUNTED, str(tmp_path / "tries"), "3")
    assert code == 0, err
    assert said(out) == ["said 1 of 3", "said 2 of 3", "said 3 of 3"]
    assert err.count("has ended: it failed") == 2
    rows = [line for line in err.splitlines() if line.startswith("│")]
    assert ["failed, exit code 1" in row for row in rows] == [True, True, False]
    assert "succeeded, exit code 0" in rows[2]


@pytest.mark.slow
def test_tries_end(cluster: LocalCluster, tmp_path: Path) -> None:
    options = ("--tries", "2")
    code, out, _ = ran(cluster.dashboard, "sh", "-c", COUNTED, str(tmp_path / "tries"), "9", options=options)
    assert (code, len(said(out))) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "exit_code", "said"),
    [
        (["sh", "-c", "echo 'error: no such setting' >&2; exit 2"], 2, "it could not start"),
        (["trian_job.sh"], 127, "the shell does not find this command"),
        (["/"], 126, "the shell cannot run this command"),
    ],
)
def test_what_cannot_be_mended_is_tried_once(
    cluster: LocalCluster, command: list[str], exit_code: int, said: str
) -> None:
    code, _, err = ran(cluster.dashboard, *command)
    assert code == exit_code
    assert said in err
    assert err.count("try ") == 2  # said when it is submitted, and above the column


@pytest.mark.slow
def test_a_job_that_somebody_stops_stays_stopped(cluster: LocalCluster) -> None:
    with started(cluster.dashboard, "sh", "-c", "echo up; sleep 600") as process:
        wait_for_line(process, "up")
        client = job_client(cluster.dashboard)
        (job,) = [job for job in client.list_jobs() if job.status.value == "RUNNING"]
        client.stop_job(job.submission_id)
        _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "somebody has stopped it" in err


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_and_says_how_to_stop_it(cluster: LocalCluster) -> None:
    with started(cluster.dashboard, "sh", "-c", "echo up; sleep 600") as process:
        wait_for_line(process, "up")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    client = job_client(cluster.dashboard)
    (job,) = [job for job in client.list_jobs() if job.status.value == "RUNNING"]
    assert f"the job {job.submission_id} goes on" in err
    assert f"ray job stop --address {cluster.dashboard} {job.submission_id}" in err
    client.stop_job(job.submission_id)


class Gate:
    """A way to a server that can be shut: then nobody answers, and open connections break."""

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self._target, self._open = port, set[socket.socket]()
        self._server: Any = None

    def open(self) -> None:
        gate = self

        class Passing(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", gate._target)) as there:
                    both = {self.request, there}
                    gate._open |= both
                    back = threading.Thread(target=_pump, args=(there, self.request), daemon=True)
                    back.start()
                    _pump(self.request, there)
                    back.join()
                    gate._open -= both

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address, daemon_threads = True, True

        self._server = Server(("127.0.0.1", self.port), Passing)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def shut(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def gate(cluster: LocalCluster) -> Iterator[Gate]:
    made = Gate(int(cluster.dashboard.rpartition(":")[2]))
    made.open()
    yield made
    made.shut()


@pytest.mark.slow
def test_a_dashboard_that_is_away_for_a_while_is_waited_for(gate: Gate, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    waits = 'echo before; while [ ! -e "$0" ]; do sleep 0.2; done; echo after; exit 3'
    options = ("--tries", "1")
    with started(f"http://127.0.0.1:{gate.port}", "sh", "-c", waits, str(go_on), options=options) as process:
        assert process.stderr is not None
        wait_for_line(process, "before")
        gate.shut()
        assert any("does not answer" in line for line in process.stderr)
        go_on.touch()
        time.sleep(3)  # the job ends unseen
        gate.open()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert out == "after\n", "what was shown is not shown again, and nothing is left out"


@pytest.mark.slow
def test_a_dashboard_that_stays_away_is_given_up(gate: Gate) -> None:
    options = ("--away", "3")
    with started(
        f"http://127.0.0.1:{gate.port}", "sh", "-c", "echo up; sleep 600", options=options
    ) as process:
        wait_for_line(process, "up")
        gate.shut()
        _, err = process.communicate(timeout=120)
        gate.open()
    assert process.returncode == 75
    assert "has not answered for 3 s" in err
    assert "what was submitted may go on" in err
