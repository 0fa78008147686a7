"""What ranks save is what ranks load, be they as many or not; what cannot be used is refused on all alike."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from skyrl_maze import training_state

RANK = Path(__file__).with_name("training_rank.py")


class Leg:
    """A part of a run: what it loaded, where it ended, how each rank fared."""

    def __init__(
        self, folder: Path, world_size: int, steps: int, source: Path | None, target: Path | None = None
    ) -> None:
        folder.mkdir()
        self.checkpoint = target or folder / "checkpoint"
        self.checkpoint.mkdir(exist_ok=True)
        rest = [str(world_size), str(steps), str(source or "-"), str(self.checkpoint)]
        ranks = [
            subprocess.Popen([sys.executable, RANK, folder, str(rank), *rest]) for rank in range(world_size)
        ]
        try:
            assert [rank.wait(240) for rank in ranks] == [0] * world_size
        finally:
            for rank in ranks:
                rank.kill()
        self.outcomes: list[dict[str, Any]] = [
            json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(world_size)
        ]
        self.whole = torch.load(folder / "whole.pt") if (folder / "whole.pt").exists() else {}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Leg:
    """Three steps on 2 ranks."""
    return Leg(tmp_path_factory.mktemp("first") / "leg", 2, 3, None)


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_as_if_it_had_never_stopped(first: Leg, tmp_path: Path) -> None:
    """2 ranks, 1 rank, 3 ranks (some of which hold no rows), 2 ranks; beside it one that never stops."""
    legs = [first]
    for number, world_size in enumerate((1, 3, 2)):
        legs.append(Leg(tmp_path / str(number), world_size, 3, legs[-1].checkpoint))
        assert_same(legs[-1].whole["loaded"], legs[-2].whole["ended"])
        assert any(name.endswith("/exp_avg_sq") for name in legs[-1].whole["loaded"])
    unbroken = Leg(tmp_path / "unbroken", 1, 12, None)
    assert legs[-1].whole["ended"].keys() == unbroken.whole["ended"].keys()
    for name, tensor in unbroken.whole["ended"].items():
        torch.testing.assert_close(legs[-1].whole["ended"][name], tensor, rtol=1e-5, atol=1e-7)
    assert [rate for leg in legs for rate in leg.outcomes[0]["rates"]] == unbroken.outcomes[0]["rates"]
    # Each rank that was there before goes on with its own chance; the others with what their seed gave.
    assert [[outcome["chance"] for outcome in leg.outcomes] for leg in legs[1:]] == [
        [True],
        [True, False, False],
        [True, True],
    ]


@pytest.mark.slow
def test_a_checkpoint_holds_only_what_is_trained_and_no_pickle(first: Leg) -> None:
    files = sorted(path.name for path in first.checkpoint.iterdir())
    assert [name for name in files if not name.endswith((".json", ".safetensors"))] == []
    names = set()
    for path in first.checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    assert names
    assert all("lora_" in name for name in names)


def _without_rank_record(folder: Path) -> None:
    (folder / "rank-00000.json").unlink()


def _with_a_torn_record(folder: Path) -> None:
    path = folder / "rank-00001.json"
    path.write_bytes(path.read_bytes()[:-20])


def _with_torn_tensors(folder: Path) -> None:
    path = next(folder.glob("shard-00002*"))
    path.write_bytes(path.read_bytes()[:-20])


def _without_some_tensors(folder: Path) -> None:
    for path in folder.glob("shard-*"):
        path.unlink()
    save_file({"some.lora_A.default.weight": torch.ones(2)}, folder / "shard-00001.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_rank_record, "rank-00000.json"),
        (_with_a_torn_record, "rank-00001.json is torn"),
        (_with_torn_tensors, "incomplete"),
        (_without_some_tensors, "is not saved; .*is saved and not trained"),
    ],
)
def test_what_cannot_be_used_is_an_error_on_all_ranks(
    first: Leg, tmp_path: Path, damage: Any, said: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(first.checkpoint, folder)
    damage(folder)
    outcomes = Leg(tmp_path / "leg", 2, 1, folder).outcomes
    assert [outcome["ended"] for outcome in outcomes] == ["CheckpointError"] * 2
    assert len({outcome["message"] for outcome in outcomes}) == 1
    assert re.search(said, outcomes[0]["message"]), outcomes[0]["message"]
    assert str(folder) in outcomes[0]["message"]


@pytest.mark.slow
def test_a_rank_that_cannot_write_ends_all_with_its_name(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "rank-00001.json").write_text("{}")  # nothing is ever overwritten
    outcomes = Leg(tmp_path / "leg", 2, 1, None, target).outcomes
    assert [outcome["ended"] for outcome in outcomes] == ["CheckpointError"] * 2
    assert all("rank 1 on" in outcome["message"] for outcome in outcomes)


def optimizer_and_schedule(lr: float, **settings: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=lr, **settings)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def steps(optimizer: Any, schedule: Any, count: int) -> list[float]:
    used = []
    for _ in range(count):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize("rate", [0.08, 0.02, 0.0])
def test_a_rate_that_was_changed_is_used_from_where_the_schedule_was(rate: float) -> None:
    before = optimizer_and_schedule(0.08, weight_decay=0.1)
    assert steps(*before, 3) == [0.08, 0.04, 0.02]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in before[0].param_groups]
    optimizer, schedule = optimizer_and_schedule(rate, weight_decay=0.3, betas=(0.8, 0.9))
    training_state.go_on(optimizer, schedule, json.loads(json.dumps(groups)), before[1].state_dict())
    assert schedule.get_last_lr() == [pytest.approx(rate / 8)]
    assert steps(optimizer, schedule, 2) == pytest.approx([rate / 8, rate / 16])
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["betas"]) == (
        0.3,
        (0.8, 0.9),
    )


def test_a_run_that_began_without_a_rate_gets_one() -> None:
    before = optimizer_and_schedule(0.0)
    steps(*before, 2)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in before[0].param_groups]
    optimizer, schedule = optimizer_and_schedule(0.4)
    training_state.go_on(optimizer, schedule, groups, before[1].state_dict())
    assert steps(optimizer, schedule, 2) == pytest.approx([0.4, 0.05])


def test_random_states_survive_as_json() -> None:
    state = {
        "cpu": torch.Generator().manual_seed(3).get_state(),
        "cuda": torch.arange(16, dtype=torch.uint8),
        "numpy": np.random.RandomState(3).get_state(),
        "random": random.Random(3).getstate(),
    }
    back = training_state._random_from_json(json.loads(json.dumps(training_state._random_to_json(state))))
    assert torch.equal(back["cpu"], state["cpu"])
    assert torch.equal(back["cuda"], state["cuda"])
    assert back["random"] == state["random"]
    there, here = np.random.RandomState(), np.random.RandomState(3)
    there.set_state(back["numpy"])
    assert there.random_sample() == here.random_sample()
