"""`skyrl-maze lora`: what it prints and makes, and how it refuses."""

import functools
import json
import subprocess
import sys

import pytest
from adapter_files import RUN, config_of, published, tensors_of, write_all

from skyrl_maze import complete, lora_cli


@pytest.fixture
def run(run_skyrl_maze, monkeypatch):
    """`skyrl-maze lora ...` on a terminal of the usual width."""
    monkeypatch.setenv("COLUMNS", "100")
    return functools.partial(run_skyrl_maze, "lora")


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    write_all(folder, tensors_of(), world_size=3)
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    return folder


@pytest.mark.parametrize("command", [[], ["merge"], ["verify"]])
def test_help_teaches_with_an_example(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "Example: skyrl-maze lora " in " ".join(out.split())


def test_merge_makes_a_folder_that_verify_finds_whole(run, shards):
    code, out, err = run("merge", shards, "new/out", "--config", "config.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:3] == [
        "merged 8 matrices of 3 ranks into new/out",
        f"run      {RUN}",
        "step     1, attempt 0",
    ]
    assert lines[3].startswith("file     adapter_config.json, ")
    assert lines[4].startswith("file     adapter_model.safetensors, ")
    code, out, err = run("verify", "new/out")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["new/out is whole", *lines[1:]]


def test_merge_takes_the_config_beside_the_shards(run, shards, tmp_path):
    (tmp_path / "config.json").rename(shards / "adapter_config.json")
    assert run("merge", shards, "out")[0] == 0
    assert complete.verify(tmp_path / "out", RUN)


def test_progress_goes_to_a_terminal_only(run, shards, monkeypatch):
    monkeypatch.setattr(lora_cli, "_watched", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    code, out, err = run("merge", shards, "out", "--config", "config.json")
    assert code == 0
    assert "merging" in err
    assert "merging" not in out


def test_merge_never_overwrites(run, shards, tmp_path):
    (tmp_path / "out").mkdir()
    code, out, err = run("merge", shards, "out", "--config", "config.json")
    assert (code, out) == (2, "")
    assert err.startswith("error: cannot write ")
    assert "exists and is never overwritten" in err
    assert list((tmp_path / "out").iterdir()) == []


def test_merge_without_a_config_says_what_to_give(run, shards):
    code, out, err = run("merge", shards, "out")
    assert (code, out) == (2, "")
    assert err.startswith("error: cannot read the adapter config ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("file", ["rank-00001.json", "rank-00001.safetensors"])
def test_merge_of_damaged_shards_makes_nothing(run, shards, tmp_path, file):
    (shards / file).write_bytes((shards / file).read_bytes()[:-3])
    code, out, err = run("merge", shards, "out", "--config", "config.json")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert file in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "shards"]


def test_verify_of_a_version_and_of_its_adapter_folder(run, tmp_path):
    version = published(tmp_path, 3)
    for place in (version.path, version.adapter):
        code, out, _ = run("verify", place)
        assert (code, out.splitlines()[:2]) == (0, [f"{version.path} is whole", f"run      {RUN}"])


def test_verify_names_the_damage(run, tmp_path):
    version = published(tmp_path, 3)
    (version.adapter / "adapter_config.json").write_text("{}")
    code, out, err = run("verify", version.path)
    assert (code, out) == (2, "")
    assert "adapter/adapter_config.json: has 2 bytes, must have" in err


def test_verify_of_anything_else_is_one_line(run, tmp_path):
    code, out, err = run("verify", tmp_path)
    assert (code, out) == (2, "")
    assert err == f"error: cannot read {tmp_path}/COMPLETE: No such file or directory\n"


def test_no_trainer_is_loaded(shards, tmp_path):
    code = (
        "import sys; from skyrl_maze import cli\n"
        "try: cli.app()\n"
        "finally: print([name for name in ('torch', 'ray', 'skyrl') if name in sys.modules])"
    )
    argv = ["lora", "merge", shards, tmp_path / "out", "--config", tmp_path / "config.json"]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
