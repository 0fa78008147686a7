"""Ranks share an adapter through a folder: whole and alike for all, or an error that each of them raises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from skyrl_maze import versions

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("sharing_rank.py")


def share(folder: Path, world_size: int, fault: str = "") -> list[dict[str, object]]:
    """How each of the ranks ended."""
    (folder / "run/versions/4.0").mkdir(parents=True)
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), str(folder), str(rank), str(world_size), fault])
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(180) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_the_merged_adapter_equals_the_ranks_parameters(tmp_path: Path, world_size: int) -> None:
    # Rank 5 and 7 rows over 3 and 6 ranks: shards are uneven, and some hold nothing.
    outcomes = share(tmp_path, world_size)
    version = versions.latest(tmp_path, "run", content=True)
    assert version is not None
    merged = safetensors.torch.load_file(version.adapter / "adapter_model.safetensors")
    largest = max(float(tensor.abs().max()) for name, tensor in merged.items() if "lora_B" in name)
    assert outcomes[0] == {"ended": "shared", "loaded": [str(version.adapter)] * 2, "largest_b": largest}
    others = {"ended": "shared", "loaded": [], "largest_b": None}
    assert outcomes[1:] == [others] * (world_size - 1)
    whole = {name.replace(".default.", "."): t for name, t in torch.load(tmp_path / "whole.pt").items()}
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)


def test_the_ranks_know_that_nothing_is_learned_yet(tmp_path: Path) -> None:
    assert share(tmp_path, 2, "nothing is learned yet")[0]["largest_b"] == 0


def test_an_engine_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    assert [outcome["ended"] for outcome in share(tmp_path, 2, "an engine fails once")] == ["shared"] * 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a shard is there already", "rank 1"),
        ("the head is gone", "the head node is gone"),
        ("an engine fails", "1 of 2 engines failed 3 times to load 4.0"),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_its_cause(tmp_path: Path, fault: str, said: str) -> None:
    outcomes = share(tmp_path, 2, fault)
    assert [outcome["ended"] for outcome in outcomes] == ["AdapterError"] * 2
    for outcome in outcomes:
        assert said in str(outcome["message"])
        assert "4.0" in str(outcome["message"])
    assert fault == "an engine fails" or versions.latest(tmp_path, "run") is None
