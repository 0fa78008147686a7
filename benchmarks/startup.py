"""How long commands take to answer, and what this package adds to the imports of a run's processes.

Seconds of a command are by the clock, from its start to its end; they depend on what else runs, so the
smallest is given too. Those of a process are of its CPU: first what it imports without this package, which is
SkyRL's own module or Ray, and then this package's module on top, in the same process and without garbage
collection.
"""

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

SKYRL_MAZE = Path(sysconfig.get_path("scripts")) / "skyrl-maze"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "skyrl-maze --help": [str(SKYRL_MAZE), "--help"],
    "skyrl-maze recipes show maze": [str(SKYRL_MAZE), "recipes", "show", "maze"],
}
# Process of a run -> (what it would import without this package, what this package has it import).
_SKYRL = "skyrl.backends.skyrl_train"
PROCESSES = {
    "trainer task": ("skyrl.train.entrypoints.main_base", "skyrl_maze.experiment"),
    "policy rank": (f"{_SKYRL}.workers.fsdp.fsdp_worker", "skyrl_maze.worker"),
    "merger": ("ray", "skyrl_maze.merger"),
    "vLLM worker": (f"{_SKYRL}.inference_servers.new_inference_worker_wrap", "skyrl_maze.applied_lora"),
}
# SkyRL's workers import flash_attn, which is not on the public index: something of that name stands there.
_IMPORTS = """
import gc, importlib.machinery, json, sys, time, types
for name in ("flash_attn", "flash_attn.bert_padding"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
    module.pad_input = module.unpad_input = None
gc.disable()
started_s = time.process_time()
import {base}
base_s, base_modules = time.process_time() - started_s, len(sys.modules)
import {ours}
ours_s, ours_modules = time.process_time() - started_s - base_s, len(sys.modules) - base_modules
print(json.dumps(dict(base_s=base_s, base_modules=base_modules, ours_s=ours_s, ours_modules=ours_modules)))
"""


def run(command: list[str]) -> str:
    """The last line that a command prints, with the compiled modules that `make setup` leaves."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed: {done.stderr[-2000:]}")
    return (done.stdout.splitlines() or [""])[-1]


def seconds_of(command: list[str], repeats: int) -> list[float]:
    """By the clock, after a run that is not counted."""
    run(command)
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run(command)
        seconds.append(time.perf_counter() - started_s)
    return seconds


def imports_of(base: str, ours: str, repeats: int) -> dict[str, Any]:
    """CPU seconds of each repeat, and numbers of modules."""
    code = _IMPORTS.format(base=base, ours=ours)
    found = [json.loads(run([sys.executable, "-c", code])) for _ in range(repeats + 1)][1:]
    return {
        "base": base,
        "ours": ours,
        **{key: [one[key] for one in found] for key in ("base_s", "ours_s")},
        **{key: found[0][key] for key in ("base_modules", "ours_modules")},
    }


def measured(repeats: int) -> dict[str, Any]:
    """All figures, by what was measured."""
    return {
        "repeats": repeats,
        "commands": {name: seconds_of(command, repeats) for name, command in COMMANDS.items()},
        "processes": {name: imports_of(*modules, repeats) for name, modules in PROCESSES.items()},
    }


def show(figures: dict[str, Any]) -> None:
    """Print two tables."""
    console = Console(highlight=False)
    commands = Table("command", "median", "min", title="Seconds until a command has answered")
    for name, seconds in figures["commands"].items():
        commands.add_row(name, *_cells(seconds))
    columns = ("process", "without us", "min", "modules", "ours on top", "min", "modules")
    processes = Table(*columns, title="Seconds of CPU for the imports of a process")
    for name, one in figures["processes"].items():
        cells = [(*_cells(one[f"{side}_s"]), str(one[f"{side}_modules"])) for side in ("base", "ours")]
        processes.add_row(name, *cells[0], *cells[1])
    console.print(commands, processes)


def _cells(seconds: list[float]) -> tuple[str, str]:
    return f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}"


def main(
    repeats: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Measure how long commands take to answer, and what this package adds to a process's imports."""
    figures = measured(repeats)
    show(figures)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
