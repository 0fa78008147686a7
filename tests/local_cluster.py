"""A Ray cluster of several nodes on this machine: a head that takes jobs, and workers that can be lost."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

# The variables of a manifest, which the machine that tests may have as well.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("MAZE_", "HF_", "RAY_"))}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
_START_LIMIT_S = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=30)
        for left in alive:
            left.kill()
    process.wait(30)


@dataclass
class LocalCluster:
    """A head that was started, and whatever workers are added; see `local_cluster`."""

    folder: Path
    environment: dict[str, str]
    dashboard: str
    """Its address."""
    gcs: str
    """The address that nodes join and drivers connect to."""
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add_worker(self, gpus: int) -> None:
        """A node with logical GPUs, in processes of its own as in a pod of KubeRay's."""
        arguments = (f"--address={self.gcs}", f"--num-gpus={gpus}", "--num-cpus=4")
        self.workers.append(_start(self.folder, self.environment, *arguments))


def raylet_of(worker: subprocess.Popen[bytes]) -> psutil.Process:
    """The raylet of a worker that runs."""
    started = psutil.Process(worker.pid).children(recursive=True)
    (raylet,) = [process for process in started if process.name() == "raylet"]
    return raylet


def node_id(worker: subprocess.Popen[bytes]) -> str:
    """Ray's name for the node of a worker that runs."""
    (argument,) = [word for word in raylet_of(worker).cmdline() if word.startswith("--node_id=")]
    return argument.partition("=")[2]


def lose(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker's raylet and whatever runs below it, at once, as when a node loses its power."""
    raylet = raylet_of(worker)
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    worker.wait(60)  # `ray start --block` ends once it sees that


def _start(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    command = ["ray", "start", "--block", "--disable-usage-stats", "--object-store-memory=100000000"]
    with (folder / "ray.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *arguments], env=environment, stdout=log, stderr=log, start_new_session=True
        )


@contextlib.contextmanager
def local_cluster(folder: Path, environment: dict[str, str]) -> Iterator[LocalCluster]:
    """A Ray head with a dashboard, started as KubeRay does it; at the end it and all workers are gone.

    Args:
        folder: of a short path: Ray's sockets lie below it.
        environment: of the head, the workers and the jobs.
    """
    port, dashboard, agent = free_port(), free_port(), free_port()
    head = _start(
        folder,
        environment,
        *("--head", "--num-cpus=4", "--num-gpus=0", f"--temp-dir={folder}", f"--port={port}"),
        *(f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        f"--ray-client-server-port={free_port()}",
    )
    made = LocalCluster(folder, environment, f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}")
    try:
        yield made
    finally:
        for worker in made.workers:
            end(worker)
        end(head)


def job_client(address: str) -> Any:
    """A client of a dashboard that may still be starting."""
    from ray.job_submission import JobSubmissionClient

    deadline_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            return JobSubmissionClient(address)
        except ConnectionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(1)
