"""Ray's job server, asked over a network that may fail: each call is bounded, and tried again for a while.

The client is Ray's own. So an address may also name a module that knows the way, such as
`sagemaker_ray://cluster/namespace` once Amazon's toolkit is installed.
"""

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from func_timeout import FunctionTimedOut, func_timeout
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential_jitter,
)
from tenacity.nap import sleep_using_event

from skyrl_maze.errors import NotReadyError, SetupError
from skyrl_maze.faults import cause_of

_CALL_LIMIT_S = 60.0
_MAX_WAIT_S = 30.0
# Of HTTP: what a proxy or a login that ran out says, and what the server says while it starts.
_MAY_PASS = {401, 403, 408, 425, 429}


@dataclass(frozen=True)
class JobState:
    """What the server says of a job."""

    status: str
    """`PENDING`, `RUNNING`, `SUCCEEDED`, `FAILED` or `STOPPED`."""
    exit_code: int | None
    """Of the job's command; negative for a signal, None if it has none, or the server lost sight of it."""
    message: str
    began: bool = True
    """Whether its command was started. Ray may place a job on a node that it does not know to be lost."""

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


class JobServer:
    """One server; a client is made anew after each failure, for its login may have run out.

    Args:
        address: as `ray job submit --address` takes it.
        away_s: how long a server that was reached once may be away.
        say: is told in a sentence when it is.
        connect: makes the client of an address; by default Ray's.
    """

    def __init__(
        self,
        address: str,
        away_s: float,
        say: Callable[[str], None],
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        self.address, self._away_s, self._say = address, away_s, say
        self._connect = connect or _ray_client
        self._client: Any = None

    def reach(self) -> None:
        """Raise SetupError if the server cannot be reached now: the address may be mistyped."""
        try:
            self._once("get_version")
        except Exception as error:
            raise SetupError(
                f"cannot reach Ray's dashboard at {self.address} ({cause_of(error)}); give its address, such "
                "as http://host:8265, or sagemaker_ray://cluster/namespace once "
                "toolkit-for-ray-on-sagemaker-ai is installed"
            ) from error

    def submit(self, job: str, entrypoint: str) -> None:
        """Submit a shell command under an id of its own.

        Raises:
            SetupError: the server refuses it.
            NotReadyError: the server was away for too long.
        """

        def once() -> None:
            try:
                self._once("submit_job", entrypoint=entrypoint, submission_id=job)
            except RuntimeError as error:
                if "already exists" not in str(error):  # an answer got lost, and the job is there
                    raise

        self._again(once)

    def state(self, job: str) -> JobState | None:
        """What the server says of a job; None if it knows none of that id. Raises as `submit`."""
        try:
            info = self._again(lambda: self._once("get_job_info", job))
        except _UnknownJobError:
            return None
        began = info.driver_node_id is not None
        return JobState(str(info.status.value), info.driver_exit_code, info.message or "", began)

    def log(self, job: str) -> str:
        """All that a job has printed; raise NotReadyError if it cannot be read now."""
        try:
            return str(self._once("get_job_logs", job))
        except Exception as error:
            raise NotReadyError(f"the log of {job} cannot be read ({cause_of(error)})") from error

    def follow(self, job: str, take: Callable[[int, str], None], stop: threading.Event) -> None:
        """Hand over what a job prints as it comes, until `stop` is set; a broken connection is made anew.

        One that is dead and does not say so hands over nothing more: `log` has all of it.

        Args:
            take: gets the place in the log where a text begins, in characters, and the text; each connection
                begins with the first.
            stop: looked at when something comes, and between connections.
        """

        async def tail() -> None:
            at = 0
            async for text in self._connect(self.address).tail_job_logs(job):
                if stop.is_set():
                    return
                take(at, text)
                at += len(text)
            if not stop.wait(_MAX_WAIT_S):  # the job has ended, or something between here and there
                raise ConnectionError("the log's connection has ended")

        again = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, Exception)),
            wait=wait_exponential_jitter(max=_MAX_WAIT_S),
            stop=stop_when_event_set(stop),
            sleep=sleep_using_event(stop),
            retry_error_callback=lambda _: None,
        )
        again(lambda: asyncio.run(tail()))

    def _once(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A call of Ray's client, in a thread that is given up if it hangs: the client sets no limits."""

        def call() -> Any:
            if self._client is None:
                self._client = self._connect(self.address)
            return getattr(self._client, method)(*args, **kwargs)

        try:
            return func_timeout(_CALL_LIMIT_S, call)
        except FunctionTimedOut:
            self._client = None
            raise TimeoutError(f"no answer within {_CALL_LIMIT_S:.0f} s") from None
        except Exception as error:
            self._client = None
            if _status_code(error) == 404 and "does not exist" in str(error):
                raise _UnknownJobError(str(error)) from error
            raise

    def _again(self, once: Callable[[], Any]) -> Any:
        def told(state: RetryCallState) -> None:
            if state.attempt_number == 1:
                error = state.outcome.exception() if state.outcome is not None else None
                cause = cause_of(error) if error is not None else "no answer"
                self._say(f"{self.address} does not answer ({cause}); trying for {self._away_s:.0f} s")

        retries = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential_jitter(max=_MAX_WAIT_S),
            stop=stop_after_delay(self._away_s),
            before_sleep=told,
            reraise=True,
        )
        try:
            return retries(once)
        except _UnknownJobError:
            raise
        except Exception as error:
            if _may_pass(error):
                raise NotReadyError(
                    f"{self.address} has not answered for {self._away_s:.0f} s ({cause_of(error)}); "
                    "what was submitted may go on"
                ) from error
            raise SetupError(f"{self.address} refuses ({cause_of(error)})") from error


class _UnknownJobError(SetupError):
    """The server knows no job of that id."""


def _ray_client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


def _status_code(error: BaseException) -> int | None:
    """The HTTP status that an error of Ray's client carries, in its text or its response."""
    response = getattr(error, "response", None)
    if response is not None:
        return int(response.status_code)
    found = re.search(r"status code (\d{3})", str(error))
    return int(found[1]) if found else None


def _may_pass(error: BaseException) -> bool:
    """Whether the same call may work later: all but what the server itself refuses."""
    if isinstance(error, _UnknownJobError):
        return False
    code = _status_code(error)
    return isinstance(error, Exception) and (code is None or code >= 500 or code in _MAY_PASS)
