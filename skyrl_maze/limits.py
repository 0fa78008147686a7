"""Settings that are well formed and cannot work, each with what would."""

import operator
import re
from pathlib import Path

from skyrl_maze import task
from skyrl_maze.errors import closest
from skyrl_maze.settings import (
    CONSOLES,
    DEVICES,
    STARTS,
    WIRE_DTYPES,
    TrainConfig,
    policy_ranks,
)


def impossible(cfg: TrainConfig) -> list[str]:
    """Settings that are well formed and cannot work, each with what would."""
    return [
        *_run_problems(cfg),
        *folder_problems(cfg),
        *_range_problems(cfg),
        *[f"run.hang.{p}" for p in cfg.run.hang.problems()],
        *task.of(cfg).problems(cfg),
        *[f"generator.rollouts.{p}" for p in cfg.generator.rollouts.problems()],
        *batch_problems(cfg),
        *_group_problems(cfg),
        *_adapter_problems(cfg),
    ]


def skyrl_problems(cfg: TrainConfig) -> list[str]:
    """What SkyRL's own check says; it stops at the first."""
    from skyrl.train.utils import validate_cfg

    from skyrl_maze import advantages

    advantages.register()
    try:
        validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError) as error:
        return [f"{error or type(error).__name__} (SkyRL's check)"]
    return []


# One path component: the id names a folder.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _run_problems(cfg: TrainConfig) -> list[str]:
    problems = []
    for name, allowed in (("device", DEVICES), ("console", CONSOLES), ("start", STARTS)):
        if (value := getattr(cfg.run, name)) not in allowed:
            problems.append(f"run.{name}={value!r}{closest(value, allowed)}; allowed: {', '.join(allowed)}")
    if not _ID.fullmatch(cfg.run.id):
        problems.append(
            f"run.id={cfg.run.id!r} names a folder: "
            "letters, digits, '.', '_' and '-', the first a letter or digit"
        )
    if cfg.run.device == "cpu" and cfg.trainer.placement.colocate_all:
        problems.append(
            "trainer.placement.colocate_all=true needs an engine that can sleep; on a CPU set it to false"
        )
    if not cfg.generator.vision_language_generator:
        problems.append("generator.vision_language_generator=false: episodes show pictures; set it to true")
    if cfg.environment.env_class != (wanted := task.of(cfg).env_class):
        problems.append(
            f"environment.env_class={cfg.environment.env_class!r}: run.task={cfg.run.task} plays {wanted!r}"
        )
    return problems


def folder_problems(cfg: TrainConfig) -> list[str]:
    """One folder for what must lie apart."""
    if Path(cfg.trainer.ckpt_path).absolute() != Path(cfg.trainer.export_path).absolute():
        return []
    same = f"trainer.ckpt_path and trainer.export_path are both {cfg.trainer.ckpt_path}"
    return [f"{same}; an export would delete the shards that a resume needs: keep them apart"]


# Bounds that SkyRL does not check, and that would end a run long after its start.
_RANGES = {
    "run.warm_up_steps": (0, 1_000_000),
    "run.school_seed": (0, 2**32 - 1),
    "run.adapter.keep": (1, 10**6),
    "trainer.policy.optimizer_config.lr": (0, 1),
    "trainer.policy.model.lora.rank": (0, 4096),
    "trainer.seed": (0, 2**32 - 1),
    "trainer.epochs": (1, 10**9),
    "trainer.eval_batch_size": (1, 10**9),
    "trainer.max_prompt_length": (1, 10**9),
    "trainer.ref.sequence_parallel_size": (1, 10_000),
    "trainer.critic.sequence_parallel_size": (1, 10_000),
    "generator.max_turns": (1, 10_000),
    "generator.max_input_length": (1, 10**9),
    "generator.eval_n_samples_per_prompt": (1, 10**9),
    "generator.sampling_params.temperature": (0, 100),
    "generator.sampling_params.top_p": (1e-9, 1),
    "generator.sampling_params.max_generate_length": (1, 10**9),
    "generator.eval_sampling_params.temperature": (0, 100),
    "generator.eval_sampling_params.top_p": (1e-9, 1),
    "generator.eval_sampling_params.max_generate_length": (1, 10**9),
    "generator.inference_engine.num_engines": (1, 10_000),
    "generator.inference_engine.tensor_parallel_size": (1, 10_000),
    "generator.inference_engine.pipeline_parallel_size": (1, 10_000),
    "generator.inference_engine.data_parallel_size": (1, 10_000),
    "generator.inference_engine.max_num_seqs": (1, 10**9),
    "generator.inference_engine.gpu_memory_utilization": (0.01, 1),
    "environment.skyrl_gym.max_env_workers": (0, 10_000),
}
_CHOICES = {
    "run.adapter.wire_dtype": WIRE_DTYPES,
    "trainer.strategy": ("fsdp",),
    "trainer.logger": ("console", "wandb", "mlflow", "swanlab", "tensorboard"),
    "trainer.resume_mode": ("latest", "none", "from_path", None),
    "generator.inference_engine.model_dtype": ("auto", "bfloat16", "float16", "float32", "half", "float"),
}


