"""Solved episodes to imitate: the shortest way, walked in the real environment, with mistakes if wanted.

A detour is a wrong turn that the demonstration takes on purpose, a step away from the goal or into a wall,
so that a policy sees what comes after its own mistakes (as DART does with noise: Laskey et al., "DART: noise
injection for robust imitation learning", CoRL 2017). The shortest way from wherever it led follows. Wrong
turns are marked, since they are there to be recovered from and not to be learnt.
"""

import dataclasses
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from skyrl_maze.actions import Action, best_action, format_action
from skyrl_maze.dataset import MazeSetSpec, draw_mazes, evaluation_keys, turns_needed
from skyrl_maze.env import MazeConfig, MazeEnv
from skyrl_maze.errors import ConfigError, DatasetError
from skyrl_maze.maze import Cell, Maze, Move, is_int
from skyrl_maze.pictures import Message, data_of, take_out


@dataclass(frozen=True)
class DemoSettings:
    """How episodes are demonstrated.

    Attributes:
        environment: the settings of the environment, as a recipe has them.
        max_turns: the turn budget, 1 or more.
        detours: chance, 0 to 1, that a turn is a wrong one, if the maze can still be solved after it.
        seed: of the detours.

    Raises:
        ConfigError: a value is not as above.
    """

    environment: MazeConfig
    max_turns: int
    detours: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = self.environment.problems()
        if not is_int(self.max_turns) or self.max_turns < 1:
            problems.append(f"max_turns = {self.max_turns!r}: must be an int of 1 or more")
        if not isinstance(self.detours, int | float) or not 0 <= self.detours <= 1:
            problems.append(f"detours = {self.detours!r}: must be a number from 0 (none) to 1 (all it can)")
        if problems:
            raise ConfigError.from_problems("cannot demonstrate episodes with these settings:", problems)


@dataclass(frozen=True)
class Demonstration:
    """A solved episode, or its beginning, as a chat that ends with an answer.

    Attributes:
        maze: the maze.
        goal_rule: what solves it.
        max_turns: the turn budget that it keeps.
        messages: user and assistant in turn. The content of a user's is a list of parts, of which
            `{"type": "image"}` is the place of a picture; that of an assistant's is the answer.
        pictures: PNG files, one for each message of a user.
        positions: where the agent stands in each picture, `(row, col)`.
        right: for each answer, whether it is the right one and so to be learnt, or a wrong turn.
    """

    maze: Maze
    goal_rule: str
    max_turns: int
    messages: tuple[Message, ...]
    pictures: tuple[bytes, ...]
    positions: tuple[Cell, ...]
    right: tuple[bool, ...]

    @property
    def wrong_turns(self) -> int:
        """How many answers are wrong turns."""
        return self.right.count(False)

    def up_to_each_answer(self) -> Iterator["Demonstration"]:
        """For each right answer the chat up to it."""
        for turn, right in enumerate(self.right, start=1):
            if right:
                yield dataclasses.replace(
                    self,
                    messages=self.messages[: 2 * turn],
                    pictures=self.pictures[:turn],
                    positions=self.positions[:turn],
                    right=self.right[:turn],
                )


class Demonstrations:
    """As many demonstrations as `mazes` says, made one by one; the same ones for the same arguments.

    Every maze is another, and none is of a shipped evaluation set. An episode depends on its maze, the
    settings and the seed alone.

    Args:
        mazes: sizes, count, seed and braid of the mazes; no shipped set.
        settings: how they are walked.
        held_out: keys of further mazes that shall not be shown, such as a recipe's evaluation set.

    Attributes:
        count: demonstrations in all.
        left_out: mazes passed over so far, because nobody can solve them within the turn budget.

    Raises:
        DatasetError: `mazes` names an evaluation set or is impossible. While they are made: the sizes hold
            fewer mazes that can be solved.
    """

    def __init__(self, mazes: MazeSetSpec, settings: DemoSettings, held_out: Iterable[str] = ()) -> None:
        if mazes.name:
            raise DatasetError(
                f"cannot demonstrate {mazes.name!r}: it is an evaluation set; give sizes and count"
            )
        if problems := mazes.problems():
            raise DatasetError(f"cannot draw mazes to demonstrate: {'; '.join(problems)}")
        self.count, self.left_out = mazes.count, 0
        self._mazes, self._settings = mazes, settings
        self._held_out = evaluation_keys() | set(held_out)

    def __iter__(self) -> Iterator[Demonstration]:
        self.left_out = 0
        try:
            for maze in draw_mazes(self._mazes, self._held_out, self._can_be_solved):
                yield demonstrate(maze, self._settings)
        except DatasetError as error:
            if not self.left_out:
                raise
            raise DatasetError(
                f"{error}; {self.left_out} that were drawn cannot be solved within "
                f"{self._settings.max_turns} turns, so raise max_turns"
            ) from error

    def _can_be_solved(self, maze: Maze) -> bool:
        fits = turns_needed(maze, self._settings.environment.goal_rule) <= self._settings.max_turns
        self.left_out += not fits
        return fits


def demonstrate(maze: Maze, settings: DemoSettings) -> Demonstration:
    """Walk `maze` to its end in a `MazeEnv`, whose words and pictures these are.

    Raises:
        DatasetError: the maze cannot be solved within the turn budget.
    """
    config = settings.environment
    needed = turns_needed(maze, config.goal_rule)
    if needed > settings.max_turns:
        raise DatasetError(
            f"cannot demonstrate the maze {maze.key}: it takes {needed} turns and max_turns is "
            f"{settings.max_turns}; raise max_turns or take another maze"
        )
    # Not the hash of the key, which differs from process to process.
    rng = random.Random(f"{settings.seed}/{maze.key}")
    env = MazeEnv(config, {"maze": maze.to_text(), "max_turns": settings.max_turns})
    chat, info = env.init()
    positions, right, done = [info["position"]], list[bool](), False
    while not done:
        action, is_right = _next_action(maze, positions[-1], settings, settings.max_turns - env.turns, rng)
        answer = format_action(action, config.grammar)
        step: dict[str, Any] = env.step(answer)
        chat += [{"role": "assistant", "content": answer}, *step["observations"]]
        positions.append(step["metadata"]["position"])
        right.append(is_right)
        done = step["done"]
    messages, urls = take_out(chat)
    return Demonstration(
        maze=maze,
        goal_rule=config.goal_rule,
        max_turns=settings.max_turns,
        messages=tuple(messages),
        pictures=tuple(map(data_of, urls)),
        positions=tuple(positions[:-1]),  # nothing is shown after the end
        right=tuple(right),
    )


def wrong_moves(maze: Maze, position: Cell) -> list[Move]:
    """The moves that lead no nearer to the goal, those into a wall included."""
    distance = maze.distance_to_goal
    return [move for move in Move if distance[maze.step(position, move)] >= distance[position]]


def _next_action(
    maze: Maze, position: Cell, settings: DemoSettings, turns_left: int, rng: random.Random
) -> tuple[Action, bool]:
    """The action of a turn, and whether it is the right one."""
    if rng.random() < settings.detours:
        rule = settings.environment.goal_rule
        affordable = [
            move
            for move in wrong_moves(maze, position)
            if turns_needed(maze, rule, maze.step(position, move)) < turns_left
        ]
        if affordable:
            return rng.choice(affordable), False
    return best_action(maze, position), True
