"""A Ray cluster of several nodes on this machine: a head that takes jobs, and workers that can be lost."""

import contextlib
import json
import os
import random
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
_START_LIMIT_S, _STARTS = 180, 3
_OBJECT_STORE_BYTES = 100_000_000


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def head_port() -> int:
    """A port that Ray's other processes, which take any, do not take before the head binds it."""
    while True:
        port = random.randrange(20_000, 32_000)  # above Ray's workers, below what the kernel gives away
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


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
        """A node with logical GPUs, in processes of its own as in a pod of KubeRay's; it has joined.

        A raylet that a busy machine holds up for 30 s gives up, and is started again as a pod would be.
        """
        command = [
            *("ray", "start", "--block", "--disable-usage-stats", f"--address={self.gcs}", "--num-cpus=4"),
            *(f"--num-gpus={gpus}", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
        ]
        for _ in range(_STARTS):
            log = self.folder / f"worker-{len(list(self.folder.glob('worker-*')))}.log"
            with log.open("wb") as out:
                worker = subprocess.Popen(
                    command, env=self.environment, stdout=out, stderr=out, start_new_session=True
                )
            self.workers.append(worker)
            while worker.poll() is None:  # which it bounds itself
                if b"Ray runtime started" in log.read_bytes():
                    return
                time.sleep(0.2)
            self.workers.remove(worker)
        raise AssertionError(log.read_text(errors="replace"))


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


# Not `ray start --head`: that also starts a server for Ray's old client, and ends if it is not up in 30 s.
_HEAD = """
import json, signal, sys
from ray.cluster_utils import Cluster
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
Cluster(initialize_head=True, head_node_args=json.loads(sys.argv[1]))
signal.pause()
"""


@contextlib.contextmanager
def local_cluster(folder: Path, environment: dict[str, str]) -> Iterator[LocalCluster]:
    """A Ray head with a dashboard that takes jobs; at the end it and all workers are gone.

    Args:
        folder: of a short path: Ray's sockets lie below it.
        environment: of the head, the workers and the jobs.
    """
    port, dashboard, agent = head_port(), head_port(), head_port()
    given = {
        "num_cpus": 4,
        "num_gpus": 0,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "temp_dir": str(folder),
        "gcs_server_port": port,
        "include_dashboard": True,
        "dashboard_port": dashboard,
        "dashboard_agent_listen_port": agent,
    }
    command = [sys.executable, "-c", _HEAD, json.dumps(given)]
    with (folder / "ray.log").open("ab") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
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


def wait_for_job(client: Any, job: str, limit_s: float = 600) -> str:
    """The state that a job ended in."""
    deadline_s = time.monotonic() + limit_s
    while not (status := client.get_job_status(job)).is_terminal():
        assert time.monotonic() < deadline_s, client.get_job_logs(job)
        time.sleep(1)
    return str(status.value)
