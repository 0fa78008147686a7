"""Whether one policy is better than another on the same mazes, or was only luckier."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from skyrl_maze.errors import RecordError

if TYPE_CHECKING:
    from skyrl_maze.records import EpisodeRecord

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class MazeOfBoth:
    """A maze and how often each policy solved it, as a share of its samples."""

    index: int
    maze_key: str
    shortest_path: int
    solved_a: float
    solved_b: float


@dataclass(frozen=True)
class Comparison:
    """Two evaluations maze by maze.

    Attributes:
        mazes: all of them, in the order of the set.
        p_value: chance of a difference in mazes at least this lopsided if neither policy is better.
    """

    mazes: tuple[MazeOfBoth, ...]
    p_value: float

    @property
    def better_a(self) -> list[MazeOfBoth]:
        """The mazes that A solved and B did not; with several samples, that A solved more often."""
        return [maze for maze in self.mazes if maze.solved_a > maze.solved_b]

    @property
    def better_b(self) -> list[MazeOfBoth]:
        """The mazes that B solved and A did not; with several samples, that B solved more often."""
        return [maze for maze in self.mazes if maze.solved_b > maze.solved_a]

    @property
    def is_real(self) -> bool:
        """Whether chance alone would do this in fewer than 5 % of comparisons."""
        return self.p_value < SIGNIFICANCE


def compare(a: Sequence["EpisodeRecord"], b: Sequence["EpisodeRecord"]) -> Comparison:
    """Compare two evaluations of the same mazes by the same rules.

    Raises:
        RecordError: mazes or rules differ.
    """
    mazes_a, mazes_b = _by_maze(a), _by_maze(b)
    if mazes_a.keys() != mazes_b.keys():
        lonely = min(mazes_a.keys() ^ mazes_b.keys())
        raise RecordError(
            f"cannot compare {len(mazes_a)} mazes with {len(mazes_b)}: maze {lonely + 1} was played in only "
            "one of the two; evaluate both on the same set"
        )
    found = []
    for index, first in sorted(mazes_a.items()):
        _refuse_other_rules(index, first[0], mazes_b[index][0])
        shares = (sum(r.success for r in records) / len(records) for records in (first, mazes_b[index]))
        found.append(MazeOfBoth(index, first[0].maze_key, first[0].shortest_path, *shares))
    wins_a = sum(maze.solved_a > maze.solved_b for maze in found)
    wins_b = sum(maze.solved_b > maze.solved_a for maze in found)
    return Comparison(tuple(found), sign_test(wins_a, wins_b))


def sign_test(wins_a: int, wins_b: int) -> float:
    """The two-sided p-value of the exact sign test: is a fair coin that lopsided?

    With one sample a maze this is McNemar's exact test: McNemar, "Note on the sampling error of the
    difference between correlated proportions or percentages", Psychometrika 12 (1947), 153-157. Over mazes,
    not episodes, because samples of one maze are not independent of each other.
    """
    decided = wins_a + wins_b
    tail: int = sum(math.comb(decided, k) for k in range(min(wins_a, wins_b) + 1))
    return min(1.0, float(Fraction(2 * tail, 1 << decided)))


def _by_maze(records: Sequence["EpisodeRecord"]) -> dict[int, list["EpisodeRecord"]]:
    found: dict[int, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        found[record.index].append(record)
    return dict(found)


def _refuse_other_rules(index: int, a: "EpisodeRecord", b: "EpisodeRecord") -> None:
    if a.maze_key != b.maze_key:
        raise RecordError(
            f"cannot compare: maze {index + 1} is {a.maze_key} in one and {b.maze_key} in the other; "
            "evaluate both on the same set, in the same order"
        )
    for name in ("goal_rule", "max_turns"):
        first, second = getattr(a, name), getattr(b, name)
        if first != second:
            raise RecordError(
                f"cannot compare: {name} is {first} in one and {second} in the other; "
                "evaluate both by the same rules"
            )
