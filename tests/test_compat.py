"""The workarounds do what they say, once, and no more."""

import importlib
import logging
import subprocess
import sys

import pytest
from loguru import logger

from skyrl_maze import _compat

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
