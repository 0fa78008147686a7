"""Asks every engine how likely a fixed text is, with the adapter and without: once it learned, that differs.

Per engine and in this order: base model, adapter, base model. The same request alone in an engine takes the
same kernels, so what two answers of the base model differ by is its noise, which is nothing as a rule.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from tenacity import retry, retry_if_not_exception_type, stop_after_attempt, wait_random_exponential

from skyrl_maze.errors import AdapterError
from skyrl_maze.serving import EngineServer, of_each

PROBE_TEXT = (
    "A maze is a set of cells with walls between them. From the start one walks right, down, left and up, "
    "cell by cell, until the goal is reached; a wall stops the walk, and whoever turns back early comes home "
    "sooner. How far is it to the goal, and which way would you take first?"
)
_PROBE_TOKENS = 64
_LIMIT_S = 120.0
_ATTEMPTS = 3
# Mean difference, in nats a token, that two engines of the same weights may show in bfloat16.
_ALIKE = 0.05
# Smaller values of lora_B than this can vanish in the rounding of a bfloat16 engine.
VISIBLE_B = 1e-6


@dataclass(frozen=True)
class Reading:
    """One engine's log-probabilities of the probe's tokens, in nats; three lists of the same length."""

    base: list[float]
    adapter: list[float]
    base_again: list[float]


@dataclass(frozen=True)
class Probed:
    """What the probe of all engines came to."""

    difference: float
    """Mean distance of the adapter's log-probabilities from the base model's, in nats a token."""
    seconds: float


def probe_ids(tokenizer: Any) -> list[int]:
    """The probe's token ids."""
    return list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False)[:_PROBE_TOKENS])


async def probe_engines(
    urls: Sequence[str],
    base: str,
    adapter: str,
    ids: Sequence[int],
    salt: str,
    largest_b: float,
    limit_s: float = _LIMIT_S,
) -> Probed:
    """Probe all engines at once; each must be awake, and should have nothing else to do.

    Args:
        urls: of the engines' own servers.
        base: the name of the base model at the engines.
        adapter: the name of the adapter there.
        salt: keeps the probe out of what the engines cached before.
        largest_b: the largest absolute value in any lora_B; 0 for an adapter that changes nothing.
        limit_s: seconds that an engine may take.

    Raises:
        AdapterError: an engine does not answer, or its answers contradict `largest_b`, or those of others.
    """
    started_s = time.monotonic()

    async def read(engine: EngineServer) -> Reading:
        models = (base, adapter, base)
        return Reading(*[await _logprobs(engine, m, ids, f"{salt}-{i}") for i, m in enumerate(models)])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s)) as session:
        found = await of_each([EngineServer(url, session) for url in urls], read, limit_s)
    problems = [f"{url}: {reading}" for url, reading in found.items() if isinstance(reading, AdapterError)]
    readings = {url: reading for url, reading in found.items() if isinstance(reading, Reading)}
    if problems := problems + probe_problems(readings, largest_b):
        title = f"the engines do not serve adapter {salt} as they should:"
        raise AdapterError("\n  - ".join([title, *problems]))
    difference = statistics.fmean(_distance(r.adapter, r.base) for r in readings.values())
    return Probed(difference, time.monotonic() - started_s)


def probe_problems(readings: dict[str, Reading], largest_b: float) -> list[str]:
    """What these readings contradict, one line an engine, which begins with its address."""
    problems = []
    tokens = zip(*[reading.adapter for reading in readings.values()], strict=True)
    typical = [statistics.median(logprobs) for logprobs in tokens]
    for url, reading in readings.items():
        distance = _distance(reading.adapter, reading.base)
        changed = max(abs(a - b) for a, b in zip(reading.adapter, reading.base, strict=True))
        noise = max(abs(a - b) for a, b in zip(reading.base, reading.base_again, strict=True))
        if largest_b >= VISIBLE_B and changed <= noise:
            problems.append(
                f"{url}: answers as the base model does, although lora_B holds values up to {largest_b:.1e}"
            )
        if largest_b == 0 and distance > _ALIKE:
            problems.append(
                f"{url}: differs from the base model by {distance:.3f} nats, although lora_B is zero"
            )
        if (off := _distance(reading.adapter, typical)) > _ALIKE:
            problems.append(f"{url}: differs from the other engines by {off:.3f} nats a token")
    return problems


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.fmean(abs(x - y) for x, y in zip(a, b, strict=True))


@retry(
    stop=stop_after_attempt(_ATTEMPTS),
    wait=wait_random_exponential(max=2),
    retry=retry_if_not_exception_type((AdapterError, asyncio.CancelledError)),
    reraise=True,
)
async def _logprobs(engine: EngineServer, model: str, ids: Sequence[int], salt: str) -> list[float]:
    body = {
        "model": model,
        "token_ids": [*ids],
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
        "cache_salt": salt,
    }
    answer = await engine.request("POST", "/inference/v1/generate", body)
    entries = answer["prompt_logprobs"][1:]  # nothing comes before the first token
    logprobs = [entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)]
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in logprobs):
        raise AdapterError("its log-probabilities are no numbers")
    return logprobs
