"""Saving and going on, by SkyRL's settings; how ranks and folders do it is tested with them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from bare_trainer import trainer_of

from skyrl_maze import checkpoints
from skyrl_maze.batches import TrainBatches
from skyrl_maze.errors import CheckpointError


class Log:
    def __init__(self):
        self.notes = []

    def event(self, kind, **fields):
        self.notes.append(fields.get("text", kind))


def trainer(folder: Path, *settings, rows=12, steps=9):
    """A trainer whose ranks save a file and remember what they load."""
    if not any(setting.startswith("trainer.resume_mode") for setting in settings):
        settings = ("trainer.resume_mode=latest", *settings)
    made = trainer_of(f"run.root={folder}", *settings)
    made.train_dataloader = TrainBatches(range(rows), list, 4, 3, made.cfg.trainer.seed)
    made.total_training_steps, made.loaded, made.exported, made._log = steps, [], [], Log()
    made.dispatch = SimpleNamespace(
        save_checkpoint=lambda _model, scratch, _tokenizer: (Path(scratch) / "a.safetensors").write_text("a"),
        load_checkpoint=lambda _model, path: made.loaded.append(path),
    )
    made.save_models = lambda: made.exported.append(made.global_step)
    Path(made.cfg.trainer.ckpt_path).mkdir(parents=True, exist_ok=True)
    made._begin_attempt()
    return made


def saved(folder: Path, steps: int, *settings):
    """A trainer that took so many steps and saved after each."""
    made = trainer(folder, *settings)
    for step, _ in zip(range(1, steps + 1), made.train_dataloader, strict=False):
        made.global_step = step
        made.save_checkpoints()
    return made


def test_a_run_that_never_saved_begins_at_the_beginning(tmp_path):
    first = trainer(tmp_path)
    assert first.load_checkpoints() == (0, None)
    assert first._log.notes == []
    (tmp_path / "metrics.jsonl").touch()  # of a launch that ended before its first checkpoint
    second = trainer(tmp_path)
    assert second.load_checkpoints() == (0, None)
    assert second._log.notes == [
        "begins anew: an earlier launch of this run left no checkpoint to go on from"
    ]


@pytest.mark.parametrize("steps", [2, 3], ids=["within an epoch", "at its end"])
def test_a_run_goes_on_where_it_was_saved(tmp_path, steps):
    before = saved(tmp_path, steps)
    after = trainer(tmp_path)
    path = str(tmp_path / f"checkpoints/global_step_{steps}")
    assert after.load_checkpoints() == (steps, path)
    assert after.loaded == [path]
    assert after.train_dataloader.position == steps
    assert next(iter(after.train_dataloader)) == next(iter(before.train_dataloader))
    assert before.exported == list(range(1, steps + 1)), "the merged adapter lies beside each"


def test_a_step_is_saved_once(tmp_path):
    saved(tmp_path, 2)
    after = trainer(tmp_path)
    after.global_step = after.load_checkpoints()[0]
    path = tmp_path / "checkpoints/global_step_2/COMPLETE"
    before = path.stat().st_mtime_ns
    assert after.save_checkpoints() == str(path.parent)
    assert path.stat().st_mtime_ns == before
    assert after.exported == []


def test_a_run_at_its_last_step_takes_no_other(tmp_path):
    saved(tmp_path, 2)
    after = trainer(tmp_path, steps=2)
    assert after.load_checkpoints()[0] == 2
    assert list(after.train_dataloader) == []


def test_with_other_data_the_order_is_new_and_a_note_says_so(tmp_path):
    saved(tmp_path, 2)
    after = trainer(tmp_path, rows=40)
    assert after.load_checkpoints()[0] == 2
    assert after.train_dataloader.position == 2
    assert "its order is new" in after._log.notes[-2]


def test_a_new_beginning_counts_as_newer(tmp_path):
    saved(tmp_path, 3)
    saved(tmp_path, 1)
    assert trainer(tmp_path).load_checkpoints()[0] == 1


def test_old_checkpoints_go(tmp_path):
    saved(tmp_path, 3, "trainer.max_ckpts_to_keep=2")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["global_step_2", "global_step_3", "latest_ckpt_global_step.txt"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("trainer.policy.model.lora.rank=16", "lora.rank: saved with 8, now 16"),
        ("trainer.policy.model.lora.alpha=64", "lora.alpha: saved with 16.0, now 64.0"),
        ("trainer.policy.model.path=other/model", "now 'other/model'"),
    ],
)
def test_another_policy_is_refused_before_anything_is_loaded(tmp_path, setting, said):
    saved(tmp_path, 1)
    after = trainer(tmp_path, setting)
    with pytest.raises(CheckpointError, match=said):
        after.load_checkpoints()
    assert after.loaded == []


def test_a_folder_named_by_hand_is_taken_and_stays(tmp_path):
    saved(tmp_path / "first", 2)
    path = tmp_path / "first/checkpoints/global_step_1"
    after = trainer(tmp_path / "second", "trainer.resume_mode=from_path", f"trainer.resume_path={path}")
    assert after.load_checkpoints() == (1, str(path))
    after.global_step = 1
    after.save_checkpoints()
    assert checkpoints.at(path).step == checkpoints.at(tmp_path / "second/checkpoints/global_step_1").step


def test_leftovers_of_a_crash_are_gone_when_the_run_starts_again(tmp_path):
    saved(tmp_path, 1)
    left = tmp_path / "checkpoints/.global_step_2.abc"
    left.mkdir()
    trainer(tmp_path)
    assert not left.exists()


def test_in_a_folder_outside_the_run_only_old_leftovers_go(tmp_path):
    left = tmp_path / "shared/.global_step_2.abc"
    left.mkdir(parents=True)
    trainer(tmp_path / "run", f"trainer.ckpt_path={tmp_path}/shared")
    assert left.exists()
