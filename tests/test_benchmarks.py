"""The benchmarks run, and say what the documentation quotes of them."""

import json
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
