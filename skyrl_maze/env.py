"""The maze as a SkyRL environment: text in, picture and text out."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import registry
from skyrl_gym.metrics import default_aggregate_metrics

from skyrl_maze.actions import GoalRule, ParseFailure, checked_goal_rule, checked_grammar, parse_action
from skyrl_maze.episode import Episode, StopReason
from skyrl_maze.errors import ConfigError, MazeError, closest
from skyrl_maze.maze import MIN_SIZE, Maze, generate_maze, is_int
from skyrl_maze.prompt import action_feedback, load_template, observation_message, task_prompt, turn_text
from skyrl_maze.records import EpisodeRecord, TurnRecord
from skyrl_maze.render import picture_side_px, png_data_uri
from skyrl_maze.reward import RewardWeights, weight_problems

__all__ = ["ENV_ID", "MazeConfig", "MazeEnv", "StopReason", "register"]

ENV_ID = "maze"
_ENTRY_POINT = "skyrl_maze.env:MazeEnv"
_ROW_NEEDS = 'a row needs "maze" (the text of Maze.to_text()), or "seed" and "size" and optionally "braid"'

Message = dict[str, Any]  # {"role": ..., "content": ...}


@dataclass
class MazeConfig:
    """The section `environment.skyrl_gym.maze` of a SkyRL configuration.

    Attributes:
        theme: the looks of the picture, a name of `render.THEMES`.
        cell_px: side of a cell in pixels; the theme's own if None.
        grammar: how actions are written, an `actions.Grammar`.
        goal_rule: what solves the maze, an `actions.GoalRule`.
        success_weight: see `reward.RewardWeights`.
        format_weight: likewise.
        shaping_weight: likewise.
        feedback: whether each turn says what the last answer did.
        budget_note: whether each turn says how many turns are left.
        prompt_template: path of a file with the task's wording, see `prompt.load_template`; built-in if None.
    """

    # SkyRL's config builder recognises `Optional[...]`, not `... | None`.
    theme: str = "tokens"
    cell_px: Optional[int] = None  # noqa: UP045
    grammar: str = "tuple"
    goal_rule: str = "stop"
    success_weight: float = 1.0
    format_weight: float = 0.0
    shaping_weight: float = 0.0
    feedback: bool = True
    budget_note: bool = False
    prompt_template: Optional[str] = None  # noqa: UP045

    @classmethod
    def from_any(cls, value: "MazeConfig | Mapping[str, Any] | None") -> "MazeConfig":
        """A config from what a trainer holds: a `MazeConfig`, a mapping (OmegaConf's too) or None.

        Raises:
            ConfigError: another type, unknown keys or impossible values; lists every one.
        """
        if value is None or isinstance(value, cls):
            config, problems = value or cls(), []
        elif isinstance(value, Mapping):
            names = [field.name for field in dataclasses.fields(cls)]
            problems = [
                f"unknown key {key!r}{closest(key, names)} (allowed: {', '.join(names)})"
                for key in value
                if key not in names
            ]
            config = cls(**{name: value[name] for name in names if name in value})
        else:
            raise ConfigError(
                f"cannot read the maze settings from {type(value).__name__} {value!r}: "
                "give a MazeConfig, a mapping of its fields, or None for the defaults"
            )
        if problems := problems + config.problems():
            raise ConfigError.from_problems(
                "cannot use these settings of environment.skyrl_gym.maze:", problems
            )
        return config

    def problems(self) -> list[str]:
        """One line for each impossible value: the field, what is allowed, and the closest match."""
        checks = (
            lambda: picture_side_px(MIN_SIZE, self.theme, self.cell_px),
            lambda: checked_grammar(self.grammar),
            lambda: checked_goal_rule(self.goal_rule),
            lambda: self.prompt_template is None or load_template(self.prompt_template),
        )
        found = []
        for check in checks:
            try:
                check()
            except (ConfigError, MazeError) as error:
                found.append(str(error))
        weights = ("success_weight", "format_weight", "shaping_weight")
        found += weight_problems({name: getattr(self, name) for name in weights})
        found += [
            f"{name} = {getattr(self, name)!r}: must be true or false"
            for name in ("feedback", "budget_note")
            if not isinstance(getattr(self, name), bool)
        ]
        return found

    @property
    def weights(self) -> RewardWeights:
        """The three reward weights."""
        return RewardWeights(self.success_weight, self.format_weight, self.shaping_weight)


class MazeEnv(BaseTextEnv):
    """A maze to be walked by looking at it.

    Description:
        The agent sees a maze from above and walks from its start to its goal, one move a turn. Every
        environment built from the same data row holds the same maze, so all samples of a GRPO group face the
        same puzzle.

    Actions:
        Right, up, left, down or stop, written in the grammar of the configuration and read by
        `actions.parse_action`. An answer that is not exactly one action costs a turn and moves nothing.

    Observation:
        One user message: the picture of the maze as it is, then text. The first text is the task, later ones
        are feedback; each ends with the turns left if the configuration asks for it. None after the end.

    Reward:
        `success_weight * solved + format_weight * understood_turns / turns`, both at the end, plus
        `shaping_weight * (phi(s') - phi(s))` each turn; see `reward`. An optimal episode earns exactly
        `reward.max_return(weights)`.

    Termination:
        Terminated: stop, or under goal rule `reach` arriving at the goal. Truncated: turn `max_turns` ends
        without either. `StopReason` names them.

    Configuration:
        env_config: see `MazeConfig.from_any`.
        extras: the row's other columns: "maze" (the text of `Maze.to_text()`), or "seed" and "size" and
            optionally "braid"; and "max_turns", an int of 1 or more, which SkyRL's generator fills in.

    Raises:
        ConfigError: the configuration cannot be used, or `max_turns` is missing or not such an int.
        MazeError: the row holds no maze, or one that is not valid or too large for a picture.
    """

    def __init__(
        self,
        env_config: MazeConfig | Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        row = extras or {}
        self.config = MazeConfig.from_any(env_config)
        self.maze = _maze_of_row(row)
        self.max_turns = _max_turns_of_row(row)
        picture_side_px(self.maze.size, self.config.theme, self.config.cell_px)  # raises if it is too large
        self._episode = self._new_episode()
        self._started = False
        self._taken: list[TurnRecord] = []

    def init(self, prompt: list[Message] | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Start an episode.

        Args:
            prompt: the row's prompt. Its system messages are kept in front; all else in it is a placeholder.

        Returns:
            The messages that open the conversation, and information about the puzzle.
        """
        self._episode, self._started, self.turns = self._new_episode(), True, 0
        self._taken = []
        config = self.config
        task = task_prompt(
            self.maze.size,
            config.grammar,
            config.goal_rule,
            max_turns=self.max_turns,
            theme=config.theme,
            template_path=config.prompt_template,
        )
        system = [message for message in prompt or [] if message.get("role") == "system"]
        info = {"maze_key": self.maze.key, "position": self.maze.start}
        return [*system, self._observation(task)], info

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Read the model's answer `action` and spend one turn on it.

        `postprocessed_action` is always None: any text there would replace the tokens that the model sampled.

        Raises:
            MazeError: the episode has ended or was never started.
        """
        if not self._started:
            raise MazeError("cannot step: the episode has not begun; call init(prompt) first")
        episode = self._episode
        parsed = parse_action(action, self.config.grammar)
        understood = None if isinstance(parsed, ParseFailure) else parsed
        turn = episode.take(understood)
        self.turns = episode.turns
        failure = parsed.reason if isinstance(parsed, ParseFailure) else None
        word = None if understood is None else understood.word
        # A file of UTF-8 holds no half of a surrogate pair, which a model can write in JSON.
        said = action.encode("utf-8", "replace").decode("utf-8")
        self._taken.append(TurnRecord(said, word, failure, turn.bumped, episode.position, turn.reward))
        feedback = action_feedback(parsed, turn.bumped, self.config.grammar) if self.config.feedback else None
        return BaseTextEnvStepOutput(
            observations=[] if episode.ended else [self._observation(feedback)],
            reward=turn.reward,
            done=episode.ended,
            metadata={
                "terminated": turn.terminated,
                "truncated": turn.truncated,
                "position": episode.position,
                "stop_reason": str(episode.stop_reason),
                "action": word,
                "parse_failure": None if failure is None else str(failure),
            },
            postprocessed_action=None,
        )

    def record(self) -> EpisodeRecord:
        """The episode so far, for a file; at any time."""
        episode = self._episode
        return EpisodeRecord(
            maze=self.maze.to_text(),
            maze_key=self.maze.key,
            size=self.maze.size,
            shortest_path=int(self.maze.distance_to_goal[self.maze.start]),
            goal_rule=GoalRule(self.config.goal_rule),
            max_turns=self.max_turns,
            stop_reason=episode.stop_reason,
            success=episode.stop_reason is StopReason.GOAL,
            return_=math.fsum(turn.reward for turn in self._taken),
            turns=tuple(self._taken),
        )

    def get_metrics(self) -> dict[str, float]:
        """The metrics of the episode, see `Episode.metrics`; at any time, also after the end."""
        return self._episode.metrics()

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
        """The mean of each metric over the episodes that have it, and `solve_rate`, the mean of `success`."""
        means: dict[str, float] = default_aggregate_metrics(metrics)
        return means | {"solve_rate": means["success"]} if "success" in means else means

    def _new_episode(self) -> Episode:
        return Episode(self.maze, self.config.goal_rule, self.max_turns, self.config.weights)

    def _observation(self, text: str | None) -> Message:
        episode, config = self._episode, self.config
        note = episode.turns_left if config.budget_note else None
        picture = png_data_uri(self.maze, episode.position, config.theme, config.cell_px)
        return observation_message(turn_text(text, note), picture)


def register() -> None:
    """Make the environment known to SkyRL as `maze`; calling it again does nothing.

    Raises:
        ConfigError: another environment has that name.
    """
    known = registry.get(ENV_ID)
    if known is None:
        skyrl_gym.register(id=ENV_ID, entry_point=_ENTRY_POINT)
    elif known.entry_point not in (_ENTRY_POINT, MazeEnv):
        raise ConfigError(
            f"cannot register the environment {ENV_ID!r}: the name belongs to {known.entry_point!r}; "
            f"drop that registration with skyrl_gym.envs.deregister({ENV_ID!r})"
        )


def _maze_of_row(row: Mapping[str, Any]) -> Maze:
    # Columns that other rows of the table have arrive as None.
    text, seed, size = row.get("maze"), row.get("seed"), row.get("size")
    if text is not None:
        return Maze.from_text(text)
    if seed is None or size is None:
        given = ", ".join(repr(name) for name in row) or "nothing"
        raise MazeError(f"cannot find the maze of a data row with {given}: {_ROW_NEEDS}")
    braid = row.get("braid")
    return generate_maze(size, seed, 0.0 if braid is None else braid)


def _max_turns_of_row(row: Mapping[str, Any]) -> int:
    max_turns = row.get("max_turns")
    if not is_int(max_turns) or max_turns < 1:
        raise ConfigError(
            f"cannot start an episode with max_turns {max_turns!r}: extras must hold an int of 1 or more; "
            "SkyRL takes it from generator.max_turns"
        )
    return int(max_turns)
