"""Episodes against an engine that answers by itself: every rule of a trajectory, every kind of fault."""

import asyncio
import base64
import io
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import skyrl_gym
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from skyrl_maze import _compat

_compat.install()

import torch  # noqa: E402
from fake_engine import FakeEngine, logprob, random_policy  # noqa: E402
from skyrl.train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig  # noqa: E402
from skyrl.train.config.config import InferenceEngineConfig  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from skyrl_maze.errors import ConfigError  # noqa: E402
from skyrl_maze.faults import RolloutConfig, RolloutError  # noqa: E402
from skyrl_maze.generator import MazeVLMGenerator  # noqa: E402
from skyrl_maze.threads import CallThreads  # noqa: E402
from skyrl_maze.tiny import make_processor  # noqa: E402
from skyrl_maze.vision import PictureReader  # noqa: E402

ENV = "colours"
WINDOW = 4096


def picture_part(shade: int, side_px: int = 32) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (side_px, side_px), (shade % 256, 0, 0)).save(buffer, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


class ColourEnv(BaseTextEnv):
    """Shows `pictures` coloured squares a turn for `turns` turns; `fails` says where it breaks."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.row = extras or {}
        self.max_turns = self.row.get("turns", 3)
        self.answers: list[str] = []
        self._fail("make")

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self._fail("init")
        return [*prompt, self._show()], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.answers.append(action)
        self._fail(f"step {self.turns}")
        done = self.turns >= self.max_turns
        reward = self.row.get("rewards", [0.25] * self.max_turns)[self.turns - 1]
        return BaseTextEnvStepOutput(
            observations=[] if done else [self._show()], reward=reward, done=done, metadata={}
        )

    def close(self) -> None:
        self.row.get("closed", []).append(self.answers)

    def get_metrics(self) -> dict[str, Any]:
        return {"success": 1.0, "turns": self.turns}

    def _show(self) -> dict[str, Any]:
        shade = 7 * self.turns + self.row.get("shade", 0)
        shown = [picture_part(shade + i, 32 + 16 * i) for i in range(self.row.get("pictures", 1))]
        return {"role": "user", "content": [*shown, {"type": "text", "text": f"turn {self.turns}"}]}

    def _fail(self, where: str) -> None:
        error = self.row.get("fails", {}).get(where)
        if isinstance(error, list):
            error = error.pop() if error else None
        if error is not None:
            raise error


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    skyrl_gym.register(id=ENV, entry_point=ColourEnv)
    yield
    skyrl_gym.envs.deregister(ENV)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_processor(["user\nturn 1 2 3 up down left right"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def reader(model: Path) -> PictureReader:
    return PictureReader(str(model))


@pytest.fixture
def build(tokenizer: Any, reader: PictureReader) -> Callable[..., MazeVLMGenerator]:
    def build(
        policy: Any = None, *, rollouts: RolloutConfig | None = None, **changes: Any
    ) -> MazeVLMGenerator:
        engine_changes = {k: changes.pop(k) for k in ("knows_files", "trouble") if k in changes}
        client = changes.pop("client", None) or FakeEngine(
            reader,
            tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            policy or words(tokenizer, "up"),
            **engine_changes,
        )
        window = changes.pop("window", WINDOW)
        cfg = GeneratorConfig(
            **{
                "max_turns": 3,
                "max_input_length": 2048,
                "sampling_params": SamplingParams(max_generate_length=8, logprobs=1),
                "inference_engine": InferenceEngineConfig(engine_init_kwargs={"max_model_len": window}),
                **changes,
            }
        )
        cfg.rollouts = rollouts or RolloutConfig(retry_wait_s=0)
        gym = SkyRLGymConfig(max_env_workers=2)
        return MazeVLMGenerator(cfg, gym, client, tokenizer, policy_model_name="policy")

    return build


def words(tokenizer: Any, text: str) -> Callable[[list[int], int], tuple[list[int], str]]:
    ids = tokenizer.encode(text + "<|im_end|>")
    return lambda _prompt, _max_tokens: (list(ids), "stop")


def play(generator: MazeVLMGenerator, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    batch = {
        "prompts": [[{"role": "system", "content": "look"}] for _ in rows],
        "env_classes": [ENV] * len(rows),
        "env_extras": rows,
        "trajectory_ids": [TrajectoryID(f"maze-{i}", 0) for i in range(len(rows))],
        **more,
    }
    return asyncio.run(generator.generate(batch, disable_tqdm=True))


def client_of(generator: MazeVLMGenerator) -> Any:
    return generator.inference_engine_client


# Token in, token out


@given(
    seed=st.integers(0, 10**6),
    turns=st.integers(1, 6),
    pictures=st.integers(1, 3),
    knows_files=st.booleans(),
    failures=st.sampled_from([0.0, 0.0, 0.3]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sampled_the_rules_hold(
    build: Any, tokenizer: Any, seed: int, turns: int, pictures: int, knows_files: bool, failures: float
) -> None:
    rng = random.Random(seed)
    vision = {i for t, i in tokenizer.get_added_vocab().items() if "image" in t or "vi" in t}
    sampled: dict[bytes, list[int]] = {}
    policy = random_policy(
        [i for i in range(len(tokenizer)) if i not in vision], tokenizer.eos_token_id, seed
    )

    def remembered(prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
        ids, reason = policy(prompt, max_tokens)
        sampled[repr(prompt).encode()] = ids
        return ids, reason

    def trouble() -> None:
        if rng.random() < failures:
            raise ConnectionError("the engine is away")

    rollouts = RolloutConfig(retry_wait_s=0, retries=20)
    generator = build(remembered, rollouts=rollouts, knows_files=knows_files, trouble=trouble)
    rewards = [rng.choice([0.0, 0.5, -0.25]) for _ in range(turns)]
    began_s = time.monotonic()
    output = play(
        generator, [{"turns": turns, "pictures": pictures, "rewards": rewards, "shade": seed % 200}]
    )
    whole_s = time.monotonic() - began_s

    [prompt], [response], [mask] = output["prompt_token_ids"], output["response_ids"], output["loss_masks"]
    assert output["rollout_metrics"]["generate/masked_episodes"] == 0
    assert output["rollout_metrics"]["generate/tokens_per_second_mean"] >= sum(mask) / whole_s
    assert len(response) == len(mask) == len(output["rewards"][0]) == len(output["rollout_logprobs"][0])
    assert sum(output["rewards"][0]) == pytest.approx(sum(rewards))
    whole, position = prompt + response, len(prompt)
    spans = 0
    while position < len(
        whole
    ):  # each run of sampled tokens is what the engine sampled after just this prefix
        answer = sampled[repr(whole[:position]).encode()]
        assert whole[position : position + len(answer)] == answer
        inside = mask[position - len(prompt) :][: len(answer)]
        assert inside == [1] * len(answer)
        said = output["rollout_logprobs"][0][position - len(prompt) :][: len(answer)]
        assert said == pytest.approx([logprob(token) for token in answer])
        position += len(answer)
        spans += 1
        if position < len(whole):  # an empty answer leaves the prefix as it was
            assert mask[position - len(prompt)] == 0
            position += 1
        while position < len(whole) and repr(whole[:position]).encode() not in sampled:
            assert mask[position - len(prompt)] == 0
            position += 1
    assert spans == turns
    grid = output["image_grid_thw"][0]
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert whole.count(image_id) == int(grid.prod(dim=-1).sum()) // 4
    assert len(grid) == turns * pictures
    assert len(output["pixel_values"][0]) == int(grid.prod(dim=-1).sum())
    assert client_of(generator).finished == ["maze-0_0"]


def test_pictures_are_trained_on_in_the_order_they_were_shown(build: Any, reader: PictureReader) -> None:
    output = play(build(), [{"turns": 4, "pictures": 2}])
    shown = [picture_part(7 * turn + i, 32 + 16 * i) for turn in range(4) for i in range(2)]
    pixels = torch.cat([reader.read(part["image_url"]["url"]).pixel_values for part in shown])
    assert torch.equal(output["pixel_values"][0], pixels)


def test_both_ways_of_sending_pictures_give_the_same_batch(build: Any) -> None:
    rows = [{"turns": 3, "pictures": 2}, {"turns": 2, "shade": 90}]
    files, tensors = (play(build(knows_files=known), rows) for known in (True, False))
    for key in ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs"):
        assert files[key] == tensors[key]
    for key in ("pixel_values", "image_grid_thw"):
        assert all(map(torch.equal, files[key], tensors[key]))


def test_an_engine_that_does_not_know_files_is_found_out_once_and_said(build: Any, tokenizer: Any) -> None:
    said: list[str] = []
    generator = build(knows_files=False)
    generator._engine._notify = said.append
    play(generator, [{}, {}])
    play(generator, [{}])
    assert len(said) == 1
    assert "as tensors" in said[0]
    assert "does not know" in said[0] or "lacks a part" in said[0]
    generator = build()
    generator._engine._notify = said.append
    play(generator, [{}])
    assert "as files" in said[1]


def test_files_that_are_asked_for_and_cannot_be_sent_end_the_run(build: Any) -> None:
    with pytest.raises(ConfigError, match="set it to auto"):
        play(build(rollouts=RolloutConfig(pictures="files"), knows_files=False), [{}])


def test_tensors_can_be_asked_for(build: Any) -> None:
    generator = build(rollouts=RolloutConfig(pictures="tensors"))
    play(generator, [{}])
    assert all("mm_features" in request for request in client_of(generator).requests)


def test_a_request_grows_by_one_picture_a_turn_and_none_is_rendered_for_it(build: Any) -> None:
    generator = build()
    play(generator, [{"turns": 5}], env_extras=[{"turns": 5}])
    requests = [r for r in client_of(generator).requests if r["session_id"] != "probe"]
    assert [len(request["content_parts"]) for request in requests] == [1, 2, 3, 4, 5]
    assert client_of(generator).rendered == 1, "only to find out whether the tensors are equal"
    assert {request["model"] for request in requests} == {"policy"}
    assert len({request["cache_salt"] for request in requests}) == 1


# Sampling parameters, ends of turns, budgets


def test_vision_tokens_are_banned_and_the_callers_parameters_left_alone(build: Any, tokenizer: Any) -> None:
    generator = build()
    given_params = {"max_tokens": 5, "logprobs": 1, "logit_bias": {"3": 1.0}, "min_tokens": 1}
    play(generator, [{}], sampling_params=given_params)
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
    ban = {str(tokenizer.convert_tokens_to_ids(name)): -100.0 for name in names}
    sent = client_of(generator).requests[-1]["sampling_params"]
    assert sent["logit_bias"] == {"3": 1.0, **ban}
    assert sent["min_tokens"] == 0, "an answer may begin with its end, as the trainer's policy may"
    assert given_params == {"max_tokens": 5, "logprobs": 1, "logit_bias": {"3": 1.0}, "min_tokens": 1}


@pytest.mark.parametrize(
    ("text", "reason", "heard"),
    [
        ("up<|im_end|>", "stop", "up"),
        ("up", "length", "up"),
        ("up", "stop", "up"),  # at a stop string
        ("", "stop", ""),
        ("<|im_end|>", "stop", ""),
        ("u<|endoftext|>p<|im_start|>", "length", "up"),
    ],
)
def test_the_environment_hears_text_and_the_turn_is_closed_once(
    build: Any, tokenizer: Any, text: str, reason: str, heard: str
) -> None:
    ids = tokenizer.encode(text)
    closed: list[list[str]] = []
    row = {"turns": 2, "closed": closed, "rewards": [0.5, 1.0]}
    generator = build(lambda _p, _n: (list(ids), reason))
    generator._player.threads = CallThreads(0)  # so that `closed` is this very list
    output = asyncio.run(
        generator.agent_loop([], ENV, row, 8, 2048, sampling_params={"max_tokens": 8, "logprobs": 1})
    )
    assert output.masked_because is None
    end = tokenizer.eos_token_id
    ended = ids[-1:] == [end]
    assert output.response_ids[: len(ids) + 1][-1 if not ended else len(ids) - 1] == end
    assert output.loss_mask[: len(ids) + 1] == [1] * len(ids) + [0]
    assert output.loss_mask[-1] == int(ended)
    paid = [i for i, reward in enumerate(output.reward) if reward]
    assert [output.reward[i] for i in paid] == [0.5, 1.0]
    assert paid[0] == max(len(ids) - 1, 0)
    assert [m["content"] for m in output.chat if m["role"] == "assistant"] == [heard, heard]


def test_an_answer_gets_no_more_room_than_the_context_leaves(build: Any) -> None:
    rooms: list[int] = []
    for window in range(100, 160, 3):
        asked: list[tuple[int, int]] = []

        def policy(
            prompt: list[int], max_tokens: int, asked: list[tuple[int, int]] = asked
        ) -> tuple[list[int], str]:
            asked.append((len(prompt), max_tokens))
            return [5] * max_tokens, "length"

        output = play(build(policy, window=window), [{"turns": 9}])
        turns = asked[1:]  # the first is the probe
        assert all(length + room <= window for length, room in turns)
        assert output["stop_reasons"] == ["length"]
        assert output["rollout_metrics"]["generate/too_long_prompts"] == 1
        assert sum(output["rewards"][0]) == pytest.approx(0.25 * len(turns)), "what was earned is kept"
        assert output["masked_because"] == [None]
        rooms += [room for _, room in turns]
    assert set(rooms) > {8}, "some turns were cut short"


def test_a_first_prompt_that_is_too_long_is_one_masked_token(build: Any, tokenizer: Any) -> None:
    output = play(build(max_input_length=10), [{}, {}])
    assert output["response_ids"] == [[tokenizer.eos_token_id]] * 2
    assert output["loss_masks"] == [[0], [0]]
    assert output["rewards"] == [[0.0], [0.0]]
    assert output["stop_reasons"] == ["length", "length"]
    assert output["rollout_metrics"]["generate/too_long_prompts"] == 2
    assert output["pixel_values"][0] is not None


def test_a_sampled_vision_token_never_reaches_the_trainer(build: Any, tokenizer: Any) -> None:
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    turn = iter(range(1000))

    def policy(_prompt: list[int], _max_tokens: int) -> tuple[list[int], str]:
        return ([5, image_id, tokenizer.eos_token_id] if next(turn) == 3 else [5, 6]), "stop"

    output = play(build(policy), [{"turns": 4}, {"turns": 1}, {"turns": 1}])
    metrics = output["rollout_metrics"]
    assert metrics["generate/violations"] == metrics["generate/violation_sampled_vision_token"] == 1
    [masked] = [i for i, mask in enumerate(output["loss_masks"]) if not any(mask)]
    assert image_id not in output["response_ids"][masked]
    assert "no token that stands for a picture" in output["masked_because"][masked]


# Faults


@pytest.mark.parametrize("where", ["make", "init", "step 1", "step 2"])
def test_an_environment_that_breaks_costs_its_own_episode(build: Any, tokenizer: Any, where: str) -> None:
    rows = [{}, {"fails": {where: KeyError("lost")}}, {}]
    output = play(build(), rows)
    assert output["masked_because"][0] is output["masked_because"][2] is None
    assert "KeyError" in output["masked_because"][1]
    assert output["loss_masks"][1] == [0]
    assert output["env_metrics"][1] == {}
    assert output["rollout_metrics"]["generate/lost_environment"] == 1
    assert output["rollout_metrics"]["generate/retries"] == 0, "it is not the infrastructure's fault"
    assert output["rollout_metrics"]["environment/success"] == 1.0
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    tokens = int(output["image_grid_thw"][1].prod(dim=-1).sum()) // 4
    assert output["prompt_token_ids"][1].count(image_id) == tokens > 0
    assert len(output["pixel_values"][1]) == 4 * tokens


def test_an_environment_that_did_not_answer_plays_again_from_the_start(build: Any) -> None:
    failures = [ConnectionError("away"), TimeoutError("slow")]
    output = play(build(), [{"turns": 2, "fails": {"step 2": failures}}, {}])
    assert output["masked_because"] == [None, None] or failures
    metrics = output["rollout_metrics"]
    assert metrics["generate/retries"] + metrics["generate/masked_episodes"] >= 1


def test_an_engine_that_fails_twice_is_asked_a_third_time(build: Any) -> None:
    coming = [OSError("reset"), RuntimeError("502")]

    def trouble() -> None:
        if coming and trouble.armed:  # type: ignore[attr-defined]
            raise coming.pop()

    trouble.armed = False  # type: ignore[attr-defined]
    generator = build(trouble=trouble)
    play(generator, [{}])
    trouble.armed = True  # type: ignore[attr-defined]
    output = play(generator, [{}])
    assert output["masked_because"] == [None]
    assert output["rollout_metrics"]["generate/retries"] == 2


def test_an_engine_that_stays_away_fails_the_step_with_its_cause(build: Any) -> None:
    def trouble() -> None:
        raise ConnectionError("connection refused")

    with pytest.raises(RolloutError, match=r"4 of 4 episodes were lost.*connection refused"):
        play(build(trouble=trouble, rollouts=RolloutConfig(retries=1, retry_wait_s=0)), [{}] * 4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda reply: reply["choices"][0].pop("token_ids"),
        lambda reply: reply["choices"].clear(),
        lambda reply: reply["choices"][0].update(token_ids=["up"]),
        lambda reply: reply["choices"][0].update(token_ids=[1] * 99),
        lambda reply: reply["choices"][0]["logprobs"]["content"].pop(),
        lambda reply: reply["choices"][0].update(finish_reason="abort"),
        lambda reply: reply["mm_placeholders"]["image"][0].update(offset=3),
        lambda reply: reply["mm_placeholders"]["image"].pop(),
        lambda reply: reply.pop("prompt_token_ids"),
        lambda reply: reply.update(prompt_token_ids="abc"),
        lambda reply: reply.update(prompt_token_ids=[None]),
        lambda reply: reply["choices"][0].update(token_ids=[2**70]),
        lambda reply: reply["choices"][0].update(token_ids=[99_999]),
        lambda reply: reply["choices"][0].update(token_ids=[True]),
        lambda reply: reply["choices"][0]["logprobs"]["content"][0].update(logprob=5.0),
        lambda reply: reply["choices"][0]["logprobs"]["content"][0].update(logprob=None),
    ],
)
def test_a_malformed_reply_masks_its_episode(build: Any, damage: Callable[[Any], Any]) -> None:
    generator = build(rollouts=RolloutConfig(retries=1, retry_wait_s=0))
    client = client_of(generator)
    play(generator, [{}])
    post = client._post

    async def damaged(url: str, json: Any, headers: Any) -> Any:
        reply = await post(url, json, headers)
        if headers["X-Session-ID"] == "maze-1_0":
            damage(reply)
        return reply

    client._post = damaged
    output = play(generator, [{}, {}])
    assert [reason is None for reason in output["masked_because"]] == [True, False]
    assert output["rollout_metrics"]["generate/lost_reply"] == 1


def test_a_prompt_that_the_engine_changed_breaks_the_prefix_rule(build: Any) -> None:
    generator = build()
    client = client_of(generator)
    play(generator, [{}])
    post = client._post

    async def changed(url: str, json: Any, headers: Any) -> Any:
        reply = await post(url, json, headers)
        if headers["X-Session-ID"] == "maze-0_0" and len(json["content_parts"]) == 2:
            reply["prompt_token_ids"] = [*reply["prompt_token_ids"][:-1], 9]
        return reply

    client._post = changed
    output = play(generator, [{}, {}])
    assert output["rollout_metrics"]["generate/violation_prefix"] == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1"])
def test_a_reward_that_is_no_finite_number_is_the_environments_fault(build: Any, reward: Any) -> None:
    output = play(build(), [{"rewards": [0.0, reward, 0.0]}, {}])
    assert "finite" in output["masked_because"][0]
    assert output["rewards"][0] == [0.0]


def test_an_environment_that_hangs_is_given_up(build: Any) -> None:
    import threading

    release = threading.Event()

    rollouts = RolloutConfig(env_timeout_s=0.2, retries=0)
    generator = build(rollouts=rollouts)
    step = ColourEnv.step

    def slow(self: ColourEnv, action: str) -> Any:
        if self.row.get("hangs"):
            release.wait(30)
        return step(self, action)

    ColourEnv.step = slow  # type: ignore[method-assign]
    try:
        output = play(generator, [{"hangs": True}, {}])
    finally:
        release.set()
        ColourEnv.step = step  # type: ignore[method-assign]
    assert output["rollout_metrics"]["generate/lost_timeout"] == 1


def test_faults_on_purpose_are_counted(build: Any) -> None:
    rollouts = RolloutConfig(fault_rate=0.1, retry_wait_s=0, max_failed_share=0.99)
    output = play(build(rollouts=rollouts), [{"turns": 5} for _ in range(40)])
    metrics = output["rollout_metrics"]
    lost = sum(reason is not None for reason in output["masked_because"])
    assert 0 < lost < 40
    assert metrics["generate/masked_episodes"] == metrics["generate/lost_environment"] == lost
    assert metrics["generate/retries"] > 0


def test_a_session_is_finished_whatever_happens(build: Any) -> None:
    generator = build()
    play(generator, [{"fails": {"init": KeyError("x")}}, {}])
    assert sorted(client_of(generator).finished) == ["maze-0_0", "maze-1_0"]

    async def unreachable(_session_id: str) -> None:
        raise OSError("router is gone")

    client_of(generator).finish_session = unreachable
    assert play(generator, [{}])["masked_because"] == [None]


# What people read, and templates


def test_the_conversation_is_kept_without_base64(build: Any) -> None:
    [chat] = play(build(), [{"turns": 2}])["chats"]
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user", "assistant"]
    assert "[image/png 32x32 sha256:" in chat[1]["content"]
    assert "base64" not in repr(chat)


def test_an_episode_names_the_adapter_that_was_served_when_it_began(build: Any) -> None:
    generator: Any = None

    def policy(_prompt: list[int], _max_tokens: int) -> tuple[list[int], str]:
        generator.adapter_version = "4.0"
        return [5], "stop"

    generator = build(policy)
    generator.adapter_version = "3.0"
    rows = [{"turns": 2}, {"turns": 2}]
    assert play(generator, rows)["adapter_versions"] == ["3.0", "3.0"]
    assert play(generator, rows)["adapter_versions"] == ["4.0", "4.0"]


@pytest.mark.parametrize("lost", [False, True])
def test_what_an_environment_records_comes_with_the_batch(build: Any, monkeypatch: Any, lost: bool) -> None:
    seen: list[Any] = []
    generator = build()
    generator._observe = lambda batch, output: seen.append((len(batch["prompts"]), output["records"]))
    monkeypatch.setattr(ColourEnv, "record", lambda env: list(env.answers), raising=False)
    fails = {"fails": {"step 2": KeyError("x")}} if lost else {}
    output = play(generator, [fails, {"turns": 1}])
    assert output["records"] == [["up", "up"] if lost else ["up"] * 3, ["up"]]
    assert seen == [(2, output["records"])]


def test_a_record_that_cannot_be_had_costs_nothing(build: Any, monkeypatch: Any) -> None:
    assert play(build(), [{}])["records"] == [None], "it has no such method"
    monkeypatch.setattr(ColourEnv, "record", lambda _env: {}["x"], raising=False)
    output = play(build(), [{}])
    assert (output["records"], output["masked_because"]) == ([None], [None])


def test_a_template_that_drops_reasoning_is_refused(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    kept = "{{ message.content }}"
    assert kept in tokenizer.chat_template
    dropping = (
        "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}"
    )
    file = tmp_path / "thinking.jinja"
    file.write_text(tokenizer.chat_template.replace(kept, dropping), encoding="utf-8")
    from skyrl.train.config import ChatTemplateConfig

    with pytest.raises(ConfigError, match="reasoning"):
        build(chat_template=ChatTemplateConfig(source="file", name_or_path=str(file)))


def test_a_template_of_ones_own_is_used(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    from skyrl.train.config import ChatTemplateConfig

    file = tmp_path / "shout.jinja"
    file.write_text("{{ greeting }}" + tokenizer.chat_template, encoding="utf-8")
    template = ChatTemplateConfig(source="file", name_or_path=str(file))
    output = play(build(chat_template=template, chat_template_kwargs={"greeting": "hello"}), [{"turns": 2}])
    text = tokenizer.decode(output["prompt_token_ids"][0] + output["response_ids"][0])
    assert text.startswith("hello")
    assert text.count("hello") == 1


# Environments and engines that do what nobody expects


class OddEnv(ColourEnv):
    """Replaces what one of its methods returns."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        name, result = self.row.get("odd", ("", None))
        if name:
            setattr(self, name, result)


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def _raise(error: BaseException) -> Any:
    raise error


ODD = {
    "metrics fail": ("get_metrics", lambda: _raise(KeyError("gone"))),
    "metrics are None": ("get_metrics", lambda: None),
    "a step gives None": ("step", lambda _a: None),
    "a step lacks done": ("step", lambda _a: {"reward": 0.0, "observations": []}),
    "observations are None": ("step", lambda _a: {"reward": 0.0, "observations": None, "done": False}),
    "a message is None": ("step", lambda _a: {"reward": 0.0, "observations": [None], "done": False}),
    "content is a number": (
        "step",
        lambda _a: {"reward": 0.0, "observations": [{"role": "user", "content": 5}], "done": False},
    ),
    "init gives None": ("init", lambda _p: None),
    "init gives three": ("init", lambda _p: ([], {}, 1)),
    "an error without words": ("step", lambda _a: _raise(UnreadableError())),
    "a reward beyond floats": ("step", lambda _a: {"reward": 10**400, "observations": [], "done": True}),
    "it leaves the process": ("step", lambda _a: _raise(SystemExit(1))),
    "an exhausted iterator": ("step", lambda _a: next(iter(()))),
    "a picture that is none": (
        "init",
        lambda _p: (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
                }
            ],
            {},
        ),
    ),
    "a picture elsewhere": (
        "init",
        lambda _p: (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
            {},
        ),
    ),
}


