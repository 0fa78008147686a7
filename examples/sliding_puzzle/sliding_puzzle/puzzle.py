"""Boards of numbered tiles with one gap, and how the gap moves through them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

# What each word does to the gap, as (rows, columns).
SLIDES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


@dataclass(frozen=True)
class Board:
    """A square board: tiles 1 to size * size - 1, row by row, and 0 for the gap."""

    tiles: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.size < 2 or sorted(self.tiles) != list(range(self.size**2)):
            raise ValueError(f"no square board of 4 or more cells with the tiles 0 to n: {self.tiles}")

    @classmethod
    def solved(cls, size: int) -> "Board":
        """The tiles in their order, the gap last."""
        return cls((*range(1, size**2), 0))

    @classmethod
    def from_text(cls, text: str) -> "Board":
        """The board of a row of data; see `to_text`. Raises ValueError for any other text."""
        return cls(tuple(int(tile) for tile in text.split()))

    def to_text(self) -> str:
        """The tiles, row by row, with blanks between."""
        return " ".join(map(str, self.tiles))

    @property
    def size(self) -> int:
        """Cells along each side."""
        return int(len(self.tiles) ** 0.5)

    @property
    def is_solved(self) -> bool:
        """Whether all tiles are in their order."""
        return self.tiles == Board.solved(self.size).tiles

    @property
    def distance(self) -> int:
        """Cells that the tiles are from their places, row and column distances added up; 0 if solved."""
        places = ((index, tile - 1) for index, tile in enumerate(self.tiles) if tile)
        size = self.size
        return sum(abs(i // size - p // size) + abs(i % size - p % size) for i, p in places)

    def slide(self, word: str) -> "Board":
        """The board after the gap has moved one cell that way; the same board at the edge."""
        size, gap = self.size, self.tiles.index(0)
        row, col = gap // size + SLIDES[word][0], gap % size + SLIDES[word][1]
        if not (0 <= row < size and 0 <= col < size):
            return self
        tiles = list(self.tiles)
        tiles[gap], tiles[row * size + col] = tiles[row * size + col], 0
        return Board(tuple(tiles))


def within(size: int, slides: int) -> Iterator[Board]:
    """Every board that needs 1 to `slides` slides, each once, the nearest first."""
    seen = shell = {Board.solved(size)}
    for _ in range(slides):
        shell = {board.slide(word) for board in shell for word in SLIDES} - seen
        seen = seen | shell
        yield from sorted(shell, key=Board.to_text)


def draw(size: int, slides: int, count: int, seed: int) -> list[Board]:
    """`count` distinct boards that can be solved in `slides` slides; the same ones for the same arguments.

    Raises:
        ValueError: there are fewer.
    """
    boards = list(within(size, slides))
    if count > len(boards):
        raise ValueError(f"{len(boards)} boards of size {size} need at most {slides} slides, not {count}")
    return random.Random(seed).sample(boards, count)
