"""Who answers: what a policy is shown each turn, and baselines that need no model."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from skyrl_maze.actions import ACTIONS, STOP, Action, GoalRule, best_action, format_action
from skyrl_maze.errors import ConfigError, closest
from skyrl_maze.maze import Cell, Maze, Move


@dataclass(frozen=True)
class Situation:
    """What there is to know before an answer.

    Attributes:
        messages: the conversation so far, pictures included; all that a model gets.
        maze, position: where the agent stands, for policies that need not look.
        goal_rule, grammar: what solves the maze, and how to say it.
        index, sample, turn: which maze, which episode of it, and how many turns were taken.
    """

    messages: Sequence[dict[str, Any]]
    maze: Maze
    position: Cell
    goal_rule: GoalRule
    grammar: str
    index: int
    sample: int
    turn: int


class Policy(Protocol):
    """Anything that answers."""

    async def answer(self, situation: Situation) -> str:
        """The whole text of an answer.

        Raises:
            EpisodeError: there is none; the episode is over.
            EndpointError: there will be none in any episode.
        """


def oracle(situation: Situation, _rng: random.Random) -> Action:
    """The next move of a shortest path, and stop at its end: what can be reached at best."""
    return best_action(situation.maze, situation.position)


def uniform(_situation: Situation, rng: random.Random) -> Action:
    """Any of the five actions, each as likely: what is reached without looking."""
    return rng.choice(ACTIONS)


def greedy_compass(situation: Situation, _rng: random.Random) -> Action:
    """The open neighbour nearest to the goal as the crow flies, and stop on the goal.

    It sees walls beside it and knows where the goal lies, but neither plans nor remembers.
    """
    maze, position = situation.maze, situation.position
    if position == maze.goal:
        return STOP

    def beeline(move: Move) -> int:
        row, col = maze.step(position, move)
        return abs(row - maze.goal[0]) + abs(col - maze.goal[1])

    return min((m for m in Move if maze.step(position, m) != position), key=beeline)


BASELINES: Mapping[str, Callable[[Situation, random.Random], Action]] = MappingProxyType(
    {"oracle": oracle, "random": uniform, "greedy-compass": greedy_compass}
)


class Baseline:
    """A policy of `BASELINES`; what it draws depends on the seed and on the turn, not on who plays beside.

    Raises:
        ConfigError: there is no baseline of that name.
    """

    def __init__(self, name: str, seed: int) -> None:
        if name not in BASELINES:
            raise ConfigError(
                f"unknown policy {name!r}; choose one of {', '.join(BASELINES)}{closest(name, BASELINES)}"
            )
        self._choose, self._seed = BASELINES[name], seed

    async def answer(self, situation: Situation) -> str:
        place = f"{self._seed} {situation.index} {situation.sample} {situation.turn}"
        return format_action(self._choose(situation, random.Random(place)), situation.grammar)
