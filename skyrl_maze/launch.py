"""The driver: check what can be checked, make what the run needs, start Ray, watch, report."""

import contextlib
import errno
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from skyrl_maze import _compat, console, cpu, recipes
from skyrl_maze.errors import LostNodeError, SkyRLMazeError, exit_code
from skyrl_maze.runlog import EventReader, read_metrics

if TYPE_CHECKING:
    import psutil

    from skyrl_maze.settings import TrainConfig

_POLL_S = 0.25
_ANSWER_LIMIT_S = 5.0
_USAGE = """\
Usage: skyrl.entrypoints.main_base +recipe=NAME [key=value ...]

Train a vision-language model on mazes with SkyRL's GRPO trainer. NAME is one of these, or the path of a file:

{recipes}

Any setting of SkyRL or of the recipe can follow, for example:

  skyrl.entrypoints.main_base +recipe=maze_cpu trainer.max_training_steps=2
  skyrl.entrypoints.main_base +recipe=maze run.id=second trainer.policy.optimizer_config.lr=3.0e-5

What a recipe is for and all it sets:  skyrl-maze recipes show NAME"""


def launch(argv: list[str]) -> int:
    """Run a command line to its end and return the exit code; every failure is one line on stderr.

    0: done. 1: the run failed. 2: it could not start. 75: nor could it yet. 130: interrupted.
    """
    if argv in ([], ["-h"], ["--help"]):
        print(_USAGE.format(recipes="\n".join(f"  {name}" for name in recipes.names())))
        return 0
    log: list[Path] = []
    try:
        _catch_signals()
        _run(argv, log)
    except (KeyboardInterrupt, SystemExit):  # Ray answers SIGTERM with the second while it starts
        return _fail("interrupted; all processes of the run are stopped", 130)
    except Exception as error:
        if isinstance(error, SkyRLMazeError) and not _while_running(error):
            return _fail(str(error), exit_code(error))
        if log:
            return _fail(f"{_cause(error)}; the whole story: {log[0].parent}", 1)
        if isinstance(error, ModuleNotFoundError):
            return _fail(f"{error} for {sys.executable}; run: pip install skyrl_maze, extra cpu or gpu", 2)
        return _fail(_cause(error), 1)
    return 0


def _while_running(error: SkyRLMazeError) -> bool:
    """Whether it is out of a Ray task, or of the cluster itself: not of what was asked for."""
    return hasattr(error, "cause") or isinstance(error, LostNodeError)


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _catch_signals() -> None:
    """Ctrl-C and SIGTERM end a run in the same way; also where a shell started it with Ctrl-C ignored."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _cause(error: BaseException) -> str:
    """What really went wrong, below the layers that Ray puts around it, in one line."""
    while True:
        if isinstance(inner := getattr(error, "cause", None), BaseException):
            error = inner
        elif error.__cause__ is not None and not isinstance(error, SkyRLMazeError):
            error = error.__cause__
        else:
            break
    if isinstance(error, SkyRLMazeError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = ""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        advice = "; free some space, or give another folder with run.root=..."
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}{advice}"


def _run(argv: list[str], log: list[Path]) -> None:
    with console.quiet_while("loading SkyRL and vLLM"):
        _compat.install()
        from skyrl_maze import preflight, task
        from skyrl_maze.config import build_config

        preflight.check_engine()
        cfg = build_config(argv)
        preflight.check_device(cfg)
        preflight.make_folders(cfg)
    for warning in task.of(cfg).warnings(cfg):
        print(f"warning: {warning}", file=sys.stderr)
    root = Path(cfg.run.root)
    with preflight.sole_run(root):
        recipes.record(argv, root)
        if cfg.run.console == "full":
            _train(cfg, console.plain_console())
            return
        log.append(root / console.LOG_FILE)
        with console.quiet_output(log[0]) as terminal:
            try:
                _train(cfg, terminal)
            except BaseException:
                traceback.print_exc()
                raise


def _train(cfg: "TrainConfig", terminal: Console) -> None:
    from skyrl_maze import preflight

    earlier_records = len(read_metrics(Path(cfg.run.root)))
    with console.Progress(terminal) as progress:
        _prepare(cfg, progress)
        if cfg.run.only_model:
            progress.done()
            terminal.print(f"model  {cfg.trainer.policy.model.path}")
            return
        progress.doing("checking whether the longest episode fits, and the adapter the engines")
        for warning in [*preflight.check_budget(cfg), *preflight.check_adapter(cfg)]:
            terminal.print(f"warning: {warning}")
        with _ray(cfg, progress):
            _watch(cfg, progress)
    terminal.print(console.summary(cfg, earlier_records))


def _prepare(cfg: "TrainConfig", progress: console.Progress) -> None:
    """Data sets and, where the task builds it, the model."""
    from skyrl_maze import task

    chosen = task.of(cfg)
    progress.doing("drawing the data sets")
    train, evaluation = chosen.write_data(cfg)
    cfg.data.train_data, cfg.data.val_data = [str(train)], [str(evaluation)]
    if path := chosen.build_model(cfg, progress):
        cfg.trainer.policy.model.path = cfg.trainer.ref.model.path = str(path)


@contextlib.contextmanager
def _ray(cfg: "TrainConfig", progress: console.Progress) -> Iterator[None]:
    """Ray as SkyRL starts it; on the way out nothing that it started is left."""
    import psutil
    import ray
    from skyrl.train.utils.utils import initialize_ray

    from skyrl_maze.settings import needed_gpus

    progress.doing("starting Ray")
    nodes = None
    try:
        if cfg.run.device == "cpu":
            cpu.prepare_environment()
            cpu.configure(cfg)
            if cfg.run.join_cluster:
                cpu.forward_environment()
            else:
                nodes = cpu.start_nodes(needed_gpus(cfg))
        initialize_ray(cfg)
        _catch_signals()  # Ray has put its own handlers, which abort the process, in their place
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C may not interrupt the cleaning up
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        if nodes is not None:
            nodes.shutdown()
        _, alive = psutil.wait_procs([p for p in started if not _is_of_python(p)], timeout=5)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)


def _is_of_python(process: "psutil.Process") -> bool:
    """Whether it is this process's own tracker, which ends with it, and complains if it is killed."""
    import psutil

    try:
        return process.ppid() == os.getpid() and "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _watch(cfg: "TrainConfig", progress: console.Progress) -> None:
    """Start the trainer task and show its events until it ends."""
    import ray

    from skyrl_maze.experiment import train

    progress.doing("starting the trainer")
    events = EventReader(Path(cfg.run.root))
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    task = train.remote(cfg)
    finished: list[Any] = []
    while not finished:
        finished, _ = ray.wait([task], timeout=_POLL_S)
        for event in events.new():
            progress.show(event)
    try:
        ray.get(task)
    except ray.exceptions.RayError as error:
        if lost := _lost(nodes):
            raise LostNodeError(
                f"{len(lost)} node(s) of the cluster were lost: {', '.join(lost)} ({_cause(error)}); "
                "with all nodes there again, the same command goes on from the last checkpoint"
            ) from error
        raise
    progress.done()


def _lost(nodes: list[dict[str, Any]]) -> list[str]:
    """Those of the nodes that no longer answer; Ray itself may take a minute to notice."""
    lost = []
    for node in nodes:
        address = node["NodeManagerAddress"]
        try:
            socket.create_connection((address, node["NodeManagerPort"]), timeout=_ANSWER_LIMIT_S).close()
        except OSError:
            lost.append(f"{address} ({node['NodeID'][:8]})")
    return lost