def _range_problems(cfg: TrainConfig) -> list[str]:
    problems = []
    for name, (low, high) in _RANGES.items():
        value = operator.attrgetter(name)(cfg)
        if not low <= value <= high:  # also true of NaN
            problems.append(f"{name}={value}: must be from {low} to {high}")
    for name, allowed in _CHOICES.items():
        value = operator.attrgetter(name)(cfg)
        if value not in allowed:
            problems.append(f"{name}={value!r}{closest(value, filter(None, allowed))}; allowed: {allowed}")
    if cfg.trainer.resume_mode == "from_path" and not cfg.trainer.resume_path:
        problems.append("trainer.resume_mode=from_path: give trainer.resume_path as well")
    if not cfg.trainer.policy.model.path:
        problems.append("trainer.policy.model.path: give the folder or the hub id of a model")
    if "://" in cfg.run.root:
        problems.append(f"run.root={cfg.run.root}: must be a folder that all nodes see, not a cloud address")
    return problems


def batch_problems(cfg: TrainConfig) -> list[str]:
    """Sizes that do not divide among the ranks, or each other."""
    trainer = cfg.trainer
    ranks = policy_ranks(cfg)
    samples = cfg.generator.n_samples_per_prompt
    sizes = {
        "trainer.train_batch_size": trainer.train_batch_size,
        "trainer.policy_mini_batch_size": trainer.policy_mini_batch_size,
        "generator.n_samples_per_prompt": samples,
        "number of policy ranks": ranks,
        "trainer.policy.sequence_parallel_size": trainer.policy.sequence_parallel_size,
    }
    problems = [f"{name}={size}: must be at least 1" for name, size in sizes.items() if size < 1]
    if problems:
        return problems
    for name in ("train_batch_size", "policy_mini_batch_size"):
        trajectories = getattr(trainer, name) * samples
        if trajectories % ranks:
            problems.append(
                f"trainer.{name}={getattr(trainer, name)} x {samples} samples = {trajectories} trajectories "
                f"cannot be dealt evenly to {ranks} policy ranks"
            )
    if ranks % trainer.policy.sequence_parallel_size:
        problems.append(
            f"trainer.policy.sequence_parallel_size={trainer.policy.sequence_parallel_size} does not divide "
            f"the {ranks} policy ranks"
        )
    if trainer.train_batch_size % trainer.policy_mini_batch_size:
        problems.append(
            f"trainer.train_batch_size={trainer.train_batch_size} is not a multiple of "
            f"trainer.policy_mini_batch_size={trainer.policy_mini_batch_size}"
        )
    if (rows := task.of(cfg).rows(cfg)) < trainer.train_batch_size:
        problems.append(
            f"the training set has {rows} row(s), which give no full batch of "
            f"trainer.train_batch_size={trainer.train_batch_size}"
        )
    return problems


def _group_problems(cfg: TrainConfig) -> list[str]:
    from skyrl_maze.advantages import ESTIMATOR  # not at the top: it makes SkyRL and vLLM talk

    if cfg.generator.n_samples_per_prompt > 1 or cfg.trainer.algorithm.advantage_estimator != ESTIMATOR:
        return []
    return [
        "generator.n_samples_per_prompt=1: a group of one has no spread, nothing would be learned from "
        f"trainer.algorithm.advantage_estimator={ESTIMATOR}; take at least 2"
    ]


def _adapter_problems(cfg: TrainConfig) -> list[str]:
    trainer, lora = cfg.trainer, cfg.trainer.policy.model.lora
    if lora.rank == 0:
        return []
    problems = []
    if lora.target_modules == "all-linear" and "visual" not in (lora.exclude_modules or ""):
        problems.append(
            f"trainer.policy.model.lora.exclude_modules={lora.exclude_modules!r}: the engine ignores "
            "adapters of the vision tower, so the policy that acts would not be the one that learns; "
            "set it to '.*visual.*'"
        )
    problems += [
        f"{name}={path}: must be a folder that all nodes see, not a cloud address, when an adapter is trained"
        for name, path in (
            ("trainer.ckpt_path", trainer.ckpt_path),
            ("trainer.export_path", trainer.export_path),
            ("trainer.policy.model.lora.lora_sync_path", lora.lora_sync_path),
        )
        if "://" in path
    ]
    if trainer.update_ref_every_epoch:
        problems.append(
            "trainer.update_ref_every_epoch=true: SkyRL would make the reference model of an adapter without "
            "its base model; set it to false"
        )
    if trainer.critic.model.path:
        problems.append(
            f"trainer.critic.model.path={trainer.critic.model.path}: a checkpoint of an adapter holds no "
            "critic; GRPO needs none: set it to null"
        )
    return problems
