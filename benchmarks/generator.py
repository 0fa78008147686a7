"""Rollouts of this package and of SkyRL's own multimodal generator against one vLLM server on the CPU.

Both play the same episodes: one new 288-pixel picture a turn, answers of eight tokens. The model is an
untrained Qwen3-VL of half a million parameters with the published picture geometry, so the numbers show what
is sent and prepared, not what a large model computes.

    python benchmarks/generator.py --turns 20

A preprocessing is one picture that the engine's image processor worked on; bytes are all that went over HTTP,
both ways; seconds are of wall-clock. All are per episode, of several that are played at once.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from skyrl_maze import _compat

_compat.install()

import aiohttp  # noqa: E402
import skyrl_gym  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig  # noqa: E402
from skyrl.train.config.config import InferenceEngineConfig  # noqa: E402
from skyrl.train.generators.skyrl_vlm_generator import SkyRLVLMGymGenerator  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from skyrl_maze.faults import RolloutConfig  # noqa: E402
from skyrl_maze.generator import MazeVLMGenerator  # noqa: E402
from skyrl_maze.maze import generate_maze  # noqa: E402
from skyrl_maze.render import png_data_uri  # noqa: E402
from skyrl_maze.tiny import save_random_model  # noqa: E402

GROWTH = (5, 10, 20, 40)
ANSWER_TOKENS = 8
MAX_MODEL_LEN = 8192
START_LIMIT_S = 300
ENV = "slides"

# Run by the server's Python: vLLM as SkyRL serves it; a file grows by one byte for every picture prepared.
SERVER = """
import os, runpy
from skyrl_maze import _compat
_compat.install()
from transformers.models.qwen2_vl import image_processing_qwen2_vl as module
from transformers.image_utils import make_flat_list_of_images
for name in ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"):
    cls = getattr(module, name, None)
    if cls is not None:
        def preprocess(self, images, *args, _original=cls.preprocess, **kwargs):
            with open(os.environ["PREPROCESSED"], "ab") as file:
                file.write(b"." * len(make_flat_list_of_images(images)))
            return _original(self, images, *args, **kwargs)
        cls.preprocess = preprocess
runpy.run_module("skyrl.backends.skyrl_train.inference_servers.vllm_server_actor", run_name="__main__")
"""


@dataclass
class Measured:
    """Means over the episodes of one side."""

    preprocessings: float
    http_bytes: float
    seconds: float


class Slides(BaseTextEnv):
    """Shows another maze every turn, whatever the answer."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.row = extras or {}
        self.max_turns = self.row["turns"]

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [self._show()], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns >= self.max_turns
        observations = [] if done else [self._show()]
        return BaseTextEnvStepOutput(observations=observations, reward=0.0, done=done, metadata={})

    def _show(self) -> dict[str, Any]:
        maze = generate_maze(9, seed=100 * self.row["episode"] + self.turns)
        url = png_data_uri(maze, maze.start, "tokens", cell_px=32)
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Where to?"}]
        return {"role": "user", "content": parts}


