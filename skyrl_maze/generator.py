"""Rollouts: a multi-turn, multimodal generator for any skyrl_gym environment, token in and token out.

Every turn the engine gets the ids so far and the pictures; what it samples is appended as it is, then the new
observation, masked. So what is trained on is what was sampled, and a turn costs one picture.
"""

import asyncio
import contextvars
import functools
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

import torch
from loguru import logger
from skyrl.train.generators.base import (
    TRAINING_PHASE_TRAIN,
    GeneratorInput,
    GeneratorOutput,
    TrainingPhase,
    TrajectoryID,
)
from skyrl.train.generators.skyrl_gym_generator import TrajectoryOutput
from skyrl.train.generators.skyrl_vlm_generator import SkyRLVLMGymGenerator

from skyrl_maze.chat import ChatFormat
from skyrl_maze.engine import Engine
from skyrl_maze.errors import ConfigError
from skyrl_maze.faults import (
    EpisodeError,
    FaultInjector,
    RolloutConfig,
    Tally,
    answered,
    cause_of,
    logged_only,
    retrying,
)
from skyrl_maze.pictures import PLACE, Message
from skyrl_maze.player import PlayedEpisode, Player, new_env
from skyrl_maze.threads import CallThreads
from skyrl_maze.trajectory import RULES, Picture, Trajectory, broken_rules
from skyrl_maze.vision import BANNED_BIAS, context_window, model_config, vision_tokens, vocabulary_size

# The batch that runs in this context; the episodes of one `generate` share it.
_BATCH: contextvars.ContextVar["_Batch"] = contextvars.ContextVar("batch")


@dataclass
class EpisodeOutput(TrajectoryOutput):
    """SkyRL's trajectory, and what it does not keep."""

    chat: list[Message] = field(default_factory=list)
    """The conversation as people read it: texts, and each picture's size and hash."""
    masked_because: str | None = None
    """Why no gradient flows from it; None if one does."""
    adapter_version: str | None = None
    """The adapter that the engines served when it began, as `<step>.<attempt>`; None without one."""
    record: Any = None
    """What the environment keeps of it, see `PlayedEpisode.record`."""


@dataclass
class _Batch:
    tally: Tally
    outputs: list[EpisodeOutput] = field(default_factory=list)
    tasks: list["asyncio.Task[Any] | None"] = field(default_factory=list)
    over: bool = False

    def end(self) -> None:
        """Stop the episodes that still run after `generate` was given up; SkyRL leaves them alone."""
        self.over = True
        for task in self.tasks:
            if task is not None and not task.done():
                task.cancel()


