"""The terminal of a run: what it does now, one line a step, and a table at the end.

SkyRL, Ray and vLLM print thousands of lines. With `run.console: progress` they go to a log file, and the
terminal shows the run's own events; with `full` everything is printed as it comes.
"""

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from skyrl_maze.errors import SkyRLMazeError
from skyrl_maze.runlog import METRICS_FILE, read_metrics
from skyrl_maze.versions import latest

if TYPE_CHECKING:
    from skyrl_maze.settings import TrainConfig

LOG_FILE = "logs/console.log"
_STEP_DONE = re.compile(r"\s*training step (\d+) of (\d+)\s+\d+\.\d s")


def plain_console(**options: Any) -> Console:
    """A console that shows text as it is given: paths and messages of others have brackets and colons too."""
    return Console(markup=False, emoji=False, highlight=False, **options)


@contextlib.contextmanager
def quiet_output(log_path: Path) -> Iterator[Console]:
    """Send what this process and its children print to `log_path`; yield a console on the real stdout."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal, stderr = os.dup(1), os.dup(2)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with os.fdopen(os.dup(terminal), "w", encoding="utf-8") as stream:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        try:
            yield plain_console(file=stream, soft_wrap=True)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(terminal, 1)
            os.dup2(stderr, 2)
            os.close(terminal)
            os.close(stderr)


@contextlib.contextmanager
def quiet_while(doing: str) -> Iterator[None]:
    """Show a spinner instead of what libraries print as they are imported, and that only if they fail."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            with quiet_output(log) as terminal, terminal.status(f"{doing} ..."):
                yield
        except SkyRLMazeError:  # says itself what is wrong
            raise
        except Exception:
            sys.stderr.write(log.read_text(errors="replace"))
            raise


class Progress:
    """Shows a run's events: a spinner for what goes on, a line for each thing done and for each step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._doing = ""
        self._since_s = time.monotonic()

    def __enter__(self) -> "Progress":
        self._status.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._status.stop()

    def doing(self, what: str) -> None:
        """A new activity begins; the one before is done."""
        if what == self._doing:
            return
        self._finish()
        self._doing, self._since_s = what, time.monotonic()
        self._status.update(f"{what} ...")

    def update(self, text: str) -> None:
        """More about the activity that goes on."""
        self._status.update(f"{self._doing}: {text}")

    def warming_up(self, step: int, steps: int) -> None:
        """The same, of a model that is taught."""
        self.update(f"warm-up step {step} of {steps}")

    def done(self) -> None:
        """Nothing goes on any more."""
        self._finish()
        self._doing = ""

    def show(self, event: dict[str, Any]) -> None:
        """One event of `runlog.RunLog`."""
        kind = event["event"]
        if kind == "starting_engines":
            self.doing(f"starting {event['engines']} vLLM engine(s)")
        elif kind == "loading_policy":
            self.doing(f"loading the policy on {event['ranks']} rank(s)")
        elif kind == "evaluating":
            self.doing(f"evaluating after step {event['step']}")
        elif kind == "training":
            self.doing(f"training step {event['step']} of {event['steps']}")
        elif kind == "measured":
            self._finish(_measured(event))
        elif kind == "note":
            self._console.print(f"  {event['text']}")
        elif kind == "saved":
            self._console.print(f"  saved step {event['step']}")

    def _finish(self, result: str = "") -> None:
        if self._doing:
            seconds = time.monotonic() - self._since_s
            self._console.print(f"  {self._doing:<42} {seconds:6.1f} s   {result}".rstrip())
            self._doing = ""


def step_done(line: str) -> tuple[int, int] | None:
    """The step, and the number of all, that a line of `Progress` tells to be done; None of other lines."""
    found = _STEP_DONE.match(line)
    return (int(found[1]), int(found[2])) if found else None


def _measured(event: dict[str, Any]) -> str:
    names = {
        "train/solve_rate": "solve rate",
        "eval/solve_rate": "evaluated",
        "reward/avg_raw_reward": "reward",
    }
    said = [f"{label} {event[name]:.3f}" for name, label in names.items() if name in event]
    if lost := event.get("generate/masked_episodes"):
        said.append(f"episodes lost {lost:.0f}")
    return "  ".join(said)


def summary(cfg: "TrainConfig", earlier_records: int = 0) -> Table:
    """The table at the end: solve rate before and after, steps, seconds a step, and where things lie.

    Args:
        cfg: the run's config.
        earlier_records: metric records that the folder held before this launch; they are left out.
    """
    root = Path(cfg.run.root)
    records = read_metrics(root, skip=earlier_records)
    evaluated = [r for r in records if "eval/solve_rate" in r]
    steps = [r for r in records if "timing/step" in r]
    table = Table(title="The run", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")  # a path that is cut cannot be copied
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        before = f"solve rate at step {first['step']}" if first["step"] else "solve rate before"  # it went on
        table.add_row(before, f"{first['eval/solve_rate']:.3f}")
        table.add_row("solve rate after", f"{last['eval/solve_rate']:.3f}")
    if steps:
        table.add_row("steps", str(steps[-1]["step"]))
        these = f" (of {len(steps)})" if len(steps) < steps[-1]["step"] else ""
        table.add_row("seconds per step", f"{sum(r['timing/step'] for r in steps) / len(steps):.1f}{these}")
    places = {
        "checkpoint": _latest_checkpoint(Path(cfg.trainer.ckpt_path)),
        "adapter": _latest_adapter(cfg),
        "metrics": root / METRICS_FILE,
        "logs": Path(cfg.trainer.log_path),
    }
    for name, path in places.items():
        table.add_row(name, str(path) if path and path.exists() else "none")
    return table


def _latest_adapter(cfg: "TrainConfig") -> Path | None:
    version = latest(Path(cfg.trainer.policy.model.lora.lora_sync_path), cfg.run.id)
    return version.adapter if version else None


def _latest_checkpoint(folder: Path) -> Path | None:
    latest = folder / "latest_ckpt_global_step.txt"
    return folder / f"global_step_{latest.read_text().strip()}" if latest.exists() else None
