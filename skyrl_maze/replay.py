"""An episode as an animated GIF: the picture before the first turn and after each."""

import io
from pathlib import Path

from PIL import Image

from skyrl_maze.dataset import write_whole
from skyrl_maze.maze import Maze
from skyrl_maze.records import EpisodeRecord
from skyrl_maze.render import render
from skyrl_maze.results import explained

FRAME_MS, LAST_FRAME_MS = 300, 1500


def encode_gif(record: EpisodeRecord, theme: str, cell_px: int | None = None) -> bytes:
    """The episode as a GIF that repeats, [size * cell_px, size * cell_px] pixels.

    Turns that move nothing hold the picture longer.

    Raises:
        MazeError: the theme or the cell size is not allowed.
    """
    maze = Maze.from_text(record.maze)
    positions = [maze.start, *(turn.position for turn in record.turns)]
    frames = [Image.fromarray(render(maze, position, theme, cell_px)) for position in positions]
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    buffer = io.BytesIO()
    first, *others = [frame.quantize(colors=4) for frame in frames]
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return buffer.getvalue()


def write_gif(folder: Path, record: EpisodeRecord, theme: str, cell_px: int | None = None) -> Path:
    """Write `encode_gif` as `<folder>/maze-INDEX.gif`, for samples after the first `maze-INDEX-SAMPLE.gif`.

    Raises:
        RecordError, SetupError: it cannot be written.
    """
    sample = f"-{record.sample}" if record.sample else ""
    path = folder / f"maze-{record.index:03d}{sample}.gif"
    data = encode_gif(record, theme, cell_px)
    with explained(f"write {path}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(data))
    return path
