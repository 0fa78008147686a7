"""What a run keeps on the shared folder, in bytes, from above: checkpoints, versions, exports."""

from dataclasses import dataclass
from math import prod

from skyrl_maze import task
from skyrl_maze.errors import ConfigError, SetupError
from skyrl_maze.preflight import adapter_shapes
from skyrl_maze.settings import TrainConfig

# Weights, and Adam's two moments, in float32.
_TRAINED_COPIES, _FLOAT32_BYTES = 3, 4
# A version holds the shards and what they were merged to.
_VERSION_COPIES = 2
# Of the language layers of Qwen3-VL-8B, which the published run trains: 36 layers, each with matrices of
# 4096 -> 4096, 1024, 1024 and back, and 4096 <-> 12288 three times; see `benchmarks/lora_setup.py`.
PARAMETERS_PER_RANK_8B = 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run has on disk at most, logs and evaluations aside."""

    checkpoints: int
    versions: int
    exports: int
    parameters: int
    """Of the adapter."""
    assumed: str
    """Why `parameters` are those of Qwen3-VL-8B; empty if they were counted."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.checkpoints + self.versions + self.exports


def steps_of(cfg: TrainConfig) -> int:
    """Training steps of the whole run."""
    trainer = cfg.trainer
    steps = trainer.epochs * (task.of(cfg).rows(cfg) // max(1, trainer.train_batch_size))
    return int(min(steps, trainer.max_training_steps or steps))


def disk_need(cfg: TrainConfig) -> DiskNeed:
    """What the run will have on disk when it holds most: one of a kind more than is kept, as it is written.

    Raises:
        ConfigError: the model has no module for the LoRA settings, or the run trains no adapter.
    """
    trainer, lora = cfg.trainer, cfg.trainer.policy.model.lora
    if lora.rank == 0:
        raise ConfigError(
            "trainer.policy.model.lora.rank=0 trains the whole model, whose checkpoints are not counted"
        )
    assumed = ""
    try:
        parameters = sum(map(prod, adapter_shapes(cfg).values()))
    except SetupError as error:
        assumed, parameters = str(error), lora.rank * PARAMETERS_PER_RANK_8B
    wire = parameters * (_FLOAT32_BYTES if cfg.run.adapter.wire_dtype == "float32" else 2)
    kept, saved = trainer.max_ckpts_to_keep, _times(cfg, trainer.ckpt_interval)
    held = min(kept + 1, saved) if kept >= 0 else saved
    return DiskNeed(
        checkpoints=held * parameters * _TRAINED_COPIES * _FLOAT32_BYTES,
        versions=(cfg.run.adapter.keep + 1) * _VERSION_COPIES * wire,
        exports=_times(cfg, trainer.hf_save_interval) * wire,
        parameters=parameters,
        assumed=assumed,
    )


def _times(cfg: TrainConfig, interval: int) -> int:
    """How often SkyRL saves: each `interval` steps and after each epoch; never if it is not positive."""
    return -(-steps_of(cfg) // interval) + cfg.trainer.epochs - 1 if interval > 0 else 0
