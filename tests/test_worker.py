"""A LoRA policy needs no broadcast group with the engines; any other one keeps SkyRL's."""

import asyncio
from typing import Any

import pytest

from skyrl_maze import _compat

_compat.install()

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration  # noqa: E402

from skyrl_maze import tiny  # noqa: E402
from skyrl_maze.vision import BANNED_BIAS, vision_tokens  # noqa: E402
from skyrl_maze.worker import (  # noqa: E402
    FSDPPolicyWorkerBase,
    MazePolicyWorker,
    PolicyWorker,
    RefWorker,
    ban_vision_tokens,
)


@pytest.mark.parametrize(("lora", "rendezvous"), [(True, False), (False, True)])
def test_only_a_policy_without_lora_meets_the_engines(
    monkeypatch: pytest.MonkeyPatch, lora: bool, rendezvous: bool
) -> None:
    met: list[Any] = []

    async def meet(self: Any, client: Any, engine_cfg: Any) -> None:
        met.append((client, engine_cfg))

    monkeypatch.setattr(FSDPPolicyWorkerBase, "init_weight_sync_state", meet)
    worker = MazePolicyWorker.__new__(MazePolicyWorker)
    worker._is_lora = lora
    asyncio.run(worker.init_weight_sync_state("client", "cfg"))
    assert bool(met) is rendezvous
    assert getattr(worker, "_weight_sync_inference_client", None) == ("client" if lora else None)


def test_ranks_ask_ray_for_one_gpu_each() -> None:
    for actor in (PolicyWorker, RefWorker):
        assert actor._default_options["num_gpus"] == 1


@pytest.fixture(scope="module")
def loving(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, int]:
    """A model that would say nothing but the token of a picture, its folder, and that token."""
    folder = tmp_path_factory.mktemp("model")
    tiny.save_random_model(folder, ["user\nassistant\n<action>right</action>"])
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    image_id = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|image_pad|>")
    bias = torch.zeros(model.config.text_config.vocab_size)
    bias[image_id] = 50.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model, str(folder), image_id


def test_tokens_of_pictures_have_the_engines_probability(loving: tuple[Any, str, int]) -> None:
    """The trainer's distribution is the one that was sampled from, whatever the weights have come to."""
    model, folder, image_id = loving
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    ids = torch.tensor([[5, 6, 7, 8]])
    before = tuned(input_ids=ids).logits.detach().clone()
    assert before.softmax(-1)[..., image_id].min() > 0.99
    ban_vision_tokens(tuned, folder)
    after = tuned(input_ids=ids).logits
    assert after.softmax(-1)[..., image_id].max() < 1e-15
    banned = vision_tokens(AutoTokenizer.from_pretrained(folder), model.config).banned_ids
    others = [i for i in range(after.shape[-1]) if i not in banned]
    assert len(others) > after.shape[-1] - 10
    torch.testing.assert_close(after[..., others], before[..., others])
    torch.testing.assert_close(after[..., sorted(banned)], before[..., sorted(banned)] + BANNED_BIAS)
    after.log_softmax(-1)[..., 9].sum().backward()
    grown = [p.grad for name, p in tuned.named_parameters() if "lora_B" in name]
    assert grown
    assert all(torch.isfinite(grad).all() for grad in grown)
