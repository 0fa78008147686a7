"""Real servers of a run's adapter for the tests, and what they answer over OpenAI's protocol."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
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


def log_probabilities(url: str, model: str, chats: Sequence[Any]) -> list[dict[str, float]]:
    """Nats of the likeliest first tokens of an answer to each conversation."""
    found = []
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for chat in chats:
            answer = client.chat.completions.create(
                model=model, messages=chat, max_tokens=1, temperature=0, logprobs=True, top_logprobs=TOP
            )
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.content is not None
            (place,) = answer.choices[0].logprobs.content
            found.append({entry.token: entry.logprob for entry in place.top_logprobs})
    return found


def largest_difference(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]) -> float:
    """In nats, over the tokens that both name."""
    return max(
        abs(first[t] - second[t]) for first, second in zip(a, b, strict=True) for t in first.keys() & second
    )
