"""`skyrl-maze resubmit`: a job on a Ray cluster, submitted until it is done."""

import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from skyrl_maze.console import plain_console
from skyrl_maze.errors import ConfigError
from skyrl_maze.job_server import JobServer
from skyrl_maze.supervisor import NEVER_BEGAN, Supervisor, Try

app = typer.Typer()
# Ray lets these two override every address that a client is given.
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL | re.ASCII)


@app.command()
def resubmit(
    command: Annotated[list[str], typer.Argument(help="What the job runs, after `--`.")],
    address: Annotated[
        str, typer.Option(help="Of the dashboard: http://host:8265, or sagemaker_ray://cluster/namespace.")
    ],
    name: Annotated[str, typer.Option(help="The jobs' ids begin with it.")] = "skyrl-maze",
    tries: Annotated[int, typer.Option(min=1, max=1000, help="How often it is begun at most.")] = 5,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, max=600, help="Seconds before the second try; then doubled.")
    ] = 30.0,
    away_s: Annotated[
        float, typer.Option("--away", min=0, max=86400, help="Seconds for which the dashboard may be away.")
    ] = 900.0,
) -> None:
    """Submit a job to a Ray cluster, show its log, and submit it again where it fails, until it is done.

    A job that resumes by itself, as `train_job.sh` does under the same run id, so goes on after a node was
    lost. What another try cannot mend ends it: exit code 2 (settings), 126 and 127 (no such command), and
    a job that was stopped. The exit code is that of the last job; 75 if the dashboard was away too long.

    Ctrl-C ends only this: a job that runs goes on, and it is said how to follow or stop it.

    Example: skyrl-maze resubmit --address sagemaker_ray://skyrl-visgym/hyperpod-ns-maze -- train_job.sh
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r} becomes part of the jobs' ids: "
            "letters, digits, '.', '_' and '-', the first a letter or digit"
        )
    entrypoint = shell_command(command)
    for variable in _ADDRESS_VARIABLES:
        os.environ.pop(variable, None)
    say = plain_console(stderr=True, soft_wrap=True)

    def told(text: str) -> None:
        say.print(f"resubmit: {text}")

    server = JobServer(address, away_s, told)
    server.reach()
    # Of its own for each call of this command: the server takes an id only once.
    unique = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    supervisor = Supervisor(server, entrypoint, unique, tries, wait_s, _write, told)
    _catch_signals()
    try:
        code = supervisor.run().exit_code
    except KeyboardInterrupt:
        for line in _going_on(supervisor.tries, address):
            told(line)
        code = 130
    finally:
        say.print(table(supervisor.tries))
    raise typer.Exit(code)


def shell_command(words: Sequence[str]) -> str:
    """The words as one line for a shell, in which leading NAME=value words set variables.

    Example: `["A=1 2", "train_job.sh", "b c"]` becomes `A='1 2' train_job.sh 'b c'`.

    Raises:
        ConfigError: the words name no command.
    """
    said, leading = [], True
    for word in words:
        assignment = _ASSIGNMENT.fullmatch(word) if leading else None
        leading = assignment is not None
        said.append(f"{assignment[1]}={shlex.quote(assignment[2])}" if assignment else shlex.quote(word))
    if leading:  # a shell would set the variables, and succeed
        raise ConfigError(f"{' '.join(said)!r} is no command; give one, such as train_job.sh, after --")
    return " ".join(said)


def table(tries: Sequence[Try]) -> Table:
    """What became of each try."""
    shown = Table(title="Tries", title_justify="left")
    for column in ("try", "job", "minutes", "steps done", "how it ended"):
        shown.add_column(column, overflow="fold", justify="right" if column == "minutes" else "left")
    for number, this in enumerate(tries, 1):
        shown.add_row(str(number), this.job, f"{this.seconds / 60:.1f}", _steps(this), _ended(this))
    return shown


def _steps(this: Try) -> str:
    log = this.log
    if log.last_step is None:
        return "none"
    first = "" if log.first_step == log.last_step else f"{log.first_step} to "
    return f"{first}{log.last_step} of {log.steps}"


def _ended(this: Try) -> str:
    state = this.state
    if state is None:
        return "had not ended"
    code = "" if state.exit_code is None else f", exit code {state.exit_code}"
    error = "" if state.status == "SUCCEEDED" else this.log.error or ("" if state.began else NEVER_BEGAN)
    return f"{state.status.lower()}{code}{f': {error}' if error else ''}"


def _going_on(tries: Sequence[Try], address: str) -> list[str]:
    """What to say to somebody who no longer wants to watch."""
    if not tries or tries[-1].state is not None:
        return ["interrupted; no job runs, and none will follow"]
    job, where = tries[-1].job, f"--address {shlex.quote(address)}"
    return [
        f"interrupted; the job {job} goes on, and will not be submitted again if it fails",
        f"to follow it: ray job logs {where} --follow {job}",
        f"to stop it:   ray job stop {where} {job}",
    ]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _catch_signals() -> None:
    """Ctrl-C and SIGTERM end this in the same way; also where a shell started it with Ctrl-C ignored."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
