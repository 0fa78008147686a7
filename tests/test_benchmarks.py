"""The benchmarks run, and say what the documentation quotes of them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_rollouts_send_a_fraction_of_what_skyrls_own_send(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        "benchmarks/generator.py",
        "--turns",
        "6",
        "--episodes",
        "2",
        "--json",
        str(figures),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "An episode of 6 turns" in done.stdout
    measured = json.loads(figures.read_text(encoding="utf-8"))
    ours, stock = measured["ours"], measured["stock"]
    assert ours["preprocessings"] == 6, "each picture once"
    assert stock["http_bytes"] > 1000 * ours["http_bytes"]
    assert ours["seconds"] > 0
    for turns, growth in measured["growth"].items():
        assert growth["preprocessings"] == int(turns)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_adapters_way_is_measured_beside_a_copy_and_skyrls_own(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/lora.py", "--small", "--repeats", "2", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 matrices of 16,384 parameters in all, 6 ranks" in done.stdout
    measured = json.loads(figures.read_text(encoding="utf-8"))
    parameters = sum(map(math.prod, measured["lora_shapes"].values()))
    assert measured["lora_matrices"] == 2 * 7 * 2
    assert measured["lora_parameters"] == parameters
    assert 2 * parameters < measured["adapter_bytes"] < 4 * parameters, "bfloat16, with the names"
    assert measured["bytes_written"] > 2 * measured["adapter_bytes"], "shards, and the merged file"
    assert measured["stock_bytes_written"] > 4 * parameters, "float32"
    assert len(measured["repeats"]) == 2
    assert all(value > 0 for repeat in measured["repeats"] for value in repeat.values())
    assert measured["checkpoint_bytes"] > 3 * 4 * parameters, "the matrices, and two moments of each"
    # What is computed for the large model holds no more than what SkyRL really writes.
    computed, written = (
        measured["stock_scaled_down_bytes_computed"],
        measured["stock_scaled_down_bytes_measured"],
    )
    assert computed < written < 1.5 * computed


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_start_up_is_measured_beside_what_skyrl_imports_itself(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/startup.py", "--repeats", "1", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(figures.read_text(encoding="utf-8"))
    assert {name: len(seconds) for name, seconds in measured["commands"].items()} == {
        "python -c pass": 1,
        "skyrl-maze --help": 1,
        "skyrl-maze recipes show maze": 1,
    }
    assert set(measured["processes"]) == {"trainer task", "policy rank", "merger", "vLLM worker"}
    for process in measured["processes"].values():
        assert 0 < process["ours_modules"] < process["base_modules"] / 10
        assert process["base_s"][0] > process["ours_s"][0] > 0
