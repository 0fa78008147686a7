"""Plays one episode: environment and policy in turn, until one of them ends it or the room is used up."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import skyrl_gym
from loguru import logger

from skyrl_maze.chat import ChatFormat
from skyrl_maze.engine import Engine, Reply
from skyrl_maze.faults import (
    EpisodeError,
    FaultInjector,
    RolloutConfig,
    Tally,
    cause_of,
    logged_only,
)
from skyrl_maze.pictures import Message, PictureError, readable, take_out
from skyrl_maze.threads import CallThreads
from skyrl_maze.trajectory import Picture, Trajectory

# What an environment that talks to others may see once and not again.
_PASSING = (ConnectionError, TimeoutError, EOFError, aiohttp.ClientError)


@dataclass
class PlayedEpisode:
    """What one attempt at an episode has come to."""

    trajectory: Trajectory
    chat: list[Message] = field(default_factory=list)
    """The conversation as people read it: texts, and each picture's size and hash."""
    shown_urls: list[str] = field(default_factory=list)
    """Addresses of the pictures that the environment showed."""
    stop_reason: str = "stop"
    metrics: dict[str, Any] = field(default_factory=dict)
    record: Any = None
    """What the environment's method `record` gives, if it has one; of a lost episode, as far as it came."""
    seconds: dict[str, float] = field(default_factory=lambda: {"llm": 0.0, "env": 0.0})
    """Time spent waiting for the engine and for the environment."""


