"""The command prints what can be pasted, and says on stderr what to do with it."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from exported_run import RUN, export, made_run

from skyrl_maze import deploy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python with the ordinary build of vLLM."""
    monkeypatch.setattr(deploy, "engine_here", lambda: "vllm")


def test_the_command_can_be_pasted(run: Path, run_skyrl_maze, cuda: None) -> None:
    code, out, err = run_skyrl_maze("serve", run, "--port", "8001", "--", "--api-key", "a b")
    assert code == 0, err
    plan = deploy.plan(deploy.recorded(run), deploy.newest(run, deploy.recorded(run))[0])
    expected = [*deploy.vllm_command(plan, "127.0.0.1", 8001, "vllm"), "--api-key", "a b"]
    assert shlex.split(out.replace("\\\n", " ")) == expected
    assert "note: a version is removed when the run has shared newer ones" in err
    play = shlex.split(err.partition("then ")[2])
    assert play[:6] == [
        *("skyrl-maze", "play", "--endpoint"),
        "http://127.0.0.1:8001/v1",
        "--model",
        f"{RUN}-step21",
    ]
    assert play[6:8] == ["--recipe", str(run / "recipe.yaml")]


def test_a_word_with_dashes_in_it_stays_whole(run: Path, run_skyrl_maze, cuda: None) -> None:
    code, out, _ = run_skyrl_maze("serve", run, "--base", "/my --model", "--", "--chat-template", "a --b")
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {out}"], capture_output=True, text=True
    ).stdout.split("\n")
    assert (code, words[2], words[-2]) == (0, "/my --model", "a --b")


def test_a_name_is_said_as_it_is(run: Path, run_skyrl_maze) -> None:
    code, _, err = run_skyrl_maze(
        "serve", run, "--base-name", "a:key", "--name", "key:b", "--ray", "s3://b/a"
    )
    assert code == 0
    assert "--model a:key:key:b " in err


def test_without_a_gpu_it_is_the_command_that_works_there(run: Path, run_skyrl_maze, monkeypatch) -> None:
    monkeypatch.setattr(deploy, "engine_here", lambda: "vllm-cpu")
    code, out, err = run_skyrl_maze("serve", run)
    assert code == 0, err
    assert shlex.split(out)[0] == "VLLM_CPU_OMP_THREADS_BIND=nobind"


def test_the_config_of_ray_serve_is_yaml_alone(run: Path, run_skyrl_maze) -> None:
    code, out, err = run_skyrl_maze(
        "serve", run, "--ray", "s3://b/a/", "--step", 20, "--replicas", 3, "--name", "v1"
    )
    assert code == 0, err
    plan = deploy.plan(deploy.recorded(run), deploy.newest(run, deploy.recorded(run), 20)[0])
    assert yaml.safe_load(out) == deploy.ray_config(plan, "s3://b/a", 3, cpu=False)
    policy = run / "exports/global_step_20/policy"
    assert f"skyrl-maze lora upload {policy} --to s3://b/a/ --name v1\n" in err
    assert "--model model:v1 " in err


def test_what_is_passed_over_is_told(run: Path, run_skyrl_maze) -> None:
    (export(run, 30) / "adapter_model.safetensors").write_bytes(b"other")
    code, out, err = run_skyrl_maze("serve", run)
    assert code == 0, err
    assert "note: not served: " in err
    assert "adapter_model.safetensors: has 5 bytes, must have 8" in err
    assert "versions/21.0" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "5"], "error: no adapter of step 5 in "),
        (["--ray", "s3://b/a", "--run"], "error: --ray writes a config: leave out --run and options of vLLM"),
        (["--ray", "s3://b/a", "--", "--x"], "error: --ray writes a config"),
        (["--ray", "/shared/adapters"], "error: --ray /shared/adapters: Ray Serve fetches adapters from"),
        (["--recipe", "mazes"], "error: no recipe 'mazes'"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    run: Path, run_skyrl_maze, arguments: list[str], said: str
) -> None:
    code, out, err = run_skyrl_maze("serve", run, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(said)


def test_no_server_is_started_without_an_engine(run: Path, run_skyrl_maze, monkeypatch) -> None:
    monkeypatch.setattr(deploy, "engine_here", lambda: None)
    code, _, err = run_skyrl_maze("serve", run, "--run")
    assert code == 2
    assert "error: vLLM is not installed for " in err
