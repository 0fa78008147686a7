"""What is kept of an evaluation: one record an episode, one summary of them all, and both as JSON.

A record is checked when it is read: the types, and then the story. Its actions are walked again through its
maze, so positions, bumps and the end must be what the rules of `episode` make of them.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from skyrl_maze.actions import ACTIONS, FailureReason, GoalRule
from skyrl_maze.episode import Episode, StopReason
from skyrl_maze.errors import MazeError, RecordError
from skyrl_maze.maze import Cell, Maze
from skyrl_maze.reward import RewardWeights

_STRICT = ConfigDict(strict=True, extra="forbid")
_ACTIONS = {action.word: action for action in ACTIONS}

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn.

    Attributes:
        text: the whole answer.
        action: `right`, `up`, `left`, `down` or `stop`; None if it was not understood.
        parse_failure: why it was not understood; None if it was.
        bumped: whether a wall was in the way.
        position: where the agent stands after it, `(row, col)`.
        reward: what it paid.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    text: str
    action: Annotated[str, Field(pattern=f"^({'|'.join(_ACTIONS)})$")] | None
    parse_failure: FailureReason | None
    bumped: bool
    position: Cell
    reward: FiniteFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """One episode.

    Attributes:
        index: number of its maze in the set, from 0.
        sample: number of the episode among those of the same maze, from 0.
        maze: the text of `Maze.to_text()`; the agent starts at its start.
        maze_key, size, shortest_path: what follows from it; the path is in moves.
        goal_rule, max_turns: the rules it was played by.
        stop_reason: why it ended; `RUNNING` if it was cut from outside.
        success: whether it counts as solved: it ended with `GOAL`, and nothing went wrong.
        return_: the sum of its rewards.
        seconds: how long it took; None if nobody looked.
        error: what went wrong outside of the maze, one line; such an episode counts as unsolved.
        turns: all that were taken.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal[1] = 1
    index: NonNegativeInt = 0
    sample: NonNegativeInt = 0
    maze: str
    maze_key: str
    size: PositiveInt
    shortest_path: PositiveInt
    goal_rule: GoalRule
    max_turns: PositiveInt
    stop_reason: StopReason
    success: bool
    return_: Annotated[FiniteFloat, Field(alias="return")]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    error: str | None = None
    turns: tuple[TurnRecord, ...]

    @property
    def moves(self) -> int:
        """Turns that named a move, those into a wall included; what `Episode.moves` counts."""
        return sum(turn.action not in (None, "stop") for turn in self.turns)

    @property
    def parse_failures(self) -> int:
        """Turns whose answer was not understood."""
        return sum(turn.action is None for turn in self.turns)

    @property
    def wall_bumps(self) -> int:
        """Moves into a wall."""
        return sum(turn.bumped for turn in self.turns)

    def failed(self, error: str) -> "EpisodeRecord":
        """The same episode with something gone wrong, `error` in one line."""
        return dataclasses.replace(self, success=False, error=_one_line(error))

    def played_as(self, index: int, sample: int, seconds: float | None) -> "EpisodeRecord":
        """The same episode with its place in the evaluation and its duration."""
        return dataclasses.replace(self, index=index, sample=sample, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Who played what, by which rules.

    Attributes:
        policy: the model's name, or that of a baseline.
        endpoint: where the model was asked, without credentials; None if not over HTTP from outside.
        step: of the training run; None outside of one.
        adapter: version of the adapter that was played, such as `12.0`; None if there is none.
        mazes: name of the set; None if it has none.
        goal_rule, max_turns, grammar, theme: see `env.MazeConfig`.
        temperature: of sampling; 0 for the likeliest answer each turn.
    """

    policy: str
    endpoint: str | None = None
    step: NonNegativeInt | None = None
    adapter: str | None = None
    mazes: str | None = None
    goal_rule: GoalRule
    max_turns: PositiveInt
    grammar: str
    theme: str
    temperature: FiniteFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveRate:
    """A share of solved episodes with its 95 % confidence interval."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    episodes: PositiveInt
    solve_rate: Share
    solve_rate_low: Share
    solve_rate_high: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRate(SolveRate):
    """The solve rate of all mazes of one size."""

    size: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRate(SolveRate):
    """The solve rate of all mazes with one length of the shortest path, in moves."""

    shortest_path: PositiveInt


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What `evaluate.figures` makes of the episodes; see there."""

    episodes: PositiveInt
    errors: NonNegativeInt
    solve_rate: Share
    solve_rate_low: Share
    solve_rate_high: Share
    spl: Share
    mean_excess_steps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    turns: NonNegativeInt
    parse_failures: NonNegativeInt
    wall_bumps: NonNegativeInt
    stop_reasons: dict[str, int]
    by_size: tuple[SizeRate, ...]
    by_shortest_path: tuple[PathRate, ...]


@dataclass(frozen=True, kw_only=True)
class Summary(Conditions, Figures):
    """An evaluation in figures, with its conditions."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal[1] = 1

    @classmethod
    def of(cls, conditions: Conditions, figures: Figures) -> "Summary":
        return cls(**vars(conditions), **vars(figures))

    @property
    def figures(self) -> Figures:
        """The figures alone."""
        return Figures(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Figures)})


