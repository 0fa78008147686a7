"""Seconds, memory and bytes of a LoRA adapter's way to the engines and to disk, beside SkyRL's own.

The adapter is that of LoRA rank 32 on the language layers of Qwen3-VL-8B, split over six FSDP ranks, and
three ways are measured in one run:

- this package: all ranks write their rows in bfloat16 at once, then one process merges and publishes;
- a plain copy, with fsync, of the files that this makes, one after the other, and with the shards at once;
- SkyRL's worker: gathers every matrix on all ranks over gloo, writes float32 on one.

    python benchmarks/lora.py

Only the LoRA matrices hold values. The base stays on the meta device, without memory: nothing here reads it
but SkyRL's checkpoint, which is measured on a scaled-down model and computed from the shapes for the big one.
"""

import functools
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from lora_setup import QWEN3_VL_8B, SCALED_DOWN, SMALL, Process, Sizes, answer_calls
from rich.console import Console
from rich.table import Table

from skyrl_maze.adapter import WEIGHTS_FILE
from skyrl_maze.versions import Version, new_version

RUN_ID = "benchmark"
F32_BYTES = 4

Say = Callable[[str], None]


class Merging:
    """The merger in a process of its own, which knows how much memory it took."""

    def __init__(self) -> None:
        from skyrl_maze.merger import Merger

        self._merger = Merger(on_head=False)

    def merge(self, version: Version) -> int:
        """Merge and publish; returns by how many bytes resident memory rose above what it was before.

        VmHWM counts private pages and pages of files that are mapped, not those that the kernel keeps of
        files that are read or written: it may drop them at any time.
        """
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
        before = self._peak_bytes()
        self._merger.merge(version)
        return self._peak_bytes() - before

    @staticmethod
    def _peak_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def start_merging(connection: Connection) -> None:
    answer_calls(Merging(), connection)