@pytest.mark.parametrize("what", list(ODD))
@pytest.mark.parametrize("place", [0, 2])
def test_an_odd_environment_costs_its_own_episode(
    build: Any, monkeypatch: pytest.MonkeyPatch, what: str, place: int
) -> None:
    monkeypatch.setattr(skyrl_gym.envs.registration.registry[ENV], "entry_point", OddEnv)
    rows: list[dict[str, Any]] = [{}, {}, {}]
    rows[place] = {"odd": ODD[what]}
    monkeypatch.setattr("copy.deepcopy", lambda x, _memo=None: dict(x) if isinstance(x, dict) else list(x))
    output = play(build(rollouts=RolloutConfig(env_timeout_s=20, retry_wait_s=0)), rows)
    assert [reason is not None for reason in output["masked_because"]] == [i == place for i in range(3)]
    assert output["loss_masks"][place] == [0]
    assert output["pixel_values"][place] is not None
    assert "generate/lost_internal" not in output["rollout_metrics"]


@pytest.mark.parametrize("reward", [1, True, float("0.5")])
def test_rewards_of_any_number_type_are_taken(build: Any, reward: Any) -> None:
    import numpy as np

    rewards = [reward, np.float32(0.5), torch.tensor(0.25)]
    output = play(build(), [{"rewards": rewards}])
    assert sum(output["rewards"][0]) == pytest.approx(float(reward) + 0.75)