_EPISODES, _SUMMARIES = TypeAdapter(EpisodeRecord), TypeAdapter(Summary)


def episode_line(record: EpisodeRecord) -> bytes:
    """The record as one line of JSON with its line end; ASCII, so that all agree on what a line is."""
    return _json(_EPISODES, record, None) + b"\n"


def summary_bytes(summary: Summary) -> bytes:
    """The summary as JSON."""
    return _json(_SUMMARIES, summary, 1) + b"\n"


def _json(adapter: TypeAdapter[Any], record: Any, indent: int | None) -> bytes:
    plain = adapter.dump_python(record, mode="json", by_alias=True)
    return json.dumps({"schema": 1, **plain}, indent=indent, allow_nan=False).encode("ascii")


def read_summary(data: bytes, where: str) -> Summary:
    """The inverse of `summary_bytes`.

    Args:
        data: what stands in the file.
        where: how an error names it.

    Raises:
        RecordError: it is no such summary.
    """
    return _parsed(_SUMMARIES, data, where)


def read_episode(line: bytes, where: str) -> EpisodeRecord:
    """The inverse of `episode_line`.

    Raises:
        RecordError: it is no such record, or the rules of the maze do not lead from its actions to its end.
    """
    record = _parsed(_EPISODES, line, where)
    if contradiction := _contradiction(record):
        raise RecordError(f"{where}: {contradiction}; it was damaged or edited")
    return record


def _parsed[Record](adapter: TypeAdapter[Record], data: bytes, where: str) -> Record:
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "json_invalid" else f", given {first['input']!r:.80}"
        raise RecordError(f"{where}: {place + ': ' if place else ''}{first['msg']}{given}") from error


def _contradiction(record: EpisodeRecord) -> str | None:
    """What in the record does not follow from its maze and actions; None if all does."""
    try:
        maze = Maze.from_text(record.maze)
        episode = Episode(maze, record.goal_rule, record.max_turns, RewardWeights())
        for number, turn in enumerate(record.turns, start=1):
            if (turn.action is None) == (turn.parse_failure is None):
                return f"turn {number} must have either an action or a parse failure"
            taken = episode.take(None if turn.action is None else _ACTIONS[turn.action])
            if taken.bumped != turn.bumped:
                return f"turn {number} bumps into a wall, or does not, and the record says otherwise"
            if episode.position != turn.position:
                return f"turn {number} leads to {episode.position}, and the record says {turn.position}"
    except MazeError as error:
        return str(error)
    follows = {
        "maze_key": maze.key,
        "size": maze.size,
        "shortest_path": int(maze.distance_to_goal[maze.start]),
        "stop_reason": episode.stop_reason,
        "success": episode.stop_reason is StopReason.GOAL and record.error is None,
    }
    for name, value in follows.items():
        if getattr(record, name) != value:
            return f"{name} is {getattr(record, name)!s}, and from maze and actions follows {value!s}"
    total = math.fsum(turn.reward for turn in record.turns)
    return None if math.isclose(total, record.return_, abs_tol=1e-9) else f"return is not the sum, {total}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500] or "no message"
