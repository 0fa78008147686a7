"""Blocking calls that may hang: each in a thread of its own, so that none that hangs blocks another."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from skyrl_maze.faults import EpisodeError, answered


class CallThreads:
    """Runs calls in daemon threads, at most `limit` at once; time in the queue does not count.

    A pool would lose a worker for good with every call that hangs. Here the thread is left to itself.

    Args:
        limit: calls at once; 0 makes each on the caller's own thread, where none can be given up.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run(self, func: Callable[..., Any], *args: Any, timeout_s: float, who: str) -> Any:
        """What `func(*args)` returns or raises.

        Raises:
            EpisodeError: it took longer than `timeout_s` seconds, or tried to end the process.
        """
        if not self._limit:
            return _result(*_outcome(func, *args))
        async with self._free_place():
            loop = asyncio.get_running_loop()
            done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

            def finish(outcome: tuple[Any, BaseException | None]) -> None:
                if not done.done():  # nobody waits any more
                    done.set_result(outcome)

            def work() -> None:
                outcome = _outcome(func, *args)
                if not loop.is_closed():
                    loop.call_soon_threadsafe(finish, outcome)

            threading.Thread(target=work, name="environment", daemon=True).start()
            try:
                outcome = await answered(done, timeout_s, who)
            except EpisodeError as error:
                # Another try would leave another thread behind.
                raise EpisodeError(error.kind, error.message) from error
        return _result(*outcome)

    def _free_place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self._limit))
        return self._places[1]


def _outcome(func: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    try:
        return func(*args), None
    except BaseException as error:
        return None, error


def _result(value: Any, error: BaseException | None) -> Any:
    if error is None:
        return value
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        raise error
    raise EpisodeError("environment", f"it raised {type(error).__name__}: {error}") from error
