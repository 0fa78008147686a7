"""Commands that bring a trained adapter to where it is used: merged into its base, or published.

They raise the package's errors; the command that they are part of shows them.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn

from skyrl_maze.console import plain_console
from skyrl_maze.export import export_merged
from skyrl_maze.remote import MARKER, upload_adapter

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

# From this share on, rounding took a noticeable part of what was learnt.
_ROUNDING_TO_TELL = 0.1


@app.callback()
def _root() -> None:
    """Bring a trained LoRA adapter to where it is used."""


@app.command()
def export(
    base: Annotated[Path, typer.Option(metavar="MODEL", help="Folder of the model it was trained on.")],
    adapter: Annotated[Path, typer.Option(metavar="DIR", help="Folder with adapter_model.safetensors.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make; it must not exist.")],
) -> None:
    """Merge an adapter into its base: a whole model that transformers and vLLM load without LoRA.

    It needs no GPU, but room on the disk for a copy of the base.
    Sums are rounded to the base's dtype: bfloat16 loses a part, which is told.
    An engine that serves base and adapter together needs no export.

    Example: export --base Qwen3-VL-8B-Instruct --adapter step-120 --out maze-8b
    """
    with _bar("merging", MofNCompleteColumn()) as progress:
        report = export_merged(base, adapter, out, progress)
    print(f"model     {out}")
    print(f"merged    {report.merged_tensors} tensors in {report.shards} files")
    print(f"rounding  {report.rounding_share:.1%} of the update")
    if not report.update_norm:
        print("The adapter adds nothing: every B is zero, as before the first step of training.")
    elif report.rounding_share > _ROUNDING_TO_TELL:
        print("Rounding took much of the update: serve the adapter beside its base, or merge into float32.")


@app.command()
def upload(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the adapter.")],
    to: Annotated[str, typer.Option(metavar="ADDRESS", help="Where versions lie: s3://bucket/prefix.")],
    name: Annotated[str, typer.Option(help="Name of this version; one that exists is never overwritten.")],
) -> None:
    """Publish an adapter to S3 as a version of its own; the object COMPLETE says that all of it is there.

    COMPLETE comes last and lists every file; load no version without it.
    Credentials are those of the environment or of the machine's role.
    The driver for S3 comes with this package's extra s3.

    Example: upload step-120 --to s3://bucket/adapters --name maze-8b-step-120
    """
    with _bar("uploading", DownloadColumn()) as progress:
        where = upload_adapter(folder, to, name, progress)
    print(f"adapter   {where}")
    print(f"marker    {where}/{MARKER}")


@contextlib.contextmanager
def _bar(what: str, count: MofNCompleteColumn | DownloadColumn) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while it is a terminal, and nothing that stays there; yields what moves it."""
    console = plain_console(stderr=True)
    columns = (TextColumn(what), BarColumn(), count)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
