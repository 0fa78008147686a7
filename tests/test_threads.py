"""Calls that hang, or that try to take the process with them, cost themselves alone."""

import asyncio
import threading
import time
from typing import Any

import pytest

from skyrl_maze.faults import EpisodeError
from skyrl_maze.threads import CallThreads


def run(threads: CallThreads, func: Any, *args: Any, timeout_s: float = 30) -> Any:
    return asyncio.run(threads.run(func, *args, timeout_s=timeout_s, who="the environment"))


@pytest.mark.parametrize("limit", [0, 2])
def test_results_and_errors_come_through(limit: int) -> None:
    threads = CallThreads(limit)
    assert run(threads, lambda a: a + 1, 2) == 3
    with pytest.raises(KeyError, match="x"):
        run(threads, {}.__getitem__, "x")
    assert run(threads, lambda: 5) == 5, "in another event loop, too"


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize(
    "error", [StopIteration("end"), SystemExit(3), asyncio.CancelledError(), GeneratorExit()]
)
def test_what_would_end_more_than_the_call_is_a_fault(limit: int, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(EpisodeError, match=type(error).__name__):
        run(CallThreads(limit), fail)


def test_calls_that_hang_leave_room_for_others() -> None:
    release = threading.Event()
    threads = CallThreads(2)

    async def scenario() -> list[Any]:
        hanging = [threads.run(release.wait, 60, timeout_s=0.1, who="the environment") for _ in range(4)]
        lost = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(error, EpisodeError) and not error.passing for error in lost)
        return await asyncio.gather(
            *(threads.run(lambda i=i: i, timeout_s=30, who="the environment") for i in range(5))
        )

    try:
        assert asyncio.run(scenario()) == [0, 1, 2, 3, 4]
    finally:
        release.set()


def test_waiting_for_a_place_is_not_counted() -> None:
    threads = CallThreads(1)

    async def scenario() -> list[Any]:
        calls = (threads.run(time.sleep, 0.05, timeout_s=5, who="it") for _ in range(120))
        return await asyncio.gather(*calls)

    assert asyncio.run(scenario()) == [None] * 120


def test_no_more_run_at_once_than_allowed() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    threads = CallThreads(3)

    async def scenario() -> None:
        await asyncio.gather(*(threads.run(work, timeout_s=30, who="it") for _ in range(20)))

    asyncio.run(scenario())
    assert most <= 3
