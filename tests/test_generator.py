"""What the generator adds to SkyRL's: banned vision tokens, texts without an end-of-turn token, masking."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_maze import _compat

_compat.install()

from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import TrajectoryOutput  # noqa: E402
from skyrl.train.generators.skyrl_vlm_generator import SkyRLVLMGymGenerator  # noqa: E402

from skyrl_maze.generator import VISION_TOKENS, MazeVLMGenerator, masked, pictures_match  # noqa: E402

IMAGE, END = 7, 2


class Tokenizer:
    eos_token = "<|im_end|>"
    eos_token_id = END
    unk_token_id = 0

    def convert_tokens_to_ids(self, names: list[str]) -> list[int]:
        known = {"<|image_pad|>": IMAGE, "<|video_pad|>": 8, "<|vision_start|>": 9, "<|vision_end|>": 10}
        return [known.get(name, self.unk_token_id) for name in names]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _trajectory(prompt: list[int], response: list[int], grids: list[list[int]]) -> TrajectoryOutput:
    patches = sum(t * h * w for t, h, w in grids)
    return TrajectoryOutput(
        response_ids=response,
        reward=[0.0] * (len(response) - 1) + [0.75],
        stop_reason="stop",
        loss_mask=[1] * len(response),
        prompt_ids=prompt,
        rollout_logprobs=[-0.5] * len(response),
        env_metrics={"success": 1.0},
        pixel_values=torch.arange(patches * 3.0).reshape(patches, 3),
        image_grid_thw=torch.tensor(grids),
    )


def _generator(monkeypatch: pytest.MonkeyPatch, client: Any) -> MazeVLMGenerator:
    def init(
        self: Any, generator_cfg: Any, skyrl_gym_cfg: Any, inference_engine_client: Any, tokenizer: Any
    ) -> None:
        self.inference_engine_client, self.tokenizer = inference_engine_client, tokenizer

    monkeypatch.setattr(SkyRLVLMGymGenerator, "__init__", init)
    return MazeVLMGenerator(GeneratorConfig(), SkyRLGymConfig(), client, Tokenizer())


def test_pictures_match_counts_merged_patches() -> None:
    grids = [[1, 4, 4], [1, 4, 4]]  # 16 patches each, merged 2x2: 4 tokens
    good = _trajectory([1, IMAGE, IMAGE, IMAGE, IMAGE], [5, IMAGE, IMAGE, IMAGE, IMAGE, 5], grids)
    assert pictures_match(good, IMAGE)
    assert not pictures_match(_trajectory(good.prompt_ids, good.response_ids[:-2], grids), IMAGE)
    assert not pictures_match(_trajectory(good.prompt_ids, [*good.response_ids, IMAGE], grids), IMAGE)
    smaller = [[1, 4, 4], [1, 2, 2]]
    assert pictures_match(_trajectory(good.prompt_ids, [5, IMAGE, 5], smaller), IMAGE)


def test_a_masked_trajectory_keeps_return_metrics_and_first_picture() -> None:
    damaged = _trajectory([1, IMAGE], [5, 5, IMAGE], [[1, 2, 2], [1, 2, 2]])
    safe = masked(damaged, END)
    assert (safe.response_ids, safe.loss_mask, safe.rollout_logprobs) == ([END], [0], [0.0])
    assert safe.reward == [0.75]
    assert safe.env_metrics == {"success": 1.0}
    assert torch.equal(safe.image_grid_thw, torch.tensor([[1, 2, 2]]))
    assert torch.equal(safe.pixel_values, damaged.pixel_values[:4])
    assert pictures_match(safe, IMAGE)


def test_vision_tokens_are_banned_and_unknown_ones_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    async def agent_loop(
        self: Any, *args: Any, sampling_params: Any = None, **kwargs: Any
    ) -> TrajectoryOutput:
        asked.update(sampling_params)
        return _trajectory([1, IMAGE], [5, 5], [[1, 2, 2]])

    generator = _generator(monkeypatch, SimpleNamespace())
    monkeypatch.setattr(SkyRLVLMGymGenerator, "agent_loop", agent_loop)
    given = {"temperature": 1.0, "logit_bias": {"3": 1.0}}
    output = asyncio.run(generator.agent_loop([], "maze", {}, 8, 64, sampling_params=given))
    assert asked["logit_bias"] == {"3": 1.0, "7": -100.0, "8": -100.0, "9": -100.0, "10": -100.0}
    assert given == {"temperature": 1.0, "logit_bias": {"3": 1.0}}, "the caller's parameters are its own"
    assert output.response_ids == [5, 5]
    assert "<|vision_pad|>" in VISION_TOKENS


def test_a_damaged_trajectory_comes_back_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent_loop(self: Any, *args: Any, **kwargs: Any) -> TrajectoryOutput:
        return _trajectory([1, IMAGE], [5, IMAGE], [[1, 2, 2]])

    generator = _generator(monkeypatch, SimpleNamespace())
    monkeypatch.setattr(SkyRLVLMGymGenerator, "agent_loop", agent_loop)
    assert asyncio.run(generator.agent_loop([], "maze", {}, 8, 64)).loss_mask == [0]


def test_texts_lose_one_end_of_turn_and_the_client_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        weight_version = 3

        async def generate(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
            return {
                "responses": ["up<|im_end|>", "cut", "<|im_end|><|im_end|>"],
                "response_ids": [[1], [2], [3]],
            }

    client = _generator(monkeypatch, Client()).inference_engine_client
    output = asyncio.run(client.generate({}))
    assert output["responses"] == ["up", "cut", "<|im_end|>"]
    assert output["response_ids"] == [[1], [2], [3]]
    assert client.weight_version == 3