@contextlib.contextmanager
def server(
    folder: Path, cache_gb: float, max_turns: int, more: Sequence[str] = ()
) -> Iterator[tuple[str, Path]]:
    """A vLLM server on a free port, and the file that grows by a byte a prepared picture.

    Args:
        more: arguments of the server.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, counted, log = f"http://127.0.0.1:{port}", folder / "preprocessed", folder / "server.log"
    counted.touch()
    arguments = {
        "--served-model-name": "base",
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": MAX_MODEL_LEN,
        "--dtype": "float32",
        "--worker-cls": "vllm.v1.worker.cpu_worker.CPUWorker",
        "--mm-processor-cache-gb": cache_gb,
        "--limit-mm-per-prompt": json.dumps({"image": max_turns}),
        "--kv-cache-memory-bytes": 512 * 2**20,
    }
    environment = {
        "PREPROCESSED": str(counted),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-c", SERVER, "--model", str(folder / "model"), "--enforce-eager"]
    command += [str(part) for pair in arguments.items() for part in pair] + [*more]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_until_healthy(process, url, log)
            yield url, counted
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise SystemExit(
        f"error: the server did not start; its last lines:\n{log.read_text(errors='replace')[-2000:]}"
    )


class Side:
    """One of the two generators, with a client of its own whose bytes are counted."""

    def __init__(self, generator_class: type, url: str, counted: Path, model: Path, rounds: int) -> None:
        self._counted, self._transferred, self._next_episode = counted, 0, 10_000 * rounds
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._client = RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="base", tokenizer=tokenizer
        )
        answer = tokenizer.encode("x")  # one token that no other merges with: stock rollouts re-tokenise
        self._params = {
            "max_tokens": ANSWER_TOKENS,
            "min_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "logprobs": 1,
            "allowed_token_ids": answer,
        }
        config = GeneratorConfig(
            max_turns=max(GROWTH),
            max_input_length=MAX_MODEL_LEN - ANSWER_TOKENS,
            sampling_params=SamplingParams(max_generate_length=ANSWER_TOKENS),
            inference_engine=InferenceEngineConfig(engine_init_kwargs={"max_model_len": MAX_MODEL_LEN}),
        )
        config.rollouts = RolloutConfig(retries=0)
        self._generator = generator_class(config, SkyRLGymConfig(), self._client, tokenizer)

    async def open(self) -> None:
        """Connect, and play two turns: what is done once a run lies before what is measured."""
        tracing = aiohttp.TraceConfig()
        tracing.on_request_chunk_sent.append(self._count)
        tracing.on_response_chunk_received.append(self._count)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=2),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[tracing],
        )
        self._client._get_generate_client()._sessions[asyncio.get_running_loop()] = session
        await self.play(turns=2, episodes=1)

    async def play(self, turns: int, episodes: int) -> Measured:
        """Play the episodes at once and count; each shows pictures that no other shows."""
        rows = [{"episode": self._next_episode + i, "turns": turns} for i in range(episodes)]
        self._next_episode += episodes
        prepared, transferred = self._counted.stat().st_size, self._transferred
        started = time.monotonic()
        batch = {
            "prompts": [[] for _ in rows],
            "env_classes": [ENV] * episodes,
            "env_extras": rows,
            "sampling_params": self._params,
        }
        output = await self._generator.generate(batch, disable_tqdm=True)
        seconds = time.monotonic() - started
        answered = [sum(mask) for mask in output["loss_masks"]]
        if answered != [turns * ANSWER_TOKENS] * episodes:
            raise RuntimeError(f"not all of {turns} turns of {ANSWER_TOKENS} tokens were played: {answered}")
        prepared, transferred = self._counted.stat().st_size - prepared, self._transferred - transferred
        return Measured(prepared / episodes, transferred / episodes, seconds / episodes)

    async def close(self) -> None:
        await self._client.teardown()

    async def _count(self, _session: Any, _context: Any, params: Any) -> None:
        self._transferred += len(params.chunk)


async def compare(
    url: str, counted: Path, model: Path, turns: int, episodes: int, say: Callable[[str], None]
) -> tuple[dict[int, Measured], Measured]:
    """This package at several lengths, and SkyRL's generator at `turns`."""
    ours = Side(MazeVLMGenerator, url, counted, model, 1)
    stock = Side(SkyRLVLMGymGenerator, url, counted, model, 2)
    say("warming up")
    await ours.open()
    await stock.open()
    growth = {}
    for length in sorted({*GROWTH, turns}):
        say(f"this package, {length} turns")
        growth[length] = await ours.play(length, episodes)
    say(f"SkyRL's generator, {turns} turns; about {turns**2 * episodes / 7:.0f} s")
    theirs = await stock.play(turns, episodes)
    await ours.close()
    await stock.close()
    return growth, theirs


def main(
    turns: Annotated[int, typer.Option(min=1, max=60, help="Turns of an episode, for both sides.")] = 20,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes played at once.")] = 4,
    cache_gb: Annotated[
        float, typer.Option(help="The engine's cache of prepared pictures; SkyRL sets 0.")
    ] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Compare bytes, preprocessings and seconds of this package's rollouts with SkyRL's own."""
    console = Console()
    skyrl_gym.register(id=ENV, entry_point=Slides)
    with tempfile.TemporaryDirectory(prefix="generator-benchmark-") as scratch, console.status("") as status:
        folder = Path(scratch)
        status.update("building an untrained Qwen3-VL")
        save_random_model(folder / "model", ["user assistant Where to?"], patch_px=16)
        status.update("starting a vLLM server")
        with server(folder, cache_gb, max(*GROWTH, turns)) as (url, counted):
            growth, stock = asyncio.run(
                compare(url, counted, folder / "model", turns, episodes, status.update)
            )
    ours = growth[turns]
    console.print(_comparison(ours, stock, turns, episodes, cache_gb))
    console.print(_growth(growth))
    if json_file is not None:
        figures = {
            "turns": turns,
            "episodes": episodes,
            "cache_gb": cache_gb,
            "ours": asdict(ours),
            "stock": asdict(stock),
            "growth": {length: asdict(measured) for length, measured in growth.items()},
        }
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _comparison(ours: Measured, stock: Measured, turns: int, episodes: int, cache_gb: float) -> Table:
    title = f"An episode of {turns} turns, {episodes} at once, picture cache of {cache_gb:g} GB"
    table = Table("per episode", "this package", "SkyRL 0.4.0", "ratio", title=title, title_justify="left")
    for name in ("preprocessings", "http_bytes", "seconds"):
        mine, theirs = getattr(ours, name), getattr(stock, name)
        ratio = f"{theirs / mine:,.1f}" if mine else "-"
        table.add_row(name.replace("_", " "), f"{mine:,.2f}", f"{theirs:,.2f}", ratio)
    return table


def _growth(growth: dict[int, Measured]) -> Table:
    table = Table("turns", "preprocessings", "http bytes", "seconds", "seconds a turn", title="This package")
    for turns, m in growth.items():
        row = (
            f"{m.preprocessings:.2f}",
            f"{m.http_bytes:,.0f}",
            f"{m.seconds:.2f}",
            f"{m.seconds / turns:.3f}",
        )
        table.add_row(str(turns), *row)
    return table


if __name__ == "__main__":
    typer.run(main)