@dataclass
class Player:
    """What the episodes of one generator share."""

    chat: ChatFormat
    engine: Engine
    config: RolloutConfig
    faults: FaultInjector
    threads: CallThreads
    """Where the environment runs."""
    window: int | None
    """Tokens that fit into the engine's context; None if unknown."""

    async def play(
        self,
        episode: PlayedEpisode,
        prompt: list[Message],
        make_env: Callable[[], Any],
        params: dict[str, Any],
        max_input_length: int,
        session_id: str,
        cache_salt: str | None,
        tally: Tally,
    ) -> None:
        """Fill `episode`; what it holds when an EpisodeError is raised is as far as it came."""
        env = await self._ask_env(episode, make_env)
        try:
            opening = await self._ask_env(episode, _opening, env, copy.deepcopy(prompt))
            ids, pictures = await self._seen(episode, opening, tally, self.chat.opening)
            episode.trajectory.open(ids, pictures)
            done = False
            while not done:
                room = self._room(len(episode.trajectory), params["max_tokens"], max_input_length)
                if room < 1:
                    self._end_for_length(episode, tally)
                    break
                started_s = time.monotonic()
                turn = {**params, "max_tokens": room}
                reply = await self.engine.sample(
                    episode.trajectory, turn, session_id, cache_salt, tally, self._engine_may_fail
                )
                episode.seconds["llm"] += time.monotonic() - started_s
                observations, done = await self._answer(episode, env, reply, tally)
                if not done:
                    ids, pictures = await self._seen(episode, observations, tally, self.chat.following)
                    longer = len(episode.trajectory) + episode.trajectory.expanded_length(ids, pictures)
                    if self._room(longer, 1, max_input_length) < 1:
                        del episode.shown_urls[len(episode.shown_urls) - len(pictures) :]
                        self._end_for_length(episode, tally)
                        break
                    episode.trajectory.observe(ids, pictures)
            episode.metrics = await self._ask_env(episode, _metrics, env)
        finally:
            if callable(getattr(env, "record", None)):
                with logged_only("asking an environment for its record", logger.warning):
                    episode.record = await self._ask_env(episode, env.record)
            with logged_only("closing an environment", logger.warning):
                await self._ask_env(episode, env.close)

    async def _answer(
        self, episode: PlayedEpisode, env: Any, reply: Reply, tally: Tally
    ) -> tuple[list[Message], bool]:
        """Append an answer, hand it to the environment, and return what that shows and whether it is over."""
        trajectory = episode.trajectory
        trajectory.sample(reply.ids, reply.logprobs, reply.prompt_ids)
        trajectory.close_turn(self.chat.end_of_turn_id, len(reply.ids))
        episode.stop_reason = reply.finish_reason
        if not trajectory.banned_ids.isdisjoint(reply.ids):
            return [], True  # a broken rule already; the next prompt would make no sense to the engine
        tally.counts["cut_answers"] += reply.finish_reason == "length"
        tally.counts["empty_answers"] += not reply.ids
        text = self.chat.text(reply.ids)
        episode.chat.append({"role": "assistant", "content": text})
        observations, reward, done = await self._ask_env(episode, self._step, env, text)
        trajectory.reward(reward)
        return observations, done

    def _step(self, env: Any, text: str) -> tuple[list[Message], float, bool]:
        self.faults.may_fail(lambda: RuntimeError("fails on purpose (generator.rollouts.fault_rate)"))
        step = env.step(text)
        reward, done = step["reward"], bool(step["done"])
        if not _is_amount(reward):
            raise EpisodeError("environment", f"the reward {str(reward)[:80]} is not a finite number")
        return [] if done else list(step["observations"]), float(reward), done

    def _engine_may_fail(self) -> None:
        self.faults.may_fail(lambda: ConnectionError("fails on purpose (generator.rollouts.fault_rate)"))

    def _room(self, length: int, wanted: int, max_input_length: int) -> int:
        """Tokens that may be sampled after `length` ids; 0 or less if the prompt is too long."""
        if length > max_input_length:
            return 0
        return wanted if self.window is None else min(wanted, self.window - length)

    def _end_for_length(self, episode: PlayedEpisode, tally: Tally) -> None:
        if not episode.trajectory.response_ids:
            episode.trajectory.close_turn(self.chat.end_of_turn_id, 0)
        episode.stop_reason = "length"
        tally.counts["too_long_prompts"] += 1

    async def _seen(
        self,
        episode: PlayedEpisode,
        messages: Sequence[Message],
        tally: Tally,
        as_ids: Callable[[Sequence[Message]], list[int]],
    ) -> tuple[list[int], list[Picture]]:
        """Messages of the environment as ids, one image token a picture, and those pictures."""
        try:
            emptied, urls = take_out(messages)
            episode.chat += readable(messages)
            ids = as_ids(emptied)
            places = sum(token == episode.trajectory.image_id for token in ids)
            if places != len(urls):
                raise PictureError(f"the chat template shows {places} of {len(urls)} pictures")
        except PictureError as error:
            raise EpisodeError("picture", str(error)) from error
        except Exception as error:
            raise EpisodeError("environment", f"its messages cannot be read: {cause_of(error)}") from error
        pictures = await self.engine.pictures(urls, tally)
        episode.shown_urls += urls
        return ids, pictures

    async def _ask_env(self, episode: PlayedEpisode, func: Callable[..., Any], *args: Any) -> Any:
        """A call of the environment, in a thread; EpisodeError for whatever goes wrong in it.

        A connection or a file that fails may work the next time; any other error is the environment's own.
        """
        started_s = time.monotonic()
        limit_s = self.config.env_timeout_s
        try:
            return await self.threads.run(func, *args, timeout_s=limit_s, who="the environment")
        except EpisodeError:
            raise
        except Exception as error:
            raise EpisodeError("environment", cause_of(error), isinstance(error, _PASSING)) from error
        finally:
            episode.seconds["env"] += time.monotonic() - started_s


def _opening(env: Any, prompt: list[Message]) -> list[Message]:
    messages, _ = env.init(prompt)
    return list(messages)


def _is_amount(reward: Any) -> bool:
    """Whether it is a finite number, of Python, numpy or torch."""
    try:
        return not isinstance(reward, str) and math.isfinite(float(reward))
    except (TypeError, ValueError, OverflowError):
        return False


def _metrics(env: Any) -> dict[str, Any]:
    return dict(env.get_metrics())


def new_env(env_class: str, skyrl_gym_cfg: Any, env_extras: dict[str, Any], max_turns: int) -> Any:
    """An environment as SkyRL makes it for one episode; the extras stay as they are."""
    extras = {**copy.deepcopy(env_extras), "max_turns": max_turns}
    return skyrl_gym.make(env_class, env_config=getattr(skyrl_gym_cfg, env_class, {}), extras=extras)
