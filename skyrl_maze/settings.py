"""Every setting of a run: SkyRL's, and those of this package."""

from dataclasses import dataclass, field
from pathlib import Path

from skyrl.train.config.config import BaseConfig, GeneratorConfig, SkyRLTrainConfig

from skyrl_maze.faults import RolloutConfig
from skyrl_maze.hang_detection import HangConfig

DEVICES = ("cuda", "cpu")
CONSOLES = ("full", "progress")
STARTS = ("unfinished", "habit")
WIRE_DTYPES = ("bfloat16", "float32", "float16")


@dataclass
class AdapterConfig(BaseConfig):
    """How the LoRA adapter is shared, below `trainer.policy.model.lora.lora_sync_path`."""

    wire_dtype: str = "bfloat16"
    """What the shards and the merged adapter are written in: `bfloat16`, `float16` or `float32`."""
    keep: int = 3
    """Complete versions that stay."""


@dataclass
class RunConfig(BaseConfig):
    """What belongs to the run as a whole, not to one of its parts."""

    task: str = "skyrl_maze.maze_task:MazeTask"
    """What is trained on, as MODULE:CLASS; see `task.Task`."""
    id: str = "maze"
    """Name of the run: the same id resumes."""
    root: str = "runs/maze"
    """Folder below which checkpoints, exports, logs and metrics lie; made absolute when read."""
    device: str = "cuda"
    """`cuda`, or `cpu` to rehearse without a GPU."""
    join_cluster: bool = False
    """With `device=cpu`: run on the logical GPUs of the Ray cluster that is there; else on one of its own."""
    console: str = "full"
    """`full` prints all that SkyRL, Ray and vLLM say; `progress` one line a step, the rest to a log file."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    warm_up_steps: int = 200
    """Supervised steps of the rehearsal's tiny model; 0 leaves it random, so that it may say anything."""
    school_seed: int = 0
    """Seed of the miniature run's partly taught model."""
    start: str = "unfinished"
    """What the miniature run begins with: `unfinished` has begun to read, `habit` stops where to go left."""
    only_model: bool = False
    """End once the model is built, where this package builds it."""

    def __post_init__(self) -> None:
        self.root = str(Path(self.root).expanduser().absolute())


@dataclass
class RolloutGeneratorConfig(GeneratorConfig):
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class TrainConfig(SkyRLTrainConfig):
    """SkyRL's config with the sections of this package in it; each task adds its own."""

    run: RunConfig = field(default_factory=RunConfig)
    generator: RolloutGeneratorConfig = field(default_factory=RolloutGeneratorConfig)


def policy_ranks(cfg: TrainConfig) -> int:
    """FSDP ranks of the policy, one a GPU."""
    placement = cfg.trainer.placement
    return int(placement.policy_num_nodes * placement.policy_num_gpus_per_node)


def needed_gpus(cfg: TrainConfig) -> int:
    """GPUs, or on a CPU logical GPUs, that the run's placement groups ask for."""
    placement, algorithm, reference = cfg.trainer.placement, cfg.trainer.algorithm, 0
    if placement.colocate_all:
        return policy_ranks(cfg)
    if (algorithm.use_kl_loss or algorithm.use_kl_in_reward) and not placement.colocate_policy_ref:
        reference = placement.ref_num_nodes * placement.ref_num_gpus_per_node
    return int(policy_ranks(cfg) + reference + engine_gpus(cfg))


def engine_gpus(cfg: TrainConfig) -> int:
    """GPUs of all rollout engines together."""
    engine = cfg.generator.inference_engine
    parallel = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    return int(engine.num_engines * parallel)
