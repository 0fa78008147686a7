"""`skyrl-maze lora`: put the shards of a run's ranks together by hand, and check what was put together."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from skyrl_maze import complete, lora_export_cli, versions
from skyrl_maze.adapter import CONFIG_FILE, read_config
from skyrl_maze.console import plain_console
from skyrl_maze.merge import apply_merge, plan_merge
from skyrl_maze.shards import read_manifests

app = typer.Typer(no_args_is_help=True)
app.registered_commands += lora_export_cli.app.registered_commands


@app.callback()
def _root() -> None:
    """Merge, check, export and publish LoRA adapters. Example: skyrl-maze lora verify mine/versions/8.0"""


@app.command()
def merge(
    shards: Annotated[Path, typer.Argument(help="The folder with rank-00000.json and so on.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; must not exist.")],
    config: Annotated[
        Path | None,
        typer.Option(
            help=f"The adapter's {CONFIG_FILE}, from any step of the run; by default the one in SHARDS."
        ),
    ] = None,
    allow_vision: Annotated[
        bool, typer.Option("--allow-vision", help="Take matrices of the picture tower as well.")
    ] = False,
) -> None:
    """Make one adapter of the shards that all ranks wrote; PEFT and vLLM load OUT as it is.

    Every row must be there once and every byte as its rank wrote it, or nothing is made. OUT also gets
    COMPLETE, for `lora verify`.

    Example: skyrl-maze lora merge sync/mine/versions/8.0/shards adapter-8 --config adapter_config.json
    """
    settings = read_config(config or shards / CONFIG_FILE)
    plan = plan_merge(read_manifests(shards), allow_vision)
    columns = (TextColumn("merging"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns,
        console=plain_console(stderr=True),
        transient=True,
        disable=not _watched(),
    ) as bar:
        task = bar.add_task("", total=plan.bytes)
        made = versions.publish_folder(
            out,
            lambda folder: apply_merge(plan, shards, folder, settings, lambda n: bar.advance(task, n)),
            plan.run_id,
            plan.step,
            plan.attempt,
        )
    print(f"merged {len(plan.tensors)} matrices of {len(plan.manifests)} ranks into {out}")
    _describe(made)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A version of a run, or a folder that `lora merge` made.")],
) -> None:
    """Check every file of an adapter against the sizes and checksums in its COMPLETE.

    Example: skyrl-maze lora verify sync/mine/versions/8.0
    """
    inner = not os.path.lexists(folder / complete.COMPLETE) and os.path.lexists(
        folder.parent / complete.COMPLETE
    )
    place = folder.parent if inner else folder
    found = complete.verify(place)
    print(f"{place} is whole")
    _describe(found)


def _watched() -> bool:
    return sys.stderr.isatty()


def _describe(found: complete.Complete) -> None:
    print(f"run      {found.run_id}")
    print(f"step     {found.step}, attempt {found.attempt}")
    for file in found.files:
        print(f"file     {file.path}, {file.bytes:,} bytes, blake3 {file.blake3[:16]}")
