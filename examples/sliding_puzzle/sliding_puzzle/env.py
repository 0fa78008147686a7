"""The puzzle as a SkyRL environment: text in, picture and text out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import registry
from skyrl_gym.metrics import default_aggregate_metrics

from sliding_puzzle.picture import data_uri
from sliding_puzzle.puzzle import SLIDES, Board

ENV_ID = "sliding_puzzle"
_ANSWER = re.compile(rf"\s*<slide>({'|'.join(SLIDES)})</slide>\s*")
_TASK = (
    "The picture shows a sliding puzzle of {size} by {size} cells: numbered tiles and one white gap. "
    "Move the gap until the tiles are in their order, row by row, with the gap in the last cell.\n\n"
    "Each turn shows you the board as it is then. Answer with one of {answers}: that way the gap moves. "
    "You have {max_turns} turns."
)

Message = dict[str, Any]  # {"role": ..., "content": ...}


@dataclass
class SlidingPuzzleConfig:
    """The section `environment.skyrl_gym.sliding_puzzle`."""

    cell_px: int = 64
    """Side of a cell in pixels; below 24 the tiles show their colours alone."""
    shaping_weight: float = 0.5
    """What coming nearer to the solution pays, as a share of what solving pays."""


def answer(word: str) -> str:
    """How an action is written: one of `SLIDES`."""
    return f"<slide>{word}</slide>"


class SlidingPuzzleEnv(BaseTextEnv):
    """One board, the same for every sample of a group.

    Args:
        env_config: a `SlidingPuzzleConfig`; None for the defaults.
        extras: the row's other columns: `board`, see `Board.to_text`, and `max_turns` from the generator.
    """

    def __init__(
        self, env_config: SlidingPuzzleConfig | None = None, extras: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.config, row = env_config or SlidingPuzzleConfig(), extras or {}
        self.board = self._first = Board.from_text(row["board"])
        self.max_turns = int(row["max_turns"])
        self.misunderstood = 0

    def init(self, prompt: list[Message] | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The messages that open the conversation; the row's prompt is a placeholder."""
        self.board, self.turns, self.misunderstood = self._first, 0, 0
        answers = ", ".join(map(answer, SLIDES))
        task = _TASK.format(size=self.board.size, answers=answers, max_turns=self.max_turns)
        return [self._shown(task)], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Read an answer and move the gap; an answer that is not exactly one action costs the turn."""
        self.turns += 1
        before, said = self.board, _ANSWER.fullmatch(action)
        if said:
            self.board = before.slide(said[1])
        else:
            self.misunderstood += 1
        # Potential-based, so that no detour pays (Ng, Harada and Russell, 1999).
        nearer = (before.distance - self.board.distance) / self._first.distance
        reward = float(self.board.is_solved) + self.config.shaping_weight * nearer
        done = self.board.is_solved or self.turns >= self.max_turns
        feedback = "" if said else "Your answer was not understood; write it as one of the four."
        return BaseTextEnvStepOutput(
            observations=[] if done else [self._shown(feedback)],
            reward=reward,
            done=done,
            metadata={},
            postprocessed_action=None,  # a text here would replace the tokens that the model sampled
        )

    def get_metrics(self) -> dict[str, float]:
        """Of the episode so far."""
        return {
            "success": float(self.board.is_solved),
            "turns": float(self.turns),
            "misunderstood": self.misunderstood / max(1, self.turns),
        }

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
        """The means over episodes; `solve_rate` is what the run's terminal, table and gauges show."""
        means: dict[str, float] = default_aggregate_metrics(metrics)
        return means | {"solve_rate": means["success"]}

    def _shown(self, text: str) -> Message:
        picture = {"type": "image_url", "image_url": {"url": data_uri(self.board, self.config.cell_px)}}
        return {"role": "user", "content": [picture, *([{"type": "text", "text": text}] if text else [])]}


def register() -> None:
    """Make the environment known to SkyRL; once more does nothing."""
    if ENV_ID not in registry:
        skyrl_gym.register(id=ENV_ID, entry_point="sliding_puzzle.env:SlidingPuzzleEnv")
