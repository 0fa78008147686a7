"""One walk through one maze: what each action does to it. The only place where these rules are written."""

import enum
from dataclasses import dataclass

from skyrl_maze.actions import Action, GoalRule, Stop, checked_goal_rule
from skyrl_maze.errors import ConfigError, MazeError
from skyrl_maze.maze import Maze, is_int
from skyrl_maze.reward import RewardWeights, format_reward, quantize, shaping_reward, success_reward


class StopReason(enum.StrEnum):
    """Why an episode ended, if it did."""

    RUNNING = "running"  # It did not.
    GOAL = "goal"  # Solved, by the goal rule in force.
    STOPPED_EARLY = "stopped_early"  # The agent said stop elsewhere.
    OUT_OF_TURNS = "out_of_turns"  # The turn budget was spent.


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did.

    Attributes:
        reward: what it paid, a multiple of `reward.QUANTUM`.
        bumped: whether a wall was in the way of the move.
        terminated: whether it ended the episode by the rules of the maze.
        truncated: whether it was the last of the budget and left the episode unfinished.
    """

    reward: float
    bumped: bool
    terminated: bool
    truncated: bool


class Episode:
    """The state of a walk, and the rules by which it goes on and ends.

    Under goal rule `stop`, stop on the goal solves the maze; under `reach`, arriving does. Stop ends the
    episode under both, unsolved if not on the goal. A move into a wall leaves the agent where it is, as does
    an answer that was not understood; both cost a turn.

    Attributes:
        maze: the maze.
        position: where the agent stands, `(row, col)`.
        stop_reason: why the episode ended; `RUNNING` until then.
        turns: turns taken, of any kind.
        moves: turns that named a move, those into a wall included.
        wall_bumps: moves into a wall.
        parse_failures: turns whose answer was not understood.
        reached: whether the agent ever stood on the goal.

    Raises:
        ConfigError: the goal rule is unknown, or `max_turns` is neither None (no budget) nor 1 or more.
    """

    def __init__(self, maze: Maze, goal_rule: str, max_turns: int | None, weights: RewardWeights) -> None:
        if max_turns is not None and (not is_int(max_turns) or max_turns < 1):
            raise ConfigError(
                f"cannot start an episode with max_turns {max_turns!r}: give an int of 1 or more"
            )
        self.maze = maze
        self.position = maze.start
        self.stop_reason = StopReason.RUNNING
        self.turns = self.moves = self.wall_bumps = self.parse_failures = 0
        self.reached = False
        self._goal_rule = checked_goal_rule(goal_rule)
        self._max_turns = max_turns
        self._weights = weights

    @property
    def ended(self) -> bool:
        """Whether no turn may follow."""
        return self.stop_reason is not StopReason.RUNNING

    @property
    def turns_left(self) -> int | None:
        """Turns left of the budget; None without a budget."""
        return None if self._max_turns is None else self._max_turns - self.turns

    def take(self, action: Action | None) -> Turn:
        """Spend one turn on `action`; None is an answer that was not understood.

        Raises:
            MazeError: the episode has ended.
        """
        if self.ended:
            ended = f"the episode ended after {self.turns} ({self.stop_reason})"
            raise MazeError(f"cannot take turn {self.turns + 1}: {ended}; start a new one")
        before, bumps = self.position, self.wall_bumps
        self.turns += 1
        self._act(action)
        reward = shaping_reward(self._weights, self.maze, before, self.position)
        if self.ended:
            reward += success_reward(self._weights, self.stop_reason is StopReason.GOAL)
            reward += format_reward(self._weights, self.turns - self.parse_failures, self.turns)
        truncated = self.stop_reason is StopReason.OUT_OF_TURNS
        return Turn(quantize(reward), self.wall_bumps > bumps, self.ended and not truncated, truncated)

    def _act(self, action: Action | None) -> None:
        if action is None:
            self.parse_failures += 1
        elif isinstance(action, Stop):
            on_goal = self.position == self.maze.goal
            self.stop_reason = StopReason.GOAL if on_goal else StopReason.STOPPED_EARLY
        else:
            before, self.position = self.position, self.maze.step(self.position, action)
            self.moves += 1
            self.wall_bumps += self.position == before
            if self.position == self.maze.goal:
                self.reached = True
                if self._goal_rule is GoalRule.REACH:
                    self.stop_reason = StopReason.GOAL
        if not self.ended and self.turns_left == 0:
            self.stop_reason = StopReason.OUT_OF_TURNS

    def metrics(self) -> dict[str, float]:
        """The episode in numbers, all floats.

        `spl` is success weighted by path length, `success * shortest / max(moves, shortest)` (Anderson et
        al., "On evaluation of embodied navigation agents", 2018). Of the `stop_reason/...` entries exactly
        one is 1; `stop_reason/cut` is an episode that no rule of the maze has ended.
        """
        shortest = int(self.maze.distance_to_goal[self.maze.start])
        reasons = (StopReason.GOAL, StopReason.STOPPED_EARLY, StopReason.OUT_OF_TURNS)
        success = self.stop_reason is StopReason.GOAL
        truncated = self.stop_reason is StopReason.OUT_OF_TURNS
        return {
            "success": float(success),
            "reached": float(self.reached),
            "spl": success * shortest / max(self.moves, shortest),
            "turns": float(self.turns),
            "shortest_path": float(shortest),
            "parse_failures": float(self.parse_failures),
            "wall_bumps": float(self.wall_bumps),
            "terminated": float(self.ended and not truncated),
            "truncated": float(truncated),
            **{f"stop_reason/{reason}": float(self.stop_reason is reason) for reason in reasons},
            "stop_reason/cut": float(not self.ended),
        }
