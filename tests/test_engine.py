"""Rollouts against a real vLLM server on the CPU: what it samples, and what the trainer will see of it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import skyrl_gym
import torch

from skyrl_maze import _compat

_compat.install()

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.config.config import InferenceEngineConfig  # noqa: E402
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration  # noqa: E402

from benchmarks.generator import ENV, MAX_MODEL_LEN, Slides, server  # noqa: E402
from skyrl_maze.faults import RolloutConfig  # noqa: E402
from skyrl_maze.generator import MazeVLMGenerator  # noqa: E402
from skyrl_maze.tiny import save_random_model  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # Said by vLLM's decoder of tensors and by SkyRL's client when it sends them.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

TURNS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    save_random_model(folder, ["user assistant Where to?"])
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    skyrl_gym.register(id=ENV, entry_point=Slides)
    with server(model.parent, cache_gb=0.2, max_turns=TURNS) as (address, _):
        yield address
    skyrl_gym.envs.deregister(ENV)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


class Rollout:
    """One greedy episode, its conversation, and a client of the same server."""

    def __init__(self, url: str, tokenizer: Any, pictures: str) -> None:
        self.said: list[str] = []
        self.client = RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="base", tokenizer=tokenizer
        )
        # Letters, each a token of its own that merges with no other: re-tokenisation is the identity.
        letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "bcdfgjkmpqvxyz"]
        self.params = {
            "max_tokens": 6,
            "temperature": 0.0,
            "logprobs": 1,
            "allowed_token_ids": [*letters, tokenizer.eos_token_id],
        }
        config = GeneratorConfig(
            max_turns=TURNS,
            max_input_length=MAX_MODEL_LEN,
            inference_engine=InferenceEngineConfig(engine_init_kwargs={"max_model_len": MAX_MODEL_LEN}),
        )
        config.rollouts = RolloutConfig(pictures=pictures, retries=0)
        self.generator = MazeVLMGenerator(
            config, SkyRLGymConfig(), self.client, tokenizer, notify=self.said.append
        )

    async def __aenter__(self) -> "Rollout":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.client.teardown()

    async def play(self) -> dict[str, Any]:
        batch = {
            "prompts": [[]],
            "env_classes": [ENV],
            "env_extras": [{"episode": 0, "turns": TURNS}],
            "sampling_params": self.params,
        }
        return await self.generator.generate(batch, disable_tqdm=True)


def test_files_and_tensors_give_the_same_rollout(url: str, tokenizer: Any) -> None:
    async def both() -> list[Any]:
        results = []
        for pictures, how in (("auto", "as files"), ("tensors", "as tensors")):
            async with Rollout(url, tokenizer, pictures) as rollout:
                results.append(await rollout.play())
                assert how in rollout.said[0]
        return results

    files, tensors = asyncio.run(both())
    for key in ("prompt_token_ids", "response_ids", "loss_masks"):
        assert files[key] == tensors[key]
    assert files["rollout_logprobs"][0] == pytest.approx(tensors["rollout_logprobs"][0], abs=1e-5)
    for key in ("pixel_values", "image_grid_thw"):
        assert torch.equal(files[key][0], tensors[key][0])


def test_every_turn_equals_a_full_render_of_the_conversation(url: str, tokenizer: Any) -> None:
    async def replay(rollout: Rollout) -> None:
        output = await rollout.play()
        [prompt], [response], [mask] = (
            output[key] for key in ("prompt_token_ids", "response_ids", "loss_masks")
        )
        [logprobs] = output["rollout_logprobs"]
        env = Slides(extras={"episode": 0, "turns": TURNS})
        messages, _ = env.init([])
        position = 0
        for _ in range(TURNS):
            rendered = await rollout.client.render_chat_completion(
                {"json": {"model": "base", "messages": messages}}
            )
            assert rendered["token_ids"] == prompt + response[:position]
            again = await rollout.client.generate(
                {
                    "prompt_token_ids": [rendered["token_ids"]],
                    "mm_features": [rendered["features"]],
                    "sampling_params": {**rollout.params, "logit_bias": None},
                }
            )
            sampled = again["response_ids"][0]
            assert response[position : position + len(sampled)] == sampled
            assert mask[position : position + len(sampled)] == [1] * len(sampled)
            said = logprobs[position : position + len(sampled)]
            assert said == pytest.approx(again["response_logprobs"][0], abs=1e-5)
            text = tokenizer.decode(sampled, skip_special_tokens=True)
            messages += [{"role": "assistant", "content": text}, *env.step(text)["observations"]]
            position = _start_of_answer(mask, env.turns)

    async def run() -> None:
        async with Rollout(url, tokenizer, "auto") as rollout:
            await replay(rollout)

    asyncio.run(run())


def _start_of_answer(mask: list[int], number: int) -> int:
    """Where the answer of that number, counted from 0, begins; the end if there is none."""
    starts = [i for i, live in enumerate(mask) if live and (i == 0 or not mask[i - 1])]
    return starts[number] if number < len(starts) else len(mask)


def test_the_trainers_model_says_of_the_batch_what_the_engine_said(
    url: str, model: Path, tokenizer: Any
) -> None:
    async def rollout() -> Any:
        async with Rollout(url, tokenizer, "auto") as one:
            return await one.play()

    output = asyncio.run(rollout())
    [prompt], [response] = output["prompt_token_ids"], output["response_ids"]
    ids = torch.tensor([prompt + response])
    policy = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    image = policy.config.image_token_id
    with torch.no_grad():
        logits = policy(
            input_ids=ids,
            pixel_values=output["pixel_values"][0],
            image_grid_thw=output["image_grid_thw"][0],
            mm_token_type_ids=(ids == image).int(),
        ).logits
    logprobs = logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    said = torch.tensor(output["rollout_logprobs"][0])
    ours = logprobs[torch.arange(len(response)), torch.tensor(response)]
    sampled = torch.tensor(output["loss_masks"][0]).bool()
    torch.testing.assert_close(ours[sampled], said[sampled], atol=2e-4, rtol=0)
