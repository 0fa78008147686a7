"""Whether the longest episode fits: turns times picture, text and answer, against the engine's limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_maze import task
from skyrl_maze.chat import ChatFormat
from skyrl_maze.pictures import Message, take_out
from skyrl_maze.settings import TrainConfig


@dataclass(frozen=True)
class EpisodeBudget:
    """Tokens of the parts of an episode at their longest."""

    turns: int
    opening: int
    """Task, first picture and the start of the first answer."""
    observation: int
    """What one later turn shows, its picture included, and the start of the next answer."""
    answer: int
    """One answer with its end-of-turn token."""

    @property
    def longest_prompt(self) -> int:
        """Tokens that the engine is given in the last turn."""
        return self.opening + (self.turns - 1) * (self.observation + self.answer)

    @property
    def longest_episode(self) -> int:
        """Tokens of the whole episode."""
        return self.longest_prompt + self.answer

    def problems(self, window: int | None, max_input_length: int, pictures_allowed: int | None) -> list[str]:
        """What is too small, each with the value that would do."""
        parts = (
            f"{self.turns} turns can take {self.longest_episode} tokens (opening {self.opening}, then "
            f"{self.observation} a turn for picture and text, {self.answer} an answer)"
        )
        found = []
        if window is not None and self.longest_episode > window:
            found.append(
                f"{parts} and the engine's context holds {window}: raise "
                f"generator.inference_engine.engine_init_kwargs.max_model_len to {self.longest_episode}, or "
                "lower generator.max_turns or generator.sampling_params.max_generate_length"
            )
        if self.longest_prompt > max_input_length:
            found.append(
                f"{parts}, the last prompt {self.longest_prompt}: raise generator.max_input_length from "
                f"{max_input_length} to {self.longest_prompt}"
            )
        if pictures_allowed is not None and self.turns > pictures_allowed:
            found.append(
                f"{self.turns} turns show {self.turns} pictures: raise generator.inference_engine."
                f"engine_init_kwargs.limit_mm_per_prompt.image from {pictures_allowed} to {self.turns}"
            )
        return found


def longest_episode(cfg: TrainConfig, chat: ChatFormat, picture_tokens: Any) -> EpisodeBudget:
    """The budget of a run's longest episode.

    Args:
        cfg: the run's config.
        chat: the conversation's format.
        picture_tokens: tells how many tokens the picture at an address fills.
    """

    def tokens(messages: Sequence[Message], as_ids: Any) -> int:
        emptied, urls = take_out(messages)
        return len(as_ids(emptied)) + sum(int(picture_tokens(url)) - 1 for url in urls)

    generator, turns = cfg.generator, cfg.generator.max_turns
    longest = task.of(cfg).longest_messages(cfg)
    observations = [tokens(messages, chat.following) for messages in longest.observations]
    lengths = (
        generator.sampling_params.max_generate_length,
        generator.eval_sampling_params.max_generate_length,
    )
    return EpisodeBudget(turns, tokens(longest.opening, chat.opening), max(observations), max(lengths) + 1)
