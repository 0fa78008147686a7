"""Mazes on a square grid: what they are, how they are walked, how they are drawn from a seed.

A maze is a boolean grid (True = wall) with a closed border, a start and a goal. Cells are `(row, col)`,
row 0 on top. Everything here is a pure function of its arguments: no global random state is read or set.
"""

import enum
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from skyrl_maze.errors import MazeError

Cell = tuple[int, int]  # (row, col)

MIN_SIZE = 5
MAX_SIZE = 199


class Move(enum.IntEnum):
    """One step on the grid; the numbers are those of VisGym's `('move', n)` action."""

    RIGHT = 0
    UP = 1
    LEFT = 2
    DOWN = 3

    @property
    def delta(self) -> tuple[int, int]:
        """The change of `(row, col)`."""
        return _DELTAS[self]

    @property
    def word(self) -> str:
        """The move in lower case: `"right"`, `"up"`, `"left"` or `"down"`."""
        return _WORDS[self]


_DELTAS = ((0, 1), (-1, 0), (0, -1), (1, 0))
_WORDS = ("right", "up", "left", "down")


@dataclass(frozen=True, eq=False, repr=False)
class Maze:
    """A puzzle: walls, a start and a goal within its reach. Equal puzzles compare equal and hash alike.

    Attributes:
        walls: bool array [size, size], True = wall; size is odd, 5 to 199, and the border is all wall.
            A read-only copy is kept.
        start: the open cell `(row, col)` where an episode begins.
        goal: another open cell.

    Raises:
        MazeError: the walls, start and goal are not such a puzzle.
    """

    walls: NDArray[np.bool_]
    start: Cell
    goal: Cell

    def __post_init__(self) -> None:
        object.__setattr__(self, "walls", _checked_walls(self.walls))
        object.__setattr__(self, "start", self.check_open(self.start, "the start"))
        object.__setattr__(self, "goal", self.check_open(self.goal, "the goal"))
        if self.start == self.goal:
            raise MazeError(f"cannot put start and goal both at {self.start}: choose two different cells")
        if self.distance_to_goal[self.start] < 0:
            raise MazeError(
                f"cannot make a maze whose goal {self.goal} is walled off from its start {self.start}: "
                "open a way between the two"
            )

    @property
    def size(self) -> int:
        """Cells along each side, the border included."""
        return len(self.walls)

    @functools.cached_property
    def key(self) -> str:
        """32 hex digits that identify the puzzle: a hash of walls, start and goal."""
        return hashlib.blake2b(self.to_text().encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def distance_to_goal(self) -> NDArray[np.int32]:
        """int32 array [size, size]: moves from a cell to the goal, -1 on walls and where there is no way."""
        return _distances(self.walls, self.goal)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Maze) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Maze.from_text({self.to_text()!r})"

    def __reduce__(self) -> tuple[type["Maze"], tuple[NDArray[np.bool_], Cell, Cell]]:
        # Rebuilding keeps copies read-only; numpy's own pickles come back writable.
        return Maze, (self.walls, self.start, self.goal)

    def is_open(self, cell: Cell) -> bool:
        """Whether `cell` lies inside the grid and is not a wall."""
        row, col = cell
        return 0 <= row < self.size and 0 <= col < self.size and not self.walls[row, col]

    def check_open(self, cell: Any, what: str = "the position") -> Cell:
        """`cell` as a tuple of two ints; `what` names it in an error.

        Raises:
            MazeError: `cell` is not a pair of ints, or is a wall or outside the grid.
        """
        if not (isinstance(cell, tuple | list) and len(cell) == 2 and is_int(cell[0]) and is_int(cell[1])):
            raise MazeError(f"cannot put {what} at {_shown(cell)}: give a pair of ints (row, col)")
        row, col = int(cell[0]), int(cell[1])
        if not self.is_open((row, col)):
            inside = 0 <= row < self.size and 0 <= col < self.size
            found = "a wall" if inside else f"outside the {self.size}x{self.size} grid"
            raise MazeError(f"cannot put {what} at {(row, col)}: it is {found}; choose a floor cell")
        return row, col

    def step(self, position: Cell, move: Move) -> Cell:
        """The cell that `move` leads to from the open cell `position`; `position` itself at a wall.

        Raises:
            MazeError: `position` is not an open cell or `move` is not a `Move`.
        """
        row, col = self.check_open(position)
        if not isinstance(move, Move):
            allowed = ", ".join(f"Move.{name}" for name in Move.__members__)
            raise MazeError(f"cannot make the move {_shown(move)}: give one of {allowed}")
        d_row, d_col = move.delta
        # The border is all wall, so a neighbour of an open cell is always inside the grid.
        return (row, col) if self.walls[row + d_row, col + d_col] else (row + d_row, col + d_col)

    def shortest_path(self) -> list[Move]:
        """The moves of a shortest way from start to goal; of equally good moves, the lowest-numbered."""
        path: list[Move] = []
        position = self.start
        while position != self.goal:
            path.append(self.best_move(position))
            position = self.step(position, path[-1])
        return path

    def best_move(self, position: Cell) -> Move:
        """The next move of a shortest way from a floor cell that is not the goal; the lowest-numbered one."""
        distance = self.distance_to_goal
        return next(m for m in Move if distance[self.step(position, m)] < distance[position])

    @classmethod
    def from_rows(cls, rows: Sequence[str], start: Cell, goal: Cell) -> "Maze":
        """The maze drawn in `rows`, one string a row: `#` is wall, `.` is floor.

        Raises:
            MazeError: the rows are not a square of `#` and `.`, or do not make a valid maze.
        """
        return cls(_walls_from_rows(rows), start, goal)

    def to_rows(self) -> list[str]:
        """One string a row, top row first: `#` is wall, `.` is floor."""
        return ["".join("#" if wall else "." for wall in row) for row in self.walls.tolist()]

    @classmethod
    def from_text(cls, text: str) -> "Maze":
        """The inverse of `to_text`.

        Raises:
            MazeError: `text` is not rows of `#` and `.` joined by `/`, with one S and one G, or no maze.
        """
        if not isinstance(text, str):
            raise MazeError(f"cannot read a maze from {_shown(text)}: give the text of Maze.to_text()")
        if (text.count("S"), text.count("G")) != (1, 1):
            raise MazeError(
                f"cannot read a maze from {_shown(text)}: it has {text.count('S')} starts S and "
                f"{text.count('G')} goals G; mark exactly one of each"
            )
        rows = text.split("/")
        found = {char: (r, c) for r, row in enumerate(rows) for c, char in enumerate(row) if char in "SG"}
        floors = str.maketrans("SG", "..")
        return cls.from_rows([row.translate(floors) for row in rows], found["S"], found["G"])

    def to_text(self) -> str:
        """The whole puzzle on one line: the rows joined by `/`, with S at the start and G at the goal."""
        rows = [list(row) for row in self.to_rows()]
        for (row, col), mark in ((self.start, "S"), (self.goal, "G")):
            rows[row][col] = mark
        return "/".join("".join(row) for row in rows)