class Bench:
    """The ranks and the merger, and what they are asked to do."""

    def __init__(self, sizes: Sizes, ranks: int, folder: Path) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        # One process imports PyTorch and SkyRL; the ranks are forked from it.
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload(["lora_rank"])
        self._folder = folder
        meeting = folder / "rendezvous"
        self._merging = Process(multiprocessing.get_context("spawn"), start_merging)
        self._ranks = [Process(forked, start_rank, sizes, rank, ranks, meeting) for rank in range(ranks)]
        for process in (self._merging, *self._ranks):
            process.answer()
        shapes = self.on_all("shapes")[0]
        self.base_parameters: int = shapes["base_parameters"]
        self.lora: dict[str, list[int]] = shapes["lora"]

    @property
    def lora_parameters(self) -> int:
        return sum(map(prod, self.lora.values()))

    def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Have all ranks do something together; what each answers."""
        for rank in self._ranks:
            rank.ask(method, *arguments)
        return [rank.answer() for rank in self._ranks]

    def share(self, step: int) -> tuple[Version, dict[str, float]]:
        """Shards, merge and publication of one version."""
        version = new_version(self._folder, RUN_ID, step)
        os.sync()
        shards_seconds = seconds_of(lambda: self.on_all("share", version))
        began = time.monotonic()
        self._merging.ask("merge", version)
        peak_bytes = self._merging.answer()
        return version, {
            "shards_seconds": shards_seconds,
            "merge_seconds": time.monotonic() - began,
            "peak_memory_bytes": peak_bytes,
        }

    def end(self) -> None:
        """Let all processes end."""
        for process in (self._merging, *self._ranks):
            process.hang_up()
        for process in (self._merging, *self._ranks):
            process.end()


def start_rank(*arguments: Any) -> None:
    import lora_rank

    lora_rank.start(*arguments)


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def copy(source: Path, folder: Path) -> None:
    """Copy a file, and bring it to disk."""
    target = folder / source.name
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def copy_version(version: Version, folder: Path) -> dict[str, float]:
    """Copy what a version consists of, one file after the other as `cp` does; its shards also at once."""
    os.sync()
    shards = sorted(version.shards.glob("*.safetensors"))
    seconds = {}
    for way in ("copy_shards_at_once", "copy_shards"):
        (folder / way).mkdir(parents=True)
        with ThreadPoolExecutor(len(shards) if way.endswith("at_once") else 1) as pool:
            work = functools.partial(copy, folder=folder / way)
            seconds[f"{way}_seconds"] = seconds_of(lambda: list(pool.map(work, shards)))  # noqa: B023
    seconds["copy_merged_seconds"] = seconds_of(lambda: copy(version.adapter / WEIGHTS_FILE, folder))
    return seconds


def bytes_of(folder: Path) -> int:
    """The size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def require_same(version: Version, stock: Path) -> None:
    """Refuse to compare two ways that did not bring the same matrices."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / WEIGHTS_FILE) for folder in (version.adapter, stock))
    differing = [name for name in theirs if name not in ours or (ours[name] != theirs[name].bfloat16()).any()]
    if differing or len(ours) != len(theirs):
        raise RuntimeError(f"SkyRL's adapter has other matrices: {differing or 'fewer'}")


def measure_sharing(bench: Bench, repeats: int, folder: Path, say: Say) -> dict[str, Any]:
    """This package and a plain copy in turn, then SkyRL's way once."""
    say("sharing and copying the adapter, unmeasured")
    version, _ = bench.share(0)
    copy_version(version, folder / "copy")
    measured = []
    for repeat in range(1, repeats + 1):
        say(f"sharing the adapter and copying the same bytes, {repeat} of {repeats}")
        # Each way first gives back what it wrote last, so that both find memory in the same state.
        shutil.rmtree(version.path)
        version, ours = bench.share(repeat)
        shutil.rmtree(folder / "copy")
        measured.append({**ours, **copy_version(version, folder / "copy")})
    say("SkyRL's way, once; about 15 s for the 8B shapes")
    os.sync()
    stock_seconds = seconds_of(lambda: bench.on_all("share_as_skyrl", folder / "stock"))
    require_same(version, folder / "stock")
    ours_seconds = [one["shards_seconds"] + one["merge_seconds"] for one in measured]
    copy_seconds = [one["copy_shards_seconds"] + one["copy_merged_seconds"] for one in measured]
    at_once = statistics.median(
        one["copy_shards_at_once_seconds"] + one["copy_merged_seconds"] for one in measured
    )
    seconds, seconds_of_copy = statistics.median(ours_seconds), statistics.median(copy_seconds)
    adapter_bytes = (version.adapter / WEIGHTS_FILE).stat().st_size
    peak_bytes = max(one["peak_memory_bytes"] for one in measured)
    return {
        "repeats": measured,
        "adapter_bytes": adapter_bytes,
        "bytes_written": bytes_of(version.path),
        "published_bytes": bytes_of(version.path) - bytes_of(version.shards),
        "seconds": seconds,
        "copy_seconds": seconds_of_copy,
        "seconds_ratio_to_copy": seconds / seconds_of_copy,
        "copy_at_once_seconds": at_once,
        "seconds_ratio_to_copy_at_once": seconds / at_once,
        "seconds_ratio_to_copy_of_each": [a / b for a, b in zip(ours_seconds, copy_seconds, strict=True)],
        "peak_memory_bytes": peak_bytes,
        "peak_memory_ratio_to_adapter": peak_bytes / adapter_bytes,
        "stock_seconds": stock_seconds,
        "stock_bytes_written": bytes_of(folder / "stock"),
        "stock_seconds_ratio_to_ours": stock_seconds / seconds,
    }


def stock_checkpoint_bytes(base_parameters: int, lora_parameters: int) -> int:
    """The tensors in SkyRL's checkpoint, all float32: base, LoRA, Adam's two moments, and LoRA once more."""
    return F32_BYTES * (base_parameters + (1 + 2 + 1) * lora_parameters)