def test_an_episode_without_pictures_among_others_is_lost_alone(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = lambda self: {"role": "user", "content": "dark"}  # noqa: E731
    monkeypatch.setattr(
        ColourEnv, "_show", lambda self, show=ColourEnv._show: (blind if "dark" in self.row else show)(self)
    )
    output = play(build(), [{}, {"dark": True}])
    assert [reason is None for reason in output["masked_because"]] == [True, False]
    assert output["rollout_metrics"]["generate/lost_picture"] == 1
    assert output["pixel_values"][1] is not None


def test_an_engine_that_is_gone_is_asked_no_oftener_than_allowed(build: Any) -> None:
    generator = build(rollouts=RolloutConfig(retries=3, retry_wait_s=0))
    client, asked = client_of(generator), 0
    play(generator, [{}])
    post = client._post

    async def gone(url: str, json: Any, headers: Any) -> Any:
        nonlocal asked
        if headers["X-Session-ID"] != "maze-1_0":
            return await post(url, json, headers)
        asked += 1
        raise ConnectionError("refused")

    client._post = gone
    output = play(generator, [{}, {}])
    assert output["masked_because"][1] is not None
    assert asked == 4


def test_an_engine_whose_probe_fails_with_500_gets_tensors(build: Any) -> None:
    class Answer500Error(Exception):
        status = 500

    generator = build(rollouts=RolloutConfig(retries=0))
    client = client_of(generator)

    async def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise Answer500Error("content_parts: not implemented")

    client._post = broken
    said: list[str] = []
    generator._engine._notify = said.append
    assert play(generator, [{}])["masked_because"] == [None]
    assert "as tensors" in said[0]
    assert "not implemented" in said[0]


def test_a_batch_that_is_given_up_leaves_no_episode_running(build: Any) -> None:
    started, finished = 0, 0

    async def slow(url: str, json: Any, headers: Any, post: Any = None) -> Any:
        nonlocal started, finished
        started += 1
        await asyncio.sleep(30)
        finished += 1

    generator = build()
    play(generator, [{}])
    client_of(generator)._post = slow

    async def give_up() -> list[Any]:
        batch = {"prompts": [[]] * 6, "env_classes": [ENV] * 6, "env_extras": [{} for _ in range(6)]}
        task = asyncio.ensure_future(generator.generate(batch, disable_tqdm=True))
        while not started:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(give_up()) == []
    assert finished == 0


def test_causes_name_no_base64(build: Any) -> None:
    url = picture_part(3)["image_url"]["url"]
    output = play(build(), [{"fails": {"step 1": ValueError(f"bad observation {url}")}}, {}])
    assert "base64" not in output["masked_because"][0]
    assert "sha256:" in output["masked_because"][0]
    with pytest.raises(RolloutError) as raised:
        play(build(), [{"fails": {"step 1": ValueError(f"bad observation {url}")}}])
    assert "base64" not in str(raised.value)
    assert "32x32" in str(raised.value)
