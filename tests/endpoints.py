"""Real servers of a run's adapter for the tests, and what they answer over OpenAI's protocol."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

ROOT = Path(__file__).parents[1]
SERVING = Path(os.environ.get("SKYRL_MAZE_SERVING", ROOT / ".venv-serving"))
"""The environment of Ray Serve, which `make serving` makes."""
CLI = "from skyrl_maze.cli import main; main()"
S3 = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
}
# A Ray that a busy machine holds up for half a minute would give itself up.
PATIENCE = {
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
}
TOP = 5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str],
    ready: str,
    log: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[float]:
    """A server that answers at `ready`; yields the seconds that took, and ends all that it started."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    begun_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **offline, **(environment or {})},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while not _answers(ready):
                waited_s = time.monotonic() - begun_s
                said = log.read_text(errors="replace")[-3000:]
                assert process.poll() is None, f"it ended with {process.returncode}: {said}"
                assert waited_s < limit_s, f"it does not answer after {waited_s:.0f} s: {said}"
                time.sleep(0.5)
            yield time.monotonic() - begun_s
        finally:
            _end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ray_folder() -> Iterator[dict[str, str]]:
    """For a Ray that joins no other on this machine; a short path, as its sockets need it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield {"RAY_TMPDIR": folder, **PATIENCE}


def skyrl_maze(*arguments: object, python: str = sys.executable, cwd: Path | None = None) -> str:
    """What a command of this package prints, in a process of its own."""
    command = [python, "-c", CLI, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def object_store() -> Iterator[tuple[str, dict[str, str]]]:
    """An S3 of moto with one bucket: the address that adapters go below, and variables that lead there."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {**S3, "AWS_ENDPOINT_URL": url}
    command = [str(SERVING / "bin/python"), "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    make = "import boto3; boto3.client('s3').create_bucket(Bucket='adapters')"
    with running(command, f"{url}/moto-api/", Path(os.devnull), 120):
        subprocess.run([command[0], "-c", make], env={**os.environ, **variables}, check=True)
        yield "s3://adapters/maze", variables


@dataclass(frozen=True)
class Place:
    """One token of a greedy answer."""

    token: str
    nats: dict[str, float]
    """Log-probabilities of the likeliest tokens there."""


def greedy(url: str, model: str, chats: Sequence[Any], max_tokens: int) -> list[list[Place]]:
    """The answer to each conversation, token by token."""
    answers = []
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for chat in chats:
            answer = client.chat.completions.create(
                model=model,
                messages=chat,
                max_tokens=max_tokens,
                temperature=0,
                logprobs=True,
                top_logprobs=TOP,
            )
            assert answer.choices[0].logprobs is not None
            places = answer.choices[0].logprobs.content or []
            answers.append([Place(p.token, {t.token: t.logprob for t in p.top_logprobs}) for p in places])
    assert all(answers)
    return answers


def largest_difference(a: Sequence[Sequence[Place]], b: Sequence[Sequence[Place]]) -> float:
    """In nats, of tokens that both name, at places that follow the same words."""
    found = []
    for one, other in zip(a, b, strict=True):
        for here, there in zip(one, other, strict=False):
            found += [
                abs(here.nats[token] - there.nats[token]) for token in here.nats.keys() & there.nats.keys()
            ]
            if here.token != there.token:
                break
    return max(found)
