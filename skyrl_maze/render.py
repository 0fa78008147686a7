"""Pictures of a maze, as pixels, as PNG and as the data URI that a chat message carries.

A picture depends on the maze, the position, the theme and the cell size alone. It is made as an image of
palette indices, one byte a pixel, and becomes RGB, or a PNG of 2 bits a pixel, only at the end: that is what
keeps it cheap.
"""

import base64
import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from skyrl_maze.errors import MazeError, closest
from skyrl_maze.maze import Cell, Maze, is_int

MAX_SIDE_PX = 8192

_FLOOR, _WALL, _GOAL, _AGENT = range(4)


@dataclass(frozen=True)
class Mark:
    """How one kind of cell looks: its RGB colour, 0 to 255 each, and what to call it in a prompt."""

    colour: tuple[int, int, int]
    words: str


@dataclass(frozen=True)
class Theme:
    """The looks of a maze.

    Attributes:
        name: what it is chosen by.
        floor, wall, goal: marks that fill their cell.
        agent: the mark of the position, a disc over its cell.
        cell_px: side of a cell in pixels unless the caller says otherwise.
        min_cell_px, max_cell_px: what the caller may say.
        disc: first row, and column spans, of the agent's disc in a cell of `cell_px`, both inclusive; None
            for a disc of any size.
    """

    name: str
    floor: Mark
    wall: Mark
    goal: Mark
    agent: Mark
    cell_px: int
    min_cell_px: int
    max_cell_px: int
    disc: tuple[int, tuple[tuple[int, int], ...]] | None = None

    @property
    def palette(self) -> bytes:
        """The 4 colours as 12 bytes of RGB: floor, wall, goal, agent."""
        return bytes(self.floor.colour + self.wall.colour + self.goal.colour + self.agent.colour)


# Of VisGym's disc, in rows 6 to 17 of its cell.
_VISGYM_SPANS = ((10, 13), (9, 14), (8, 15), (7, 16), *[(6, 17)] * 4, (7, 16), (8, 15), (9, 14), (10, 13))

THEMES: Mapping[str, Theme] = MappingProxyType(
    {
        # A cell of 32 px is one vision token of Qwen3-VL (16 px patches, merged 2 by 2): nothing is resampled
        # and no token straddles two cells. Every two colours also differ well in lightness alone.
        "tokens": Theme(
            name="tokens",
            floor=Mark((240, 240, 240), "white"),
            wall=Mark((32, 32, 32), "black"),
            goal=Mark((230, 159, 0), "orange square"),
            agent=Mark((0, 92, 175), "blue disc"),
            cell_px=32,
            min_cell_px=4,
            max_cell_px=128,
        ),
        # The picture of VisGym's maze_2d, pixel for pixel.
        "visgym": Theme(
            name="visgym",
            floor=Mark((255, 255, 255), "white"),
            wall=Mark((169, 169, 169), "gray"),
            goal=Mark((255, 0, 0), "red square"),
            agent=Mark((0, 0, 255), "blue disc"),
            cell_px=25,
            min_cell_px=25,
            max_cell_px=25,
            disc=(6, _VISGYM_SPANS),
        ),
    }
)


def render(
    maze: Maze, position: Cell, theme: str = "tokens", cell_px: int | None = None
) -> NDArray[np.uint8]:
    """The picture of `maze` with the agent at `position`: uint8 [size * cell_px, size * cell_px, 3], RGB.

    Args:
        maze: the maze.
        position: an open cell `(row, col)`. On the goal, the disc lies over the goal's colour.
        theme: a name of `THEMES`.
        cell_px: side of a cell in pixels; the theme's own if None.

    Raises:
        MazeError: the position is not an open cell, or the theme or the cell size is not allowed.
    """
    picture = _indices(maze, position, theme, cell_px)
    palette = np.frombuffer(THEMES[theme].palette, dtype=np.uint8).reshape(4, 3)
    return palette.take(picture, axis=0)


def encode_png(maze: Maze, position: Cell, theme: str = "tokens", cell_px: int | None = None) -> bytes:
    """The picture of `render`, with its arguments and errors, as a PNG that decodes to the same pixels."""
    picture = _indices(maze, position, theme, cell_px)
    side_px = len(picture)
    image = Image.frombytes("P", (side_px, side_px), picture.tobytes())
    image.putpalette(THEMES[theme].palette)
    buffer = io.BytesIO()
    # 4 flat colours need 2 bits a pixel, and shrink to a few hundred bytes at any level.
    image.save(buffer, format="PNG", bits=2, compress_level=3)
    return buffer.getvalue()


def png_data_uri(maze: Maze, position: Cell, theme: str = "tokens", cell_px: int | None = None) -> str:
    """The PNG of `encode_png`, with the same arguments and errors, as `data:image/png;base64,...`."""
    png = encode_png(maze, position, theme, cell_px)
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def picture_side_px(size: int, theme: str = "tokens", cell_px: int | None = None) -> int:
    """Height and width, in pixels, of the picture of a maze of `size` cells a side.

    Raises:
        MazeError: the theme or the cell size is not allowed, or the picture would pass 8192 px a side.
    """
    if not isinstance(theme, str) or theme not in THEMES:
        names = " or ".join(repr(name) for name in THEMES)
        raise MazeError(f"cannot draw a maze in theme {theme!r}: choose {names}{closest(theme, THEMES)}")
    chosen = THEMES[theme]
    low, high = chosen.min_cell_px, chosen.max_cell_px
    px = chosen.cell_px if cell_px is None else cell_px
    if not is_int(px) or not low <= px <= high:
        allowed = f"an int from {low} to {high}" if low < high else f"{low}; {_resizable()} has other sizes"
        raise MazeError(f"cannot draw theme {theme!r} with cell_px {px!r}: it must be {allowed}")
    if size * px > MAX_SIDE_PX:
        raise MazeError(
            f"cannot draw a maze of size {size} with cell_px {px}: the picture has {size * px} px a side, "
            f"more than {MAX_SIDE_PX}; use a cell_px of at most {MAX_SIDE_PX // size}"
        )
    return int(size * px)


def _resizable() -> str:
    return " or ".join(repr(name) for name, theme in THEMES.items() if theme.min_cell_px < theme.max_cell_px)


def _indices(maze: Maze, position: Cell, theme: str, cell_px: int | None) -> NDArray[np.uint8]:
    """The picture as palette indices, uint8 [H, W], checked."""
    px = picture_side_px(maze.size, theme, cell_px) // maze.size
    row, col = maze.check_open(position)
    cells = maze.walls.astype(np.uint8)  # False and True are _FLOOR and _WALL
    cells[maze.goal] = _GOAL
    picture = cells.repeat(px, axis=1).repeat(px, axis=0)
    picture[row * px : (row + 1) * px, col * px : (col + 1) * px][_disc(theme, px)] = _AGENT
    return picture


@functools.lru_cache(maxsize=32)
def _disc(theme: str, px: int) -> NDArray[np.bool_]:
    """bool [px, px], True on the agent's disc within its cell; read-only."""
    if drawn := THEMES[theme].disc:
        disc = np.zeros((px, px), dtype=np.bool_)
        top, spans = drawn
        for row, (first, last) in enumerate(spans, start=top):
            disc[row, first : last + 1] = True
    else:
        # Pixels whose centre lies within 3/8 of a cell from the centre of the cell.
        offset = np.arange(px) + 0.5 - px / 2
        disc = offset[:, None] ** 2 + offset[None, :] ** 2 <= (3 * px / 8) ** 2
    disc.flags.writeable = False
    return disc
