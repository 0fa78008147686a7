"""Rollouts: SkyRL's multimodal generator, made safe against what a policy may sample."""

import dataclasses
from typing import Any

from loguru import logger
from skyrl.train.generators.skyrl_gym_generator import TrajectoryOutput
from skyrl.train.generators.skyrl_vlm_generator import SkyRLVLMGymGenerator

IMAGE_TOKEN = "<|image_pad|>"
VISION_TOKENS = (IMAGE_TOKEN, "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")


class _AnswersWithoutEndOfTurn:
    """An inference client whose texts do not end in the end-of-turn token.

    SkyRL puts the text into the conversation as it comes, and the chat template closes the turn once more.
    """

    def __init__(self, client: Any, end_of_turn: str) -> None:
        self._client = client
        self._end_of_turn = end_of_turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await self._client.generate(*args, **kwargs)
        return {**output, "responses": [text.removesuffix(self._end_of_turn) for text in output["responses"]]}


class MazeVLMGenerator(SkyRLVLMGymGenerator):
    """Bans tokens that stand for pictures, and never lets a damaged trajectory reach the trainer.

    A sampled image token has no picture behind it, and sampled tokens that re-tokenise to fewer ones shift
    the pictures that follow: the trainer stops at either.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        client = self.inference_engine_client
        self.inference_engine_client: Any = _AnswersWithoutEndOfTurn(client, self.tokenizer.eos_token)
        ids = self.tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
        known = {i for i in ids if i is not None and i != self.tokenizer.unk_token_id}
        self._ban = {str(token_id): -100.0 for token_id in sorted(known)}
        self._image_id = ids[0]

    async def agent_loop(
        self, *args: Any, sampling_params: dict[str, Any] | None = None, **kwargs: Any
    ) -> TrajectoryOutput:
        """SkyRL's loop with the ban in its sampling parameters, and its result checked."""
        if sampling_params is not None:
            bias = {**(sampling_params.get("logit_bias") or {}), **self._ban}
            sampling_params = {**sampling_params, "logit_bias": bias}
        output = await super().agent_loop(*args, sampling_params=sampling_params, **kwargs)
        if pictures_match(output, self._image_id):
            return output
        logger.warning("a trajectory holds image tokens without their pictures; it is masked")
        return masked(output, self.tokenizer.eos_token_id)


def pictures_match(output: TrajectoryOutput, image_id: int) -> bool:
    """Whether the sequence holds as many image tokens as its pictures fill.

    The first picture lies whole in the prompt, so it tells how many patches share a token.
    """
    if output.image_grid_thw is None:
        return image_id not in output.prompt_ids + output.response_ids
    patches = output.image_grid_thw.prod(dim=-1)
    in_prompt, in_response = output.prompt_ids.count(image_id), output.response_ids.count(image_id)
    return bool((in_prompt + in_response) * patches[0] == in_prompt * patches.sum())


def masked(output: TrajectoryOutput, end_of_turn_id: int) -> TrajectoryOutput:
    """The trajectory cut to its prompt and one token that no gradient flows from; return and metrics stay."""
    first = output.image_grid_thw[:1]
    return dataclasses.replace(
        output,
        response_ids=[end_of_turn_id],
        loss_mask=[0],
        reward=[float(sum(output.reward))],
        rollout_logprobs=None if output.rollout_logprobs is None else [0.0],
        pixel_values=output.pixel_values[: int(first.prod())],
        image_grid_thw=first,
    )
