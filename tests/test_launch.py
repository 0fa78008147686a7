"""Whatever goes wrong, the user reads one line and gets an exit code that tells."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from skyrl_maze import launch, recipes
from skyrl_maze.errors import DatasetError, LostNodeError

MAIN = [sys.executable, "-m", "skyrl_maze.entrypoints.main_base"]


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAIN, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300)


def _error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.slow
def test_the_published_recipe_stops_where_it_finds_no_gpu(tmp_path: Path) -> None:
    done = _run(tmp_path, "+recipe=maze")
    assert done.returncode == 2
    assert "needs 6 GPU(s)" in _error(done)
    assert "+recipe=maze_cpu" in _error(done)


@pytest.mark.slow
def test_skyrls_own_command_reaches_this_entrypoint(tmp_path: Path) -> None:
    override = "trainer.override_entrypoint=skyrl_maze.entrypoints.main_base"
    done = subprocess.run(
        [sys.executable, "-m", "skyrl.train.entrypoints.main_base", override, "+recipe=maze"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert "needs 6 GPU(s)" in _error(done)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_teaches_and_imports_nothing_heavy(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.launch(arguments) == 0
    out = capsys.readouterr().out
    assert "+recipe=NAME" in out
    assert all(f"  {name}\n" in out for name in recipes.names())


@pytest.mark.slow
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['skyrl'] = None\n"
        "from skyrl_maze.launch import launch; sys.exit(launch(['run.id=x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install skyrl_maze" in _error(done)


@pytest.mark.slow
def test_what_skyrl_refuses_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = _run(tmp_path, "+recipe=maze_cpu", "trainer.algorithm.advantage_estimator=grop")
    assert done.returncode == 2
    assert _error(done) == "error: 1 setting(s) cannot work:"
    assert "invalid advantage_estimator: grop" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_wrong_setting_is_named_at_once(tmp_path: Path) -> None:
    done = _run(tmp_path, "+recipe=maze_cpu", "trainer.sed=1", "generator.max_turns=many")
    assert done.returncode == 2
    assert _error(done) == "error: 2 setting(s) cannot be used:"
    assert "trainer.sed: there is no such setting; did you mean 'seed'?" in done.stderr
    assert "generator.max_turns='many'" in done.stderr


def test_the_cause_is_found_below_rays_layers() -> None:
    inner = ValueError("first line\n\nwhat really happened\n")
    outer = ray.exceptions.RayTaskError("train", "trace", inner)
    assert launch._cause(outer) == "ValueError: what really happened"
    chained = RuntimeError("outer")
    chained.__cause__ = OSError(28, "No space left on device")
    assert launch._cause(chained).startswith("OSError: [Errno 28] No space left on device; free some space")
    ours = ray.exceptions.RayTaskError("train", "trace", DatasetError("what to do")).as_instanceof_cause()
    assert launch._cause(ours) == "what to do"
    assert launch._cause(RuntimeError()) == "RuntimeError: no message"


def test_a_node_that_does_not_answer_is_lost() -> None:
    with socket.socket() as here, socket.socket() as closed:
        here.bind(("127.0.0.1", 0))
        here.listen()
        closed.bind(("127.0.0.1", 0))
        nodes = [
            {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": end.getsockname()[1], "NodeID": name * 8}
            for name, end in (("ab", here), ("cd", closed))
        ]
        assert launch._lost(nodes) == ["127.0.0.1 (cdcdcdcd)"]


def test_a_lost_node_is_a_failure_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_argv: list[str], log: list[Path]) -> None:
        log.append(Path("logs/console.log"))
        raise LostNodeError("a node was lost") from ConnectionError("closed")

    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr(launch, "_catch_signals", lambda: None)
    assert launch.launch(["+recipe=maze_cpu"]) == 1
    assert capsys.readouterr().err == "error: a node was lost; the whole story: logs\n"


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    ("number", "done", "processes"),
    [
        (signal.SIGTERM, "building the tiny Qwen3-VL", 0),  # Ray starts, with signal handlers of its own
        (signal.SIGINT, "starting the trainer", 5),  # the engine starts
        (signal.SIGTERM, "starting the trainer", 5),
    ],
)
def test_an_interrupted_run_leaves_no_process(
    tmp_path: Path, model_cache: Path, number: signal.Signals, done: str, processes: int
) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(model_cache), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*MAIN, "+recipe=maze_cpu"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.strip().startswith(done):  # printed when it is done: the next thing starts
            break
    time.sleep(1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= processes
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "error: interrupted; all processes of the run are stopped"
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
