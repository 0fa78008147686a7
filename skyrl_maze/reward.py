"""What an episode earns: success, and optionally form and progress.

    return = success_weight * solved
           + format_weight  * (understood turns / turns)                         once, when the episode ends
           + shaping_weight * sum over turns of phi(s') - phi(s)

with `phi(s) = -min(d(s), d(start)) / d(start)` and `d` the length of a shortest path to the goal: a
potential difference (Ng, Harada and Russell, "Policy invariance under reward transformations", ICML 1999)
without discount. Its sum over any walk depends on the last cell alone, is never below 0 and never above the
weight: circles earn nothing.

Every amount is a multiple of `QUANTUM`, 2**-20. Such numbers add without rounding and so in any order, in
float32 while sums stay below 16. Equal episodes thus have returns equal to the last bit, and a group of them
has no advantage made of rounding noise.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from skyrl_maze.errors import ConfigError, RewardError
from skyrl_maze.maze import Cell, Maze

QUANTUM = 2.0**-20


@dataclass(frozen=True)
class RewardWeights:
    """How much each part counts; each a finite number of 0 or more.

    Attributes:
        success: paid when the maze is solved.
        format: paid at the end times the share of turns whose answer was understood.
        shaping: paid turn by turn for coming nearer to the goal.

    Raises:
        ConfigError: a weight is not such a number; names every one.
    """

    success: float = 1.0
    format: float = 0.0
    shaping: float = 0.0

    def __post_init__(self) -> None:
        if problems := weight_problems(asdict(self)):
            raise ConfigError.from_problems("these reward weights cannot be used:", problems)


def weight_problems(weights: Mapping[str, object]) -> list[str]:
    """One line for each named weight that is not a finite number of 0 or more."""
    return [
        f"{name} = {value!r}: must be a finite number of 0 or more"
        for name, value in weights.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf
    ]


def quantize(amount: float) -> float:
    """`amount` rounded to the nearest multiple of `QUANTUM`, ties to even.

    Raises:
        RewardError: the amount is not finite.
    """
    if not math.isfinite(amount):
        raise RewardError(f"cannot pay a reward of {amount!r}: it must be finite; lower the reward weights")
    # From 2**32 on, a float has no digits below the quantum.
    return float(amount) if abs(amount) >= 2.0**32 else round(amount / QUANTUM) * QUANTUM


def success_reward(weights: RewardWeights, solved: bool) -> float:
    """The weight if the episode is solved, else 0."""
    return quantize(weights.success) if solved else 0.0


def format_reward(weights: RewardWeights, understood_turns: int, turns: int) -> float:
    """The weight times the share of turns whose answer was understood.

    Raises:
        RewardError: the counts are not `0 <= understood_turns <= turns` with at least one turn.
    """
    if not 0 <= understood_turns <= turns or turns == 0:
        raise RewardError(
            f"cannot pay for {understood_turns} understood of {turns} turns: "
            "give at least one turn, and from none to all of them understood"
        )
    return quantize(weights.format * (understood_turns / turns))


def shaping_reward(weights: RewardWeights, maze: Maze, before: Cell, after: Cell) -> float:
    """The weight times `phi(after) - phi(before)`: positive for a step towards the goal."""
    return _potential(weights, maze, after) - _potential(weights, maze, before)


def max_return(weights: RewardWeights) -> float:
    """What an episode earns, exactly, that solves the maze with every answer understood."""
    return quantize(quantize(weights.success) + quantize(weights.format) + quantize(weights.shaping))


def _potential(weights: RewardWeights, maze: Maze, cell: Cell) -> float:
    """`weight * phi(cell)`, quantized here so that differences of it telescope without rounding."""
    farthest = int(maze.distance_to_goal[maze.start])
    return -quantize(weights.shaping * min(int(maze.distance_to_goal[cell]), farthest) / farthest)
