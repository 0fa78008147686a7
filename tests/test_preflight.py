"""Before anything starts, what the machine lacks is said in one line."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_maze import _compat

_compat.install()

from skyrl_maze import maze_task, preflight, tiny  # noqa: E402
from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.errors import ConfigError, NotReadyError, SetupError  # noqa: E402
from skyrl_maze.settings import TrainConfig, needed_gpus, policy_ranks  # noqa: E402


def _config(recipe: str, *overrides: str) -> TrainConfig:
    return build_config([f"+recipe={recipe}", *overrides])


def test_no_engine_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_engine()
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SetupError, match=r"pip install 'skyrl_maze\[cpu\]' .* 'skyrl_maze\[gpu\]'"):
        preflight.check_engine()


def test_a_gpu_recipe_without_gpus_names_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_cluster_gpus", lambda: None)
    with pytest.raises(
        SetupError, match=r"needs 6 GPU\(s\), and this machine has 0; .*\+recipe=maze_cpu"
    ) as caught:
        preflight.check_device(_config("maze"))
    assert "\n" not in str(caught.value)


def test_a_named_cluster_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SetupError, match=f"RAY_ADDRESS={address} names a Ray cluster that does not answer"):
        preflight.check_device(_config("maze"))


@pytest.mark.parametrize(("gpus", "fits"), [(5, False), (6, True), (8, True)])
def test_a_cluster_is_asked_for_its_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, fits: bool) -> None:
    monkeypatch.setattr(preflight, "_cluster_gpus", lambda: gpus)
    cfg = _config("maze")
    if fits:
        preflight.check_device(cfg)
    else:
        with pytest.raises(NotReadyError, match=r"needs 6 GPU\(s\), and the Ray cluster has 5"):
            preflight.check_device(cfg)


def test_a_rehearsal_that_joins_a_cluster_needs_one_with_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _config("maze_cpu", "run.join_cluster=true")
    monkeypatch.setattr(preflight, "_cluster_gpus", lambda: None)
    with pytest.raises(SetupError, match=r"run\.join_cluster=true, and no Ray cluster runs here"):
        preflight.check_device(cfg)
    monkeypatch.setattr(preflight, "_cluster_gpus", lambda: 2)
    with pytest.raises(NotReadyError, match=r"needs 3 GPU\(s\), and the Ray cluster has 2"):
        preflight.check_device(cfg)
    monkeypatch.setattr(preflight, "_cluster_gpus", lambda: 3)
    preflight.check_device(cfg)


def test_the_rehearsal_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _config("maze_cpu")
    preflight.check_device(cfg)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SetupError, match="this machine has 2; run"):
        preflight.check_device(cfg)


def test_gpus_are_counted_as_skyrl_places_them() -> None:
    assert (policy_ranks(_config("maze")), needed_gpus(_config("maze"))) == (6, 6)
    assert needed_gpus(_config("maze_1node")) == 8
    cfg = _config("maze_cpu")
    assert (policy_ranks(cfg), needed_gpus(cfg)) == (2, 3)
    with_reference = _config(
        "maze_cpu", "trainer.algorithm.use_kl_loss=true", "trainer.placement.colocate_policy_ref=false"
    )
    assert needed_gpus(with_reference) == 5


def test_folders_are_made_below_the_root(tmp_path: Path) -> None:
    cfg = _config("maze_cpu", f"run.root={tmp_path}/deep/run")
    preflight.make_folders(cfg)
    assert {p.name for p in (tmp_path / "deep/run").iterdir()} == {"checkpoints", "data", "exports", "logs"}
    preflight.make_folders(cfg)


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SetupError, match=r"cannot create .*file/run: .*run\.root="):
        preflight.make_folders(_config("maze_cpu", f"run.root={tmp_path}/file/run"))


def test_a_full_disk_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = lambda _path: SimpleNamespace(free=200_000_000)  # noqa: E731
    monkeypatch.setattr(preflight.shutil, "disk_usage", usage)
    with pytest.raises(SetupError, match=r"has 0\.2 GB free and a run needs 1 GB"):
        preflight.make_folders(_config("maze_cpu", f"run.root={tmp_path}"))


def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with pytest.raises(SetupError, match="permission denied"):
        preflight.make_folders(_config("maze_cpu", f"run.root={tmp_path}"))


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    other = "import sys, pathlib; from skyrl_maze import _compat; _compat.install()\n"
    other += (
        "from skyrl_maze.preflight import sole_run\nwith sole_run(pathlib.Path(sys.argv[1])): print('held')"
    )
    command = [sys.executable, "-c", other, str(tmp_path)]
    with preflight.sole_run(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert f"another run is writing to {tmp_path}; " in done.stderr
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.split()[-1:] == [
        "held"
    ]


_ENGINE = "generator.inference_engine.engine_init_kwargs"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    cfg = _config("maze_cpu")
    episodes = maze_task.random_walks(cfg.environment.skyrl_gym.maze, [5], 12, tiny.WarmUp())
    tiny.save_random_model(folder, [tiny.texts_of(next(episodes)) for _ in range(32)])
    return folder


def _checked(model: Path | str, *overrides: str) -> list[str]:
    path = f"trainer.policy.model.path={model}"
    return preflight.check_budget(_config("maze_cpu", path, "trainer.max_prompt_length=64", *overrides))


def test_the_longest_episode_of_the_rehearsal_fits(model: Path) -> None:
    assert _checked(model) == []
    # A model that is not asked for a limit has none.
    assert _checked(model, f"{_ENGINE}.limit_mm_per_prompt=null", f"{_ENGINE}.max_model_len=null") == []


@pytest.mark.parametrize(
    ("setting", "too_small"),
    [
        (f"{_ENGINE}.max_model_len", 300),
        ("generator.max_input_length", 300),
        (f"{_ENGINE}.limit_mm_per_prompt.image", 11),
    ],
)
def test_a_limit_that_is_too_small_is_named_with_one_that_will_do(
    model: Path, setting: str, too_small: int
) -> None:
    with pytest.raises(SetupError, match=rf"^the longest episode does not fit:\n  - .*{setting}") as caught:
        _checked(model, f"{setting}={too_small}")
    [told] = re.findall(rf"{setting} (?:from {too_small} )?to (\d+)", str(caught.value))
    assert _checked(model, f"{setting}={told}") == []
    with pytest.raises(SetupError, match=setting):
        _checked(model, f"{setting}={int(told) - 1}")


def test_all_limits_that_are_too_small_are_named_at_once(model: Path) -> None:
    with pytest.raises(SetupError) as caught:
        _checked(
            model,
            f"{_ENGINE}.max_model_len=300",
            "generator.max_input_length=300",
            f"{_ENGINE}.limit_mm_per_prompt.image=1",
        )
    assert str(caught.value).count("\n  - ") == 3


def test_an_engine_without_a_configured_context_has_the_models(model: Path) -> None:
    long = ("generator.max_turns=100", "generator.max_input_length=100000")
    with pytest.raises(SetupError, match="context holds 8192: raise"):
        _checked(model, *long, f"{_ENGINE}.max_model_len=null", f"{_ENGINE}.limit_mm_per_prompt.image=100")


@pytest.mark.parametrize("limit", ["{count: 11}", "{count: 11, width: 80, height: 80}"])
def test_a_limit_of_pictures_may_be_a_table_as_vllm_has_it(model: Path, limit: str) -> None:
    with pytest.raises(SetupError, match=r"limit_mm_per_prompt\.image.* to 12"):
        _checked(model, f"{_ENGINE}.limit_mm_per_prompt.image={limit}")
    assert _checked(model, f"{_ENGINE}.limit_mm_per_prompt.image={limit.replace('11', '12')}") == []


def test_a_model_that_is_not_here_is_said_in_a_line(tmp_path: Path) -> None:
    where = f"there is no model in {tmp_path}/absent here"
    assert _checked(tmp_path / "absent") == [
        f"whether the longest episode fits could not be checked: {where}"
    ]


@pytest.mark.parametrize("what", ["empty", "cut short", "without words"])
def test_a_model_that_cannot_be_read_here_is_said_in_a_line(model: Path, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if what in ("cut short", "without words"):
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        words = (folder / "tokenizer.json").read_text(encoding="utf-8")
        text = words[:500] if what == "cut short" else "{}"
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    [line] = _checked(folder)
    assert line.startswith(
        f"whether the longest episode fits could not be checked: {folder} cannot be read here ("
    )
    assert "\n" not in line


_LORA = "trainer.policy.model.lora"


def _adapted(model: Path | str, *overrides: str) -> list[str]:
    return preflight.check_adapter(_config("maze_cpu", f"trainer.policy.model.path={model}", *overrides))


def test_an_adapter_of_the_language_layers_is_one(model: Path) -> None:
    assert _adapted(model) == []
    assert _adapted(model, f"{_LORA}.target_modules='.*language_model.*q_proj'") == []
    assert _adapted(model, f"{_LORA}.rank=0", f"{_LORA}.target_modules=nothing") == []


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        ("'.*(q_proj|attn.qkv)'", r"base_model\.model\.model\.visual\..*: belongs to the picture tower"),
        ("q_project", "Target modules q_project not found"),
    ],
)
def test_an_adapter_that_engines_would_ignore_is_refused(model: Path, targets: str, why: str) -> None:
    settings = f"{_LORA}.target_modules={targets}", f"{_LORA}.exclude_modules=null"
    with pytest.raises(ConfigError, match=rf"(?s)do not work for .*{why}") as caught:
        _adapted(model, *settings)
    assert len(str(caught.value).splitlines()) <= 7


def test_a_model_that_cannot_be_read_leaves_the_adapter_unchecked(tmp_path: Path) -> None:
    [warning] = _adapted(tmp_path / "nowhere")
    assert warning.startswith("whether the engines know every LoRA module could not be checked: ")
