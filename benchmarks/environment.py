"""CPU time of one turn of a maze episode: a step and its picture as a data URI, in every theme.

The same turns are also drawn with pillow alone, rectangle by rectangle on an RGB image that is saved with
pillow's default PNG settings. Both sides alternate within one process, so a busy machine slows both alike.

    python benchmarks/environment.py --size 9
"""

import base64
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
import typer
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from skyrl_maze.errors import MazeError
from skyrl_maze.maze import Cell, Maze, Move, generate_maze
from skyrl_maze.render import THEMES, encode_png, picture_side_px, png_data_uri, render

BATCH = 20  # turns per reading of the clock, whose own cost is about that of a step

Turn = tuple[Maze, Cell, Move]


def random_turns(size: int) -> Iterator[Turn]:
    """Endless random turns in mazes of seeds 0, 1, ...: a maze, a position in it, and the move made there."""
    rng = np.random.default_rng(0)
    for seed in itertools.count():
        maze = generate_maze(size, seed)
        position = maze.start
        for number in rng.integers(4, size=BATCH).tolist():
            yield maze, position, Move(number)
            position = maze.step(position, Move(number))


def redraw(maze: Maze, position: Cell, theme: str) -> str:
    """The picture drawn from nothing with pillow, as a data URI."""
    look = THEMES[theme]
    px = look.cell_px

    def box(row: int, col: int, inset: float = 0) -> tuple[float, float, float, float]:
        return col * px + inset, row * px + inset, (col + 1) * px - 1 - inset, (row + 1) * px - 1 - inset

    side_px = picture_side_px(maze.size, theme)
    image = Image.new("RGB", (side_px, side_px), look.floor.colour)
    draw = ImageDraw.Draw(image)
    for row, col in np.argwhere(maze.walls).tolist():
        draw.rectangle(box(row, col), fill=look.wall.colour)
    draw.rectangle(box(*maze.goal), fill=look.goal.colour)
    draw.ellipse(box(*position, inset=px / 4), fill=look.agent.colour)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def median_us(calls: dict[str, Callable[[Turn], object]], turns: list[Turn]) -> dict[str, float]:
    """Median CPU time of each call in microseconds; the calls take turns, a batch of turns each."""
    readings: dict[str, list[float]] = {name: [] for name in calls}
    for batch in itertools.batched(turns, BATCH):
        for name, call in calls.items():
            begin = time.process_time()
            for turn in batch:
                call(turn)
            readings[name].append((time.process_time() - begin) / len(batch) * 1e6)
    return {name: statistics.median(values) for name, values in readings.items()}


def measure(theme: str, turns: list[Turn]) -> dict[str, float]:
    """Median CPU time in microseconds of a turn, of its parts and of its plain pillow counterpart."""
    pngs = {(maze, position): encode_png(maze, position, theme) for maze, position, _ in turns}
    calls: dict[str, Callable[[Turn], object]] = {
        # The whole turn comes first, with caches cold from the pillow side: no flattery.
        "whole turn": lambda t: png_data_uri(t[0], t[0].step(t[1], t[2]), theme),
        "  step": lambda t: t[0].step(t[1], t[2]),
        "  picture and PNG": lambda t: encode_png(t[0], t[1], theme),
        "  base64": lambda t: base64.b64encode(pngs[t[:2]]).decode("ascii"),
        "render to RGB (no part of a turn)": lambda t: render(t[0], t[1], theme),
        "whole turn, plain pillow": lambda t: redraw(t[0], t[0].step(t[1], t[2]), theme),
    }
    return median_us(calls, turns)


def main(
    size: Annotated[int, typer.Option(help="Cells along each side of the mazes, odd.")] = 9,
    turns: Annotated[int, typer.Option(min=BATCH, help="Turns to time in each theme.")] = 4000,
) -> None:
    """Print the CPU time of one turn in every theme, beside the same turn drawn with pillow alone."""
    try:
        walked = list(itertools.islice(random_turns(size), turns))
    except MazeError as error:
        raise typer.BadParameter(str(error)) from error
    results = {theme: measure(theme, walked) for theme in THEMES}
    table = Table(title=f"CPU time in ms, median of {turns} turns in {size}x{size} mazes")
    table.add_column("")
    for theme in results:
        table.add_column(theme, justify="right")
    for part in next(iter(results.values())):
        table.add_row(part, *(f"{result[part] / 1000:.4f}" for result in results.values()))
    ratios = [result["whole turn, plain pillow"] / result["whole turn"] for result in results.values()]
    table.add_row("plain pillow / whole turn", *(f"{ratio:.1f}" for ratio in ratios))
    sizes = [statistics.median(len(encode_png(m, p, t)) for m, p, _ in walked) for t in results]
    table.add_row("PNG, bytes", *(f"{size_bytes:.0f}" for size_bytes in sizes))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