class MazeVLMGenerator(SkyRLVLMGymGenerator):
    """SkyRL's multimodal generator with a history of ids instead of a conversation that is rendered anew.

    It knows no environment. Faults stay in their episode: it is masked, and counted under `generate/`.

    Args:
        model_path: folder of the model's config and image processor; by default where the tokenizer is from.
        notify: is told in a sentence what people should know; by default it is logged.
        observe: is shown each batch with its output, before the trainer is.

    Raises:
        ConfigError: the chat template does not let a conversation grow turn by turn.
    """

    def __init__(
        self,
        generator_cfg: Any,
        skyrl_gym_cfg: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        policy_model_name: str | None = None,
        model_path: str | None = None,
        notify: Callable[[str], None] = logger.info,
        observe: Callable[[GeneratorInput, GeneratorOutput], None] | None = None,
    ) -> None:
        super().__init__(generator_cfg, skyrl_gym_cfg, inference_engine_client, tokenizer, policy_model_name)
        self.adapter_version: str | None = None
        """What the engines serve, as `<step>.<attempt>`; the trainer sets it once that is proven."""
        model_path = model_path or getattr(tokenizer, "name_or_path", None)
        config = model_config(model_path)
        tokens = vision_tokens(tokenizer, config)
        self._rollouts, self._observe = RolloutConfig.of(generator_cfg), observe
        ids = range(vocabulary_size(tokenizer, config))
        self._image_id, self._banned_ids = tokens.image_id, tokens.banned_ids & frozenset(ids)
        chat = ChatFormat(
            tokenizer, self.custom_chat_template, generator_cfg.chat_template_kwargs, self._banned_ids
        )
        self._engine = Engine(
            inference_engine_client,
            policy_model_name,
            chat,
            tokens.image_id,
            model_path,
            getattr(getattr(config, "vision_config", None), "spatial_merge_size", None),
            len(ids),
            self._rollouts,
            notify,
        )
        self._player = Player(
            chat,
            self._engine,
            self._rollouts,
            FaultInjector(self._rollouts.fault_rate),
            CallThreads(skyrl_gym_cfg.max_env_workers),
            context_window(generator_cfg, config),
        )

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """SkyRL's batch of episodes, with more lists and the counts of what went wrong.

        `chats` holds each conversation as people read it, `masked_because` why an episode carries no gradient
        (None for those that do), `adapter_versions` what the engines served, `records` what the environment
        keeps of each (None where it keeps nothing), and `rollout_metrics` the counts under `generate/`, with
        the tokens sampled a second.

        Raises:
            RolloutError: more episodes were lost than `generator.rollouts.max_failed_share` allows.
        """
        batch = _Batch(Tally(episodes=len(input_batch["prompts"])))
        token, started_s = _BATCH.set(batch), time.monotonic()
        try:
            output = await super().generate(input_batch, disable_tqdm)
        finally:
            _BATCH.reset(token)
            batch.end()
        seconds = time.monotonic() - started_s
        # SkyRL keeps the lists of ids as they are and drops the rest, so a list tells its episode.
        episodes = {id(episode.response_ids): episode for episode in batch.outputs}
        ordered = [episodes[id(response_ids)] for response_ids in output["response_ids"]]
        output["chats"] = [episode.chat for episode in ordered]
        output["masked_because"] = [episode.masked_because for episode in ordered]
        output["adapter_versions"] = [episode.adapter_version for episode in ordered]
        output["records"] = [episode.record for episode in ordered]
        self._stand_ins(output, batch.tally)
        batch.tally.check(self._rollouts.max_failed_share)
        output["rollout_metrics"].update(batch.tally.metrics())
        sampled = sum(map(sum, output["loss_masks"]))
        # SkyRL averages over the batches of an evaluation what says mean in its name.
        output["rollout_metrics"]["generate/tokens_per_second_mean"] = sampled / seconds
        if self._observe is not None:
            self._observe(input_batch, output)
        return output

    async def agent_loop(
        self,
        prompt: list[Message],
        env_class: str,
        env_extras: dict[str, Any],
        max_tokens: int,
        max_input_length: int,
        sampling_params: dict[str, Any] | None = None,
        trajectory_id: TrajectoryID | None = None,
        cache_salt: str | None = None,
        training_phase: TrainingPhase = TRAINING_PHASE_TRAIN,
    ) -> EpisodeOutput:
        """One episode, whatever happens in it; see SkyRL's method of the same name."""
        started_s, adapter_version = time.monotonic(), self.adapter_version
        batch = _BATCH.get(None) or _Batch(Tally(episodes=1))
        if batch.over:
            raise asyncio.CancelledError
        batch.tasks.append(asyncio.current_task())
        tally = batch.tally
        session_id = trajectory_id.to_string() if trajectory_id is not None else uuid4().hex
        params = self._sampling_params(sampling_params, max_tokens)
        make_env = functools.partial(new_env, env_class, self.skyrl_gym_cfg, env_extras, self.max_turns)
        lost, episode = None, self._new_episode()
        try:
            async for attempt in retrying(self._rollouts, tally):
                with attempt:
                    episode = self._new_episode()
                    await self._player.play(
                        episode, prompt, make_env, params, max_input_length, session_id, cache_salt, tally
                    )
        except EpisodeError as fault:
            lost = (f"lost_{fault.kind}", str(fault))
        except ConfigError:
            raise
        except Exception as error:  # a fault of this package, which shall not cost the other episodes
            lost = ("lost_internal", f"internal: {cause_of(error)}")
            logger.error(f"an episode broke off in a way that was not foreseen:\n{traceback.format_exc()}")
        finally:
            with logged_only("finishing a session", logger.warning):
                await answered(self.inference_engine_client.finish_session(session_id), 30, "the router")
        if lost is None and (
            broken := broken_rules(episode.trajectory, episode.shown_urls, self._engine.merge)
        ):
            tally.counts.update(f"violation_{rule}" for rule in broken)
            lost = ("violations", "broken: " + "; ".join(RULES[rule] for rule in broken))
        output = self._output(episode, lost is None, params.get("logprobs") is not None)
        if lost is not None:
            output.masked_because = lost[1]
            tally.lost(*lost)
            logger.warning(f"episode {session_id} is masked: {lost[1]}")
        output.adapter_version = adapter_version
        output.e2e_time = time.monotonic() - started_s
        batch.outputs.append(output)
        return output

    def _new_episode(self) -> PlayedEpisode:
        return PlayedEpisode(Trajectory(self._image_id, self._banned_ids))

    def _sampling_params(self, given: dict[str, Any] | None, max_tokens: int) -> dict[str, Any]:
        """The parameters of a turn, with the ban; the caller's own are left as they are."""
        params = dict(asdict(self.generator_cfg.sampling_params) if given is None else given)
        params.pop("max_generate_length", None)
        params["max_tokens"] = params.get("max_tokens") or max_tokens
        # SkyRL asks for one token at least: then an answer could not begin with its end, and as with pictures
        # the trainer's policy would drift to what is never sampled.
        params["min_tokens"] = 0
        ban = {str(token): BANNED_BIAS for token in sorted(self._banned_ids)}
        if ban:
            params["logit_bias"] = {**(params.get("logit_bias") or {}), **ban}
        return params

    def _output(self, episode: PlayedEpisode, living: bool, with_logprobs: bool) -> EpisodeOutput:
        """The episode for the trainer; a lost one is its opening, with its pictures, and one masked token."""
        t = episode.trajectory
        response, mask, logprobs, rewards = t.response_ids, t.loss_mask, t.logprobs, t.rewards
        prompt_ids, pictures = t.prompt_ids, t.pictures
        if not living:
            response, mask, logprobs = [self._player.chat.end_of_turn_id], [0], [0.0]
            rewards = [sum(filter(math.isfinite, rewards))]
            pictures = [p for p, at in zip(t.pictures, t.offsets, strict=True) if at < len(t.prompt_ids)]
            if sum(token == self._image_id for token in t.prompt_ids) != sum(p.tokens for p in pictures):
                prompt_ids, pictures = [], []
        return EpisodeOutput(
            response_ids=response,
            reward=rewards,
            stop_reason=episode.stop_reason,
            loss_mask=mask,
            prompt_ids=prompt_ids,
            rollout_logprobs=logprobs if with_logprobs else None,
            env_metrics=episode.metrics,
            pixel_values=torch.cat([p.pixel_values for p in pictures]) if pictures else None,
            image_grid_thw=torch.tensor([p.grid for p in pictures]) if pictures else None,
            time_splits=episode.seconds,
            chat=episode.chat,
            record=episode.record,
        )

    def _stand_ins(self, output: GeneratorOutput, tally: Tally) -> None:
        """Give episodes that were lost before they opened a shortest prompt, in place.

        It holds a picture of another episode if there is one: SkyRL's trainer takes pictures from all samples
        of a batch or from none. So an episode without pictures among others with some is lost, too.
        """
        pixels, grids = output.get("pixel_values"), output.get("image_grid_thw")
        lender = next((i for i, values in enumerate(pixels or []) if values is not None), None)
        first: list[Picture] = []
        if lender is not None:
            grid = grids[lender][:1]
            patches, tokens = pixels[lender][: int(grid.prod())], self._engine.tokens_of(grid)
            first = [Picture("", tuple(grid[0].tolist()), tokens, patches)]
        for i, prompt_ids in enumerate(output["prompt_token_ids"]):
            lacks_pictures = pixels is not None and pixels[i] is None
            if prompt_ids and not lacks_pictures:
                continue
            if output["masked_because"][i] is None:
                tally.lost("lost_picture", "picture: an episode shows none, and others of its batch do")
                output["masked_because"][i] = "it shows no picture, and others of its batch do"
                self._mask(output, i)
            short = Trajectory(self._image_id)
            short.open(self._player.chat.opening([{"role": "user", "content": [PLACE] * len(first)}]), first)
            output["prompt_token_ids"][i] = short.prompt_ids
            if first:
                pixels[i], grids[i] = first[0].pixel_values, grid

    def _mask(self, output: GeneratorOutput, i: int) -> None:
        output["response_ids"][i], output["loss_masks"][i] = [self._player.chat.end_of_turn_id], [0]
        output["rewards"][i], output["env_metrics"][i] = [0.0], {}
        if output["rollout_logprobs"] is not None:
            output["rollout_logprobs"][i] = [0.0]
