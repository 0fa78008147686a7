"""The workarounds do what they say, once, and no more."""

import base64
import hashlib
import importlib
import io
import logging
import subprocess
import sys

import pytest
from loguru import logger
from PIL import Image

from skyrl_maze import _compat

_compat.install()

from bare_trainer import output_of, trainer_of  # noqa: E402
from skyrl.train import evaluate, trainer  # noqa: E402
from skyrl.train.generators.utils import get_metrics_from_generator_output  # noqa: E402
from skyrl.train.utils import trainer_utils  # noqa: E402

_CLIENT_LOG = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"


def test_flash_attn_has_a_stand_in_that_refuses_to_work() -> None:
    _compat.install()
    padding = importlib.import_module("flash_attn.bert_padding")
    with pytest.raises(RuntimeError, match="remove_microbatch_padding=false"):
        padding.unpad_input()


def test_transformers_does_not_take_the_stand_in_for_flash_attention() -> None:
    code = (
        "from skyrl_maze import _compat; _compat.install(); _compat.install()\n"
        "from transformers.utils import is_flash_attn_2_available\n"
        "print(is_flash_attn_2_available())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False"]


def test_a_real_flash_attn_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module("json")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    _compat.install()
    assert sys.modules["flash_attn"] is real


def test_no_secret_of_the_environment_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_marker_value")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_marker_value")
    monkeypatch.setenv("HF_HOME", "/visible/home")
    _compat.install()
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    logger.info("Exporting `HF_TOKEN` to ray runtime env: hf_marker_value; wandb_marker_value; /visible/home")
    logger.remove(sink)
    assert lines == ["Exporting `HF_TOKEN` to ray runtime env: ***; ***; /visible/home\n"]


def test_only_the_expected_404_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    _compat.install()
    log = logging.getLogger(_CLIENT_LOG)
    with caplog.at_level(logging.WARNING, logger=_CLIENT_LOG):
        log.warning("finish_session for session_id='0_5' returned HTTP 404")
        log.warning("finish_session for session_id='0_5' returned HTTP 500")
        log.warning("generate returned HTTP 404")
    assert [r.getMessage()[-8:] for r in caplog.records] == ["HTTP 500", "HTTP 404"]
    assert len(log.filters) == 1


def test_a_picture_in_a_logged_line_is_described_and_a_secret_beside_it_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_marker_value")
    _compat.install()
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), (1, 2, 3)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    logger.info(f"hf_marker_value: {{'url': '{url}'}} and {url}{url}")
    logger.opt(colors=True).info("<cyan>{p0}</cyan>", p0=url)  # as SkyRL prints examples
    logger.remove(sink)
    shown = f"[image/png 30x20 sha256:{hashlib.sha256(buffer.getvalue()).hexdigest()[:12]}]"
    assert lines == [f"***: {{'url': '{shown}'}} and {shown}{shown}\n", f"{shown}\n"]


def _trained_on(rewards: list[list[float]], uids: list[str], **more: object) -> dict[str, float]:
    """The trainer's metrics of a batch with rewards per token."""
    trainer = trainer_of()
    trainer.postprocess_generator_output(output_of(rewards, **more), uids)
    return trainer.all_metrics


def test_an_episode_passes_by_its_success_not_by_its_last_reward() -> None:
    rewards = [[1.0, -0.5], [0.0, -0.1], [0.0, 0.5], [-1.0, 0.25]]
    metrics = [{"success": 1.0}, {"success": 0.0}, {"success": 0.0}, {"success": 0.0}]
    theirs = get_metrics_from_generator_output(output_of(rewards), ["a", "b", "c", "c"])
    assert theirs["pass_at_n"] == pytest.approx(1 / 3)  # by c
    found = _trained_on(rewards, ["a", "b", "c", "c"], env_metrics=metrics)
    assert found["reward/avg_pass_at_8"] == pytest.approx(1 / 3)  # by a
    found = _trained_on(rewards, ["a", "b", "a", "a"], env_metrics=metrics)
    assert found["reward/avg_pass_at_8"] == 0.5
    assert found["reward/avg_raw_reward"] == pytest.approx(0.15 / 4)


def test_lost_episodes_take_no_part() -> None:
    rewards = [[0.0, 1.0], [7.0], [0.0, 0.0], [7.0], [7.0]]
    metrics: list[dict[str, float]] = [{"success": 1.0}, {}, {"success": 0.0}, {}, {}]
    masks = [[1, 1], [0], [1, 1], [0], [0]]
    found = _trained_on(rewards, list("aabbc"), masks=masks, env_metrics=metrics)
    assert found["reward/avg_pass_at_8"] == 0.5, "group c, all lost, is no group that failed"
    assert found["reward/avg_raw_reward"] == 0.5
    assert found["reward/mean_positive_reward"] == 0.5


@pytest.mark.parametrize("more", [{}, {"env_metrics": None}, {"env_metrics": [{}, {"turns": 2.0}]}])
def test_where_no_success_is_reported_the_figure_is_skyrls(more: dict[str, object]) -> None:
    rewards = [[0.0, 1.0], [1.0, -1.0]]
    theirs = get_metrics_from_generator_output(output_of(rewards), ["a", "b"])
    found = _trained_on(rewards, ["a", "b"], **more)
    assert found["reward/avg_pass_at_8"] == theirs["pass_at_n"] == 0.5
    assert found["reward/avg_raw_reward"] == theirs["avg_score"]


def test_each_evaluation_set_is_counted_by_success_too() -> None:
    output = output_of(
        [[0.0, 1.0], [1.0, -1.0], [1.0, -1.0], [9.0]],
        env_metrics=[{"success": 0.0}, {"success": 1.0}, {"success": 0.0}, {}],
    )
    found = trainer_utils.calculate_per_dataset_metrics(output, list("abcc"), ["x", "x", "y/z", "y/z"], 2)
    assert (found["eval/x/pass_at_2"], found["eval/y_z/pass_at_2"]) == (0.5, 0.0)
    assert (found["eval/x/avg_score"], found["eval/y_z/avg_score"]) == (0.5, 0.0)


def test_success_is_counted_in_every_module_of_skyrl_once() -> None:
    modules = (trainer, evaluate, trainer_utils)
    before = [module.get_metrics_from_generator_output for module in modules]
    _compat.count_passes_by_success()
    assert [module.get_metrics_from_generator_output for module in modules] == before
    assert len(set(before)) == 1


def test_environment_metrics_of_several_evaluation_batches_are_averaged_over_episodes():
    from skyrl.train import evaluate

    _compat.average_environment_metrics()
    _compat.average_environment_metrics()

    def batch(solved):
        n = len(solved)
        return {
            "prompt_token_ids": [[1]] * n,
            "response_ids": [[2]] * n,
            "rewards": [[0.0]] * n,
            "loss_masks": [[1]] * n,
            "stop_reasons": ["stop"] * n,
            "rollout_logprobs": None,
            "env_metrics": [{} if s is None else {"success": s} for s in solved],
            "rollout_metrics": {
                "environment/solve_rate": sum(s or 0 for s in solved)
                / max(1, sum(s is not None for s in solved)),
                "generate/retries": 2,
            },
        }

    outputs = [batch([1.0, 1.0, 0.0, 0.0]), batch([1.0, None]), batch([None])]
    metrics = evaluate.concatenate_generator_outputs(outputs)["rollout_metrics"]
    assert metrics["environment/solve_rate"] == pytest.approx(3 / 5)
    assert metrics["generate/retries"] == 6
