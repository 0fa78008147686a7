"""What a run exports to Prometheus: what the trainer logs, and the metric that it becomes, in one table.

Names follow https://prometheus.io/docs/practices/naming/, so a unit is in the name. All are gauges that hold
what the last step or evaluation came to, labelled with the run's id.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

RUN_LABEL, CAUSE_LABEL = "run_id", "cause"
_COUNTED = "generate/masked_episodes"


@dataclass(frozen=True)
class Exported:
    """One metric, or with a cause one part of it."""

    logged: str
    """What the trainer calls it in `metrics.jsonl`; under `run/` what the exporter adds."""
    name: str
    unit: str
    """One that the name says."""
    description: str
    cause: str | None = None
    """Value of the label `cause`, where the metric has one."""

    @property
    def gauge(self) -> str:
        """The name that Ray is given."""
        return f"skyrl_maze_{self.name}"

    @property
    def series(self) -> str:
        """The name in Prometheus: Ray puts its own before it."""
        return f"ray_{self.gauge}"


_LOST = "Episodes of the last step that were lost, by cause: they carry no gradient."
_CAUSES = {
    "environment": "generate/lost_environment",
    "engine": "generate/lost_engine",
    "timeout": "generate/lost_timeout",
    "reply": "generate/lost_reply",
    "picture": "generate/lost_picture",
    "internal": "generate/lost_internal",
    "violation": "generate/violations",
}

TABLE = (
    Exported("run/step", "step", "step", "Number of the last step that ended."),
    Exported("run/steps", "planned_steps", "steps", "Number of the step that the run ends with."),
    Exported(
        "run/ended_at_s",
        "last_step_timestamp_seconds",
        "timestamp seconds",
        "When the last step ended, its evaluation included; at first when training began.",
    ),
    Exported("train/solve_rate", "train_solve_ratio", "ratio", "Solve rate of the last step's rollouts."),
    Exported(
        "environment/spl",
        "train_spl_ratio",
        "ratio",
        "SPL of the last step's rollouts: solved, weighted by how short the path was.",
    ),
    Exported("reward/avg_raw_reward", "train_reward", "reward", "Mean reward of the last step's rollouts."),
    Exported("eval/solve_rate", "eval_solve_ratio", "ratio", "Solve rate of the last evaluation."),
    Exported(
        "eval/solve_rate_low",
        "eval_solve_low_ratio",
        "ratio",
        "Lower end of the 95 % interval of the last evaluation's solve rate.",
    ),
    Exported(
        "eval/solve_rate_high",
        "eval_solve_high_ratio",
        "ratio",
        "Upper end of the 95 % interval of the last evaluation's solve rate.",
    ),
    Exported("eval/spl", "eval_spl_ratio", "ratio", "SPL of the last evaluation."),
    Exported("eval/all/avg_score", "eval_reward", "reward", "Mean reward of the last evaluation."),
    Exported(
        "eval/errors",
        "eval_lost_episodes",
        "episodes",
        "Episodes of the last evaluation that were lost: they count as unsolved.",
    ),
    Exported("generate/batch_num_seq", "train_episodes", "episodes", "Episodes of the last step."),
    *(Exported(logged, "lost_episodes", "episodes", _LOST, cause) for cause, logged in _CAUSES.items()),
    Exported(
        "generate/retries", "rollout_retries", "retries", "Calls and episodes of the last step tried again."
    ),
    Exported("adapter/step", "adapter_step", "step", "Step of the adapter that all engines serve."),
    Exported(
        "adapter/attempt",
        "adapter_attempt",
        "attempt",
        "How often the run had been resumed when it was made.",
    ),
    Exported(
        "adapter/served_at_s",
        "adapter_served_timestamp_seconds",
        "timestamp seconds",
        "When all engines were proven to serve the adapter.",
    ),
    Exported("adapter/bytes", "adapter_bytes", "bytes", "Size of the merged adapter."),
    Exported("timing/step", "step_seconds", "seconds", "The last step, without its evaluation."),
    Exported("timing/generate", "rollout_seconds", "seconds", "The last step's rollouts."),
    Exported("timing/train_critic_and_policy", "update_seconds", "seconds", "The last step's updates."),
    Exported("timing/eval", "eval_seconds", "seconds", "The last evaluation."),
    Exported("timing/save_checkpoints", "checkpoint_seconds", "seconds", "The last checkpoint."),
    Exported(
        "timing/sync_weights", "sync_seconds", "seconds", "The adapter's whole way from ranks to engines."
    ),
    Exported("timing/adapter_merge", "adapter_merge_seconds", "seconds", "Merging the ranks' shards."),
    Exported("timing/adapter_load", "adapter_load_seconds", "seconds", "Loading it into every engine."),
    Exported("timing/adapter_probe", "adapter_probe_seconds", "seconds", "Proving that they use it."),
    Exported(
        "generate/tokens_per_second_mean",
        "rollout_tokens_per_second",
        "tokens per second",
        "Tokens sampled in the last step's rollouts, a second of them, all engines together.",
    ),
    Exported(
        "trainer/tokens_per_second_per_gpu",
        "update_tokens_per_second_per_gpu",
        "tokens per second",
        "Tokens trained on, prompts and pictures included, a second of the updates and a GPU.",
    ),
    Exported(
        "run/free_bytes",
        "run_folder_free_bytes",
        "bytes",
        "What may still be written to the file system of the run's folder.",
    ),
    Exported("run/size_bytes", "run_folder_size_bytes", "bytes", "Size of that file system."),
)


def readings(logs: Mapping[str, Any]) -> Iterator[tuple[Exported, float]]:
    """The metrics that a record of the trainer holds, with their values; only finite numbers count.

    A step that lost no episode to a cause does not log that cause: it is 0 then.
    """
    for exported in TABLE:
        missing = 0 if exported.cause is not None and _COUNTED in logs else None
        value = logs.get(exported.logged, missing)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield exported, float(value)
