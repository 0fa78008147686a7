"""What may go wrong in one episode without costing the others, how often it is tried again, and the counts.

An `EpisodeError` ends one episode. Only faults of the infrastructure (an engine or an environment that did
not answer, or answered nonsense) are tried again: a wrong answer to a wrong request stays wrong.
"""

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from skyrl_maze.errors import SkyRLMazeError, closest
from skyrl_maze.pictures import without_base64

PICTURE_WAYS = ("auto", "files", "tensors")
_LONGEST_WAIT_S = 10.0
_CAUSES_SHOWN = 5
# Ports, addresses and durations would tell equal causes apart.
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)*")
# Statuses below 500 that say "later", not "never".
_PASSING_STATUSES = (408, 425, 429)


@dataclass
class RolloutConfig:
    """How an episode is played, `generator.rollouts` in a recipe."""

    pictures: str = "auto"
    """How the engine gets pictures: `files`, or `tensors` that it rendered before; `auto` tries files."""
    retries: int = 3
    """How often a request, or an episode whose environment did not answer, is tried again."""
    retry_wait_s: float = 0.5
    """Longest wait before the first retry, in seconds; it doubles each time and is drawn at random."""
    request_timeout_s: float = 600.0
    """Seconds that the engine may take for one answer."""
    env_timeout_s: float = 60.0
    """Seconds that the environment may take for one call."""
    max_failed_share: float = 0.5
    """Share of a batch's episodes that may be lost before the step is given up."""
    fault_rate: float = 0.0
    """Share of environment steps and engine calls that fail on purpose, to rehearse all this."""

    def problems(self) -> list[str]:
        """What cannot work, one line a setting, each beginning with its name."""
        found = []
        if self.pictures not in PICTURE_WAYS:
            hint = closest(self.pictures, PICTURE_WAYS)
            found.append(f"pictures={self.pictures!r}{hint}; allowed: {', '.join(PICTURE_WAYS)}")
        ranges = {
            "retries": (0, 100),
            "retry_wait_s": (0, 60),
            "request_timeout_s": (0.001, 86_400),
            "env_timeout_s": (0.001, 86_400),
            "max_failed_share": (0, 1),
            "fault_rate": (0, 1),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:  # also true of NaN
                found.append(f"{name}={getattr(self, name)}: must be from {low} to {high}")
        return found

    @classmethod
    def of(cls, generator_cfg: Any) -> "RolloutConfig":
        """The section of a SkyRL generator config; the defaults if it has none."""
        given = getattr(generator_cfg, "rollouts", None)
        if given is None:
            return cls()
        return (
            given if isinstance(given, cls) else cls(**{f.name: getattr(given, f.name) for f in fields(cls)})
        )


class RolloutError(SkyRLMazeError, RuntimeError):
    """A batch of episodes that cannot be trained on; the message lists the causes."""


class EpisodeError(SkyRLMazeError, RuntimeError):
    """One episode is lost.

    Args:
        kind: whose fault it is: `environment`, `engine`, `timeout`, `reply` or `picture`.
        message: what was tried and what happened.
        passing: whether it may go away by itself, so that trying again makes sense.
    """

    def __init__(self, kind: str, message: str, passing: bool = False) -> None:
        super().__init__(kind, message, passing)
        self.kind, self.message, self.passing = kind, message, passing

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Tally:
    """Counts of one batch, shared by its episodes."""

    counts: Counter[str] = field(default_factory=Counter)
    causes: dict[str, list[str]] = field(default_factory=dict)
    """What was lost and why, alike causes together."""
    episodes: int = 0

    def lost(self, name: str, cause: str) -> None:
        """One episode is masked, because of `cause`; counted as `generate/<name>`."""
        self.counts["masked_episodes"] += 1
        self.counts[name] += 1
        self.causes.setdefault(_NUMBERS.sub("#", cause), []).append(cause)

    def metrics(self) -> dict[str, int]:
        """All counts under `generate/`; the two that people look for are there even if nothing happened."""
        always = {"masked_episodes": 0, "retries": 0}
        return {f"generate/{name}": count for name, count in sorted({**always, **self.counts}.items())}

    def check(self, max_failed_share: float) -> None:
        """Raise RolloutError if more than the allowed share of episodes was lost, or all of them."""
        lost = self.counts["masked_episodes"]
        if not lost or (lost < self.episodes and lost / self.episodes <= max_failed_share):
            return
        alike = sorted(self.causes.values(), key=len, reverse=True)
        shown = [f"{len(causes)} x {causes[0]}" for causes in alike[:_CAUSES_SHOWN]]
        if len(self.causes) > _CAUSES_SHOWN:
            shown.append(f"and {len(self.causes) - _CAUSES_SHOWN} other causes")
        raise RolloutError(
            f"{lost} of {self.episodes} episodes were lost, "
            f"generator.rollouts.max_failed_share allows {max_failed_share:.0%} and never all: "
            + "; ".join(shown)
        )


def is_passing(error: BaseException) -> bool:
    """Whether `error` may go away by itself: a connection, a timeout, a server that is busy or fell over."""
    if isinstance(error, EpisodeError):
        return error.passing
    if isinstance(error, SkyRLMazeError):
        return False
    status = getattr(error, "status", None)  # aiohttp.ClientResponseError
    if isinstance(status, int) and 400 <= status < 500:
        return status in _PASSING_STATUSES
    return True


def retrying(config: RolloutConfig, tally: Tally) -> AsyncRetrying:
    """The attempts of one request or episode; the last failure is raised as it is."""

    def count(_state: RetryCallState) -> None:
        tally.counts["retries"] += 1

    return AsyncRetrying(
        stop=stop_after_attempt(config.retries + 1),
        wait=wait_random_exponential(multiplier=config.retry_wait_s, max=_LONGEST_WAIT_S),
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and is_passing(error)),
        before_sleep=count,
        reraise=True,
    )


async def answered(call: Awaitable[Any], timeout_s: float, who: str) -> Any:
    """The result of `call`, or an EpisodeError if it takes longer than `timeout_s` seconds."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await call
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EpisodeError("timeout", f"{who} did not answer in {timeout_s:g} s", passing=True) from error


def cause_of(error: BaseException) -> str:
    """One line on an error, without pictures."""
    try:
        text = without_base64(str(error))
    except Exception:
        text = "a message that cannot be read"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


class FaultInjector:
    """Fails calls at random, so that a run can be rehearsed with the faults a cluster has."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self._rate, self._random = rate, random.Random(seed)

    def may_fail(self, make: Callable[[], Exception]) -> None:
        """Raise what `make` returns in `rate` of all calls."""
        if self._rate and self._random.random() < self._rate:
            raise make()


@contextlib.contextmanager
def logged_only(what: str, warn: Callable[[str], None]) -> Any:
    """For cleaning up after an episode: a failure is said, and costs nothing."""
    try:
        yield
    except Exception as error:
        warn(f"{what} failed: {cause_of(error)}")
