"""Submits a job to Ray again and again until it is done, or fails in a way that another try cannot mend.

What a run has saved is on the shared folder, and the job's own script waits for its workers; so the same
command goes on where the try before it was.
"""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tenacity import RetryCallState, Retrying, retry_if_result, wait_exponential_jitter

from skyrl_maze.console import step_done
from skyrl_maze.errors import NotReadyError
from skyrl_maze.job_server import JobServer, JobState

LOST = "LOST"
NEVER_BEGAN = "it never began"
# What the shell and the commands of this package end with, and another try cannot mend.
_FINAL = {
    2: "it could not start; mend what it says and submit anew",
    126: "the shell cannot run this command; see that the file is executable",
    127: "the shell does not find this command; see that it is in the image",
}
_NOT_YET = 75
_MAX_WAIT_S = 600.0


@dataclass(frozen=True)
class Verdict:
    """What to do after a try, and why."""

    again: bool
    why: str
    exit_code: int
    """Of the supervisor, if nothing follows."""


def verdict(state: JobState) -> Verdict:
    """What to do after a job has ended in this state.

    `LOST` is a job that the server does not know any more, as after a restart of the head. A job that
    somebody has stopped stays stopped.
    """
    code = state.exit_code
    shell_code = 1 if code is None else code if code >= 0 else 128 - code
    if state.status == "SUCCEEDED":
        return Verdict(False, "done", 0)
    if state.status == "STOPPED":
        return Verdict(False, "somebody has stopped it", shell_code if code else 130)
    if state.status == LOST:
        return Verdict(True, "the cluster does not know it any more; was its head started anew?", 1)
    if not state.began:
        return Verdict(True, NEVER_BEGAN, 1)
    if code in _FINAL:
        return Verdict(False, _FINAL[code], shell_code)
    if code == _NOT_YET:
        return Verdict(True, "it could not start yet", shell_code)
    if code is None:
        return Verdict(True, "its node was lost", shell_code)
    if code < 0:
        return Verdict(True, f"signal {-code} has killed it", shell_code)
    return Verdict(True, "it failed", shell_code or 1)


@dataclass
class Try:
    """One submission of the job."""

    job: str
    started_s: float
    log: "LogView"
    state: JobState | None = None
    """None while it runs, as far as is known."""
    seconds: float = 0.0

    @property
    def began(self) -> bool:
        """Whether its command was started, as far as is known."""
        return self.state is None or self.state.began


class LogView:
    """A job's log, written once however often it is read, and what its lines tell.

    Args:
        write: gets each piece of text once, in order.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._lock = write, threading.Lock()
        self._written, self._line = 0, ""
        self.first_step: int | None = None
        """The first step that this job finished; None if it finished none."""
        self.last_step: int | None = None
        self.steps: int | None = None
        """Of the whole run."""
        self.error = ""
        """The last line that began with `error:`, without that."""

    def take(self, at: int, text: str) -> None:
        """Take a text that begins `at` characters into the log; what was written already is passed over."""
        with self._lock:
            fresh = text[max(0, self._written - at) :]
            self._write(fresh)
            self._written += len(fresh)
            *lines, self._line = (self._line + fresh).split("\n")
            for line in lines:
                self._read(line)

    def _read(self, line: str) -> None:
        if found := step_done(line):
            self.last_step, self.steps = found
            self.first_step = self.first_step or self.last_step
        if said := re.match(r"error: (.*)", line):
            self.error = said[1]


@dataclass
class Supervisor:
    """Tries a command on a job server until it is done.

    Args:
        entrypoint: the shell command.
        name: the tries' ids are `<name>-1`, `<name>-2` and so on.
        max_tries: how often it is begun at most, and how often it may fail to begin.
        first_wait_s: before the second try; doubled before each further one, up to ten minutes.
        write: gets the jobs' logs.
        say: is told in a sentence what happens.
        poll_s: between two looks at a job.
    """

    server: JobServer
    entrypoint: str
    name: str
    max_tries: int
    first_wait_s: float
    write: Callable[[str], None]
    say: Callable[[str], None]
    poll_s: float = 5.0
    tries: list[Try] = field(default_factory=list)

    def run(self) -> Verdict:
        """Return what is said of the last try.

        Raises:
            SetupError: the server refuses.
            NotReadyError: it was away for too long.
        """
        retries = Retrying(
            retry=retry_if_result(lambda found: found.again),
            stop=self._used_up,
            wait=wait_exponential_jitter(
                multiplier=self.first_wait_s, max=_MAX_WAIT_S, jitter=self.first_wait_s / 10
            ),
            before_sleep=self._tell,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        found: Verdict = retries(self._once)
        return found

    def _never_began(self) -> int:
        return sum(not this.began for this in self.tries)

    def _used_up(self, _state: RetryCallState) -> bool:
        """Whether no try is left; what Ray placed on a node that was gone was none."""
        unbegun = self._never_began()
        return max(unbegun, len(self.tries) - unbegun) >= self.max_tries

    def _tell(self, state: RetryCallState) -> None:
        self.say(f"the next try follows in {state.upcoming_sleep:.0f} s")

    def _once(self) -> Verdict:
        job = f"{self.name}-{len(self.tries) + 1}"
        this = Try(job, time.monotonic(), LogView(self.write))
        self.tries.append(this)
        self.server.submit(job, self.entrypoint)
        self.say(f"try {len(self.tries)} of {self.max_tries + self._never_began()} is {job}")
        stop = threading.Event()
        follower = threading.Thread(
            target=self.server.follow, args=(job, this.log.take, stop), name="log", daemon=True
        )
        follower.start()
        try:
            this.state = self._end_of(job)
            if this.state.status != LOST:
                self._read_to_end(this)
        finally:
            stop.set()
            this.seconds = time.monotonic() - this.started_s
        found = verdict(this.state)
        cause = this.log.error or (" ".join(this.state.message.split()) if found.again else "")
        self.say(f"{job} has ended: {found.why}{f' ({cause})' if cause else ''}")
        return found

    def _read_to_end(self, this: Try) -> None:
        try:
            this.log.take(0, self.server.log(this.job))
        except NotReadyError as error:
            self.say(f"{error}: its end may be missing here")

    def _end_of(self, job: str) -> JobState:
        while True:
            state = self.server.state(job)
            if state is None:
                return JobState(LOST, None, "")
            if state.ended:
                return state
            time.sleep(self.poll_s)