def measure_checkpoints(bench: Bench, scaled: Sizes, published_bytes: int, folder: Path) -> dict[str, Any]:
    """This package's checkpoint, and SkyRL's: measured on a scaled-down model, computed for the large one."""
    bench.on_all("checkpoint", folder / "checkpoint")
    counts = bench.on_all("checkpoint_as_skyrl", folder / "stock-checkpoint", scaled)[0]
    ours = bytes_of(folder / "checkpoint")
    stock = stock_checkpoint_bytes(bench.base_parameters, bench.lora_parameters)
    return {
        "checkpoint_bytes": ours,
        "stock_checkpoint_bytes_computed_from_shapes": stock,
        "stock_scaled_down_bytes_measured": bytes_of(folder / "stock-checkpoint"),
        "stock_scaled_down_bytes_computed": stock_checkpoint_bytes(**counts),
        "checkpoint_bytes_ratio_stock_to_ours": stock / ours,
        # SkyRL's holds the adapter for engines too; here it is published beside the checkpoint.
        "checkpoint_and_published_bytes": ours + published_bytes,
        "checkpoint_and_published_bytes_ratio_stock_to_ours": stock / (ours + published_bytes),
    }


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Of this package's way and of the plain copy.")] = 9,
    ranks: Annotated[int, typer.Option(min=1, help="FSDP ranks.")] = 6,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to write, such as the shared file system; else a temporary one."),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="A tiny model: tries everything in seconds.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Compare sharing and saving a LoRA adapter with a plain copy and with SkyRL's own way."""
    console = Console()
    sizes, scaled = (SMALL, SMALL) if small else (QWEN3_VL_8B, SCALED_DOWN)
    with (
        tempfile.TemporaryDirectory(prefix="lora-benchmark-", dir=folder) as scratch,
        console.status("") as status,
    ):

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        say(f"starting {ranks} ranks and a merger")
        bench = Bench(sizes, ranks, Path(scratch))
        try:
            figures = {
                "base_parameters": bench.base_parameters,
                "lora_parameters": bench.lora_parameters,
                "lora_matrices": len(bench.lora),
                "lora_shapes": bench.lora,
                "ranks": ranks,
                "wire_dtype": "bfloat16",
                **measure_sharing(bench, repeats, Path(scratch), say),
            }
            say("writing checkpoints")
            figures |= measure_checkpoints(bench, scaled, figures["published_bytes"], Path(scratch))
        finally:
            bench.end()
    print_figures(console, figures)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def print_figures(console: Console, figures: dict[str, Any]) -> None:
    """A table of the repeats and one of the comparison."""
    each = Table("repeat", "shards", "merge", "copy of shards", "copy of merged", "ratio", title="Seconds")
    each.title_justify = "left"
    for number, one in enumerate(figures["repeats"]):
        seconds = [one[f"{part}_seconds"] for part in ("shards", "merge", "copy_shards", "copy_merged")]
        ratio = figures["seconds_ratio_to_copy_of_each"][number]
        each.add_row(str(number + 1), *(f"{value:.2f}" for value in seconds), f"{ratio:.2f}")
    console.print(each)
    title = (
        f"{figures['lora_matrices']} matrices of {figures['lora_parameters']:,} parameters in all, "
        f"{figures['ranks']} ranks"
    )
    table = Table("", "this package", "compared with", "", "ratio", title=title, title_justify="left")
    for row in comparison(figures):
        table.add_row(*row)
    console.print(table)


def comparison(figures: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """The rows of the comparison: what, ours, with what, theirs, ratio."""

    def mb(key: str) -> str:
        return f"{figures[key] / 1e6:,.2f} MB"

    def seconds(key: str) -> str:
        return f"{figures[key]:.2f} s"

    def ratio(key: str) -> str:
        return f"{figures[key]:.2f}"

    stock = "stock_checkpoint_bytes_computed_from_shapes"
    small = "stock_scaled_down_bytes"
    check = figures[f"{small}_measured"] / figures[f"{small}_computed"]
    bytes_ratio = figures["stock_bytes_written"] / figures["bytes_written"]
    rows = [
        ("shards and merge", seconds("seconds"), "plain copy with fsync", seconds("copy_seconds")),
        ("", "", "the same, shards at once", seconds("copy_at_once_seconds")),
        ("", "", "SkyRL over gloo", seconds("stock_seconds")),
        ("memory of the merge", mb("peak_memory_bytes"), "merged adapter", mb("adapter_bytes")),
        ("bytes written", mb("bytes_written"), "SkyRL", mb("stock_bytes_written")),
        ("checkpoint, measured", mb("checkpoint_bytes"), "SkyRL, computed from shapes", mb(stock)),
        ("  and the published adapter", mb("checkpoint_and_published_bytes"), "the same", mb(stock)),
        ("SkyRL's, scaled down: computed", mb(f"{small}_computed"), "measured", mb(f"{small}_measured")),
    ]
    ratios = [
        *map(ratio, ("seconds_ratio_to_copy", "seconds_ratio_to_copy_at_once")),
        *map(ratio, ("stock_seconds_ratio_to_ours", "peak_memory_ratio_to_adapter")),
        f"{bytes_ratio:.2f}",
        ratio("checkpoint_bytes_ratio_stock_to_ours"),
        ratio("checkpoint_and_published_bytes_ratio_stock_to_ours"),
        f"{check:.4f}",
    ]
    return [(*row, value) for row, value in zip(rows, ratios, strict=True)]


if __name__ == "__main__":
    typer.run(main)