def generate_maze(size: int, seed: int, braid: float = 0.0) -> Maze:
    """A maze drawn from `seed` alone: every perfect maze of this size is equally likely.

    The rooms are the cells with odd row and odd col. A uniform spanning tree over them (Wilson, "Generating
    random spanning trees more quickly than the cover time", STOC 1996) gives the openings; start and goal are
    diagonally opposite corner rooms, one of the 4 ordered pairs. Two seeds may give the same maze: its `key`
    tells.

    Args:
        size: cells along each side, walls included; odd, 5 to 199.
        seed: a non-negative int.
        braid: share, 0 to 1, of the dead ends that get one more opening and so make loops; 0: a perfect maze.

    Raises:
        MazeError: an argument is not as above.
    """
    size = check_size(size)
    if not is_int(seed) or seed < 0:
        raise MazeError(f"cannot draw a maze from seed {_shown(seed)}: the seed must be an int of 0 or more")
    if not (is_int(braid) or isinstance(braid, float | np.floating)) or not 0 <= braid <= 1:
        allowed = "a number from 0 (no loops) to 1 (no dead ends)"
        raise MazeError(f"cannot draw a maze with braid {_shown(braid)}: give {allowed}")
    rng = np.random.default_rng(int(seed))
    side = size // 2
    walls = np.ones((size, size), dtype=np.bool_)
    walls[1::2, 1::2] = False
    for room, parent in enumerate(_uniform_spanning_tree(side, rng)):
        # Rooms r and p are two cells apart, the wall between them is at the mean of the two.
        walls[room // side + parent // side + 1, room % side + parent % side + 1] = False
    near, far = 1, size - 2
    corners = ((near, near), (near, far), (far, far), (far, near))
    corner = int(rng.integers(4))
    if braid:
        _open_dead_ends(walls, float(braid), rng)
    return Maze(walls, corners[corner], corners[(corner + 2) % 4])


def check_size(size: Any) -> int:
    """`size` as an int.

    Raises:
        MazeError: `size` is not an odd int from 5 to 199.
    """
    if is_int(size) and size % 2 and MIN_SIZE <= size <= MAX_SIZE:
        return int(size)
    nearby = f"; use {size - 1} or {size + 1}" if is_int(size) and MIN_SIZE < size < MAX_SIZE else ""
    allowed = f"an odd int from {MIN_SIZE} to {MAX_SIZE}"
    raise MazeError(f"cannot make a maze of size {_shown(size)}: the size must be {allowed}{nearby}")


def is_int(value: Any) -> TypeGuard[int]:
    """Whether `value` is a Python or numpy integer; a bool is not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """What an error says was given: the first 80 characters of the repr, and the type."""
    return f"{value!r:.80} ({type(value).__name__})"


def _uniform_spanning_tree(side: int, rng: np.random.Generator) -> list[int]:
    """The parent of each of the side * side rooms in a uniform spanning tree; the root is its own parent."""
    neighbours = _neighbours(side)
    draws = _draws(rng)
    root = side * side // 2
    parent = [root] * len(neighbours)
    in_tree = [False] * len(neighbours)
    in_tree[root] = True
    for first in range(len(neighbours)):
        # Remembering only the last exit of each room erases the loops of the walk.
        room = first
        while not in_tree[room]:
            choices = neighbours[room]
            parent[room] = choices[next(draws) % len(choices)]
            room = parent[room]
        room = first
        while not in_tree[room]:
            in_tree[room] = True
            room = parent[room]
    return parent


@functools.lru_cache(maxsize=8)
def _neighbours(side: int) -> tuple[tuple[int, ...], ...]:
    """The rooms beside each room of a side * side square, rooms numbered row by row."""

    def beside(row: int, col: int) -> tuple[int, ...]:
        cells = ((row + d_row, col + d_col) for d_row, d_col in _DELTAS)
        return tuple(r * side + c for r, c in cells if 0 <= r < side and 0 <= c < side)

    return tuple(beside(row, col) for row in range(side) for col in range(side))


def _draws(rng: np.random.Generator) -> Iterator[int]:
    """Endless uniform ints below 12, which 2, 3 and 4 divide: modulo any of these they stay uniform."""
    while True:
        yield from rng.integers(12, size=256).tolist()


def _open_dead_ends(walls: NDArray[np.bool_], braid: float, rng: np.random.Generator) -> None:
    """Open one more wall, in place, at `round(braid * n)` of the `n` dead ends, drawn at random.

    A dead end that an earlier opening already joined to its neighbour is left as it is.
    """

    def closed_sides(row: int, col: int) -> list[Cell]:
        return [(row + d_row, col + d_col) for d_row, d_col in _DELTAS if walls[row + d_row, col + d_col]]

    last = len(walls) - 1
    rooms = [(row, col) for row in range(1, last, 2) for col in range(1, last, 2)]
    dead_ends = [room for room in rooms if len(closed_sides(*room)) == 3]
    for index in rng.permutation(len(dead_ends))[: round(braid * len(dead_ends))].tolist():
        closed = closed_sides(*dead_ends[index])
        if len(closed) == 3:
            inner = [(row, col) for row, col in closed if 0 < row < last and 0 < col < last]
            walls[inner[int(rng.integers(len(inner)))]] = False


def _distances(walls: NDArray[np.bool_], goal: Cell) -> NDArray[np.int32]:
    """Moves to `goal` from each cell by breadth-first search, -1 where there is no way; read-only."""
    size = len(walls)
    is_wall = walls.ravel().tolist()
    distance = [-1] * len(is_wall)
    queue = [goal[0] * size + goal[1]]
    distance[queue[0]] = 0
    for cell in queue:  # grows while it is read
        for neighbour in (cell + 1, cell - size, cell - 1, cell + size):
            if not is_wall[neighbour] and distance[neighbour] < 0:
                distance[neighbour] = distance[cell] + 1
                queue.append(neighbour)
    result = np.array(distance, dtype=np.int32).reshape(size, size)
    result.flags.writeable = False
    return result


def _checked_walls(walls: Any) -> NDArray[np.bool_]:
    """A read-only copy of `walls`."""
    is_array = isinstance(walls, np.ndarray)
    if not is_array or walls.dtype != np.bool_ or walls.ndim != 2 or walls.shape[0] != walls.shape[1]:
        given = f"{walls.dtype} array of shape {walls.shape}" if is_array else _shown(walls)
        raise MazeError(f"cannot take walls from {given}: give a numpy bool array [size, size], True = wall")
    check_size(len(walls))
    border = walls.copy()
    border[1:-1, 1:-1] = True
    if not border.all():
        row, col = np.argwhere(~border)[0].tolist()
        raise MazeError(f"cannot make a maze with a gap in its border at {(row, col)}: close it with wall")
    copy: NDArray[np.bool_] = walls.copy()
    copy.flags.writeable = False
    return copy


def _walls_from_rows(rows: Any) -> NDArray[np.bool_]:
    """bool array [n, n] of a square of `#` and `.`."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, str) for row in rows):
        raise MazeError(f"cannot read a maze from {_shown(rows)}: give a list of strings, one a row")
    check_size(len(rows))
    for number, row in enumerate(rows):
        if strange := set(row) - set("#."):
            allowed = "'#' (wall) and '.' (floor)"
            raise MazeError(f"cannot read {min(strange)!r} in row {number}, {row!r:.80}: use only {allowed}")
        if len(row) != len(rows):
            raise MazeError(
                f"cannot read row {number}, {row!r:.80}, of {len(row)} characters, in a maze of {len(rows)} "
                "rows: make every row as long as there are rows"
            )
    return np.array([[char == "#" for char in row] for row in rows], dtype=np.bool_)
