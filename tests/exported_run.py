"""A made-up run's folder with exported and shared adapters; their numbers do not matter."""

import json
from pathlib import Path

import adapter_files

from skyrl_maze import recipes, versions

RUN = adapter_files.RUN


def export(run: Path, step: int, run_id: str = RUN, rank: int = 4) -> Path:
    """An adapter as `MazeTrainer.save_models` leaves it."""
    config = adapter_files.config_of(r=rank)

    def build(out: Path) -> None:
        (out / "adapter_config.json").write_text(json.dumps(config))
        (out / "adapter_model.safetensors").write_bytes(b"matrices")

    policy = run / f"exports/global_step_{step}/policy"
    versions.publish_folder(policy, build, run_id, step, 0)
    return policy


def made_run(root: Path) -> Path:
    """A run that exported steps 10 and 20 and shared step 21, with the recipe it was started with."""
    export(root, 10)
    export(root, 20)
    adapter_files.published(root / "lora_sync", 21)
    recipes.record(["+recipe=maze", f"run.id={RUN}", f"run.root={root}"], root)
    return root
