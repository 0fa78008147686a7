"""Waits until a Ray cluster can run what a command line asks for: free GPUs, and files that all nodes see.

The trainer itself would give up after some minutes, and fail late where a worker lacks the shared folder.
"""

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl_maze import nodes
from skyrl_maze.errors import NotReadyError, SetupError, SkyRLMazeError, exit_code
from skyrl_maze.hyperpod.fetch import MOST_WAIT_S

if TYPE_CHECKING:
    from skyrl_maze.settings import TrainConfig

_POLL_S = 5.0
_SAY_EVERY_S = 60.0
_LOOK_LIMIT_S = 60


def wait(cfg: "TrainConfig", wait_s: float) -> None:
    """Return when the cluster that this process belongs to has what the run needs.

    Args:
        cfg: a run that joins the cluster; one that starts a Ray of its own has nothing to wait for.
        wait_s: how long to wait for the GPUs, and for every node to answer.

    Raises:
        NotReadyError: too few GPUs became free in time, or a node did not answer.
        SetupError: there is no cluster, or a file is missing on a node.
    """
    from skyrl_maze.settings import needed_gpus

    if cfg.run.device == "cpu" and not cfg.run.join_cluster:
        return
    with nodes.joined() as found:
        if not found:
            raise SetupError("no Ray cluster runs here; submit this to one: ray job submit -- train_job.sh")
        needed, root, model = needed_gpus(cfg), Path(cfg.run.root), cfg.trainer.policy.model.path
        # A node that was lost a moment ago still counts among the GPUs; it does not answer.
        _wait_while(lambda: _gpus_lacking(needed, *_gpus()) or _nodes_silent(root, model), wait_s)


def _gpus() -> tuple[int, int]:
    """GPUs of the cluster, and how many of them are free."""
    import ray

    there = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    free = ray.available_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    return int(there), int(free)


def _gpus_lacking(needed: int, there: int, free: int) -> str:
    if free >= needed:
        return ""
    return f"{needed} GPU(s) are needed, the cluster has {there} and {free} are free"


def _wait_while(lacking: Callable[[], str], wait_s: float, poll_s: float = _POLL_S) -> None:
    """Return when nothing is said to be lacking any more; NotReadyError if that takes longer."""
    started_s = time.monotonic()
    said_s = -_SAY_EVERY_S
    while state := lacking():
        waited_s = time.monotonic() - started_s
        if waited_s >= wait_s:
            raise NotReadyError(
                f"{state} after {waited_s:.0f} s; look for workers that are not Ready (kubectl get pods), "
                "or stop the job that holds them (ray job list, ray job stop)"
            )
        if waited_s - said_s >= _SAY_EVERY_S:
            print(f"waiting: {state}", flush=True)
            said_s = waited_s
        time.sleep(min(poll_s, wait_s - waited_s))


def _nodes_silent(root: Path, model: str) -> str:
    """Which nodes do not answer; SetupError names those that see no file written here now, or no model."""
    root.mkdir(parents=True, exist_ok=True)
    token = root / f".seen-{secrets.token_hex(8)}"
    paths = [str(token), *([model] if Path(model).is_absolute() else [])]
    token.touch()
    try:
        answers = nodes.ask(nodes.missing, nodes.known()[0], _LOOK_LIMIT_S, paths)
    finally:
        token.unlink()
    if problems := [f"{node}: {path}" for node, lacking in answers.said.items() for path in lacking]:
        raise SetupError.from_problems(
            "these files are not there on these nodes; mount the shared folder on every pod, and see that "
            "MAZE_MODEL_REPO or trainer.policy.model.path names the model:",
            problems,
        )
    return f"not every node answers: {'; '.join(answers.problems)}" if answers.problems else ""


def main(
    settings: Annotated[list[str], typer.Argument(help="The trainer's: +recipe=NAME key=value ...")],
    wait_s: Annotated[
        float, typer.Option(min=0, max=MOST_WAIT_S, help="How long to wait for the GPUs.")
    ] = 1800,
) -> None:
    """Wait until the Ray cluster here can run these settings.

    Example: python -m skyrl_maze.hyperpod.ready --wait-s 600 -- +recipe=maze run.id=second
    """
    from skyrl_maze import _compat

    _compat.install()
    from skyrl_maze.config import build_config

    try:
        wait(build_config(settings), wait_s)
    except SkyRLMazeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(exit_code(error)) from None


if __name__ == "__main__":
    typer.run(main)
