"""Saves a checkpoint in child processes that die, or run out of disk, one moment later each time.

    python checkpoint_crashes.py kill|full FOLDER      prints how many moments there were

After each death the newest checkpoint must be the old one or the new one, whole, and a fresh start must go on
from it and leave nothing behind.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from adapter_crashes import BROKEN, DONE, REFUSED, UNHARMED, Fate, in_child, strike_at_each_moment

from skyrl_maze import checkpoints, training_state
from skyrl_maze.checkpoints import Policy, RunState
from skyrl_maze.errors import CheckpointError, SetupError

RUN = "run-1"
RANDOM = {
    "cpu": torch.get_rng_state(),
    "numpy": ("MT19937", torch.zeros(3), 0, 0, 0.0),
    "random": (3, (1,), None),
}


def trained(steps: int):
    """A model after so many steps, its optimizer and its schedule."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def save(root: Path, step: int) -> None:
    state = RunState(
        step, step, {"rows": 4, "batch_size": 2, "seed": 1}, 1, Policy("m", "", 8, 8.0, "a", "b")
    )
    parts = trained(step)
    checkpoints.save(root, RUN, 0, state, lambda scratch: training_state.save(scratch, *parts, RANDOM))


def life(root: Path, mode: str, strike_at: int) -> int:
    """What a run does from its start to the end of a step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fate = Fate(mode, strike_at)
    try:
        checkpoints.clean(root, 0)
        save(root, 2)
        checkpoints.retain(root, RUN, 1)
    except (SetupError, CheckpointError) as error:
        said = "\n" not in str(error) and ("bytes free" in str(error) or "No space left" in str(error))
        return REFUSED if said else BROKEN
    except BaseException:
        traceback.print_exc()
        return BROKEN
    return DONE if fate.left > 0 else UNHARMED


def check(root: Path, steps: set[int]) -> None:
    """The newest is one of these steps, and what is loaded from it is what was trained."""
    found = checkpoints.newest(root, RUN, lambda _: None)
    assert found is not None
    assert found.step in steps, found
    parts, expected = trained(0), trained(found.step)
    training_state.load(found.path, *parts)
    for loaded, whole in zip(parts[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(loaded, whole)
        for name, value in expected[1].state[whole].items():
            assert torch.equal(parts[1].state[loaded][name], value), name
    assert parts[2].get_last_lr() == expected[2].get_last_lr()


def check_fresh_start(root: Path, steps: set[int]) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check(root, steps)
        checkpoints.clean(root, 0)
        save(root, 2)
        checkpoints.retain(root, RUN, 1)
        check(root, {2})
        left = sorted(path.name for path in root.iterdir())
        assert left == ["global_step_2", checkpoints.LATEST_FILE], left
    except BaseException:
        traceback.print_exc()
        return BROKEN
    return DONE


def begin(before: Path) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save(before, 1)
    (before / ".global_step_2.x").mkdir()
    (before / ".global_step_2.x" / "half").write_text("half")
    return DONE


def main(mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    trained(1)  # imports what children would otherwise import one by one
    before = folder / "before"
    before.mkdir()
    assert in_child(begin, before) == DONE
    strike_at_each_moment(mode, folder, life, check_fresh_start)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], Path(sys.argv[2]))
