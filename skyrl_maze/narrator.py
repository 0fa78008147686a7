"""What the trainer tells: its steps to the run's log, its trajectories in words that people can read."""

from skyrl_maze import _compat

_compat.install()

from typing import Any  # noqa: E402

from skyrl.train.generators.base import TRAINING_PHASE_TRAIN, GeneratorInput  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl  # noqa: E402
from skyrl.train.utils.trajectory_logging import TrajectoryLogger  # noqa: E402

from skyrl_maze.runlog import RunLog  # noqa: E402


class Narrator(TrainingCallback):
    """Tells the run's log what the trainer does, and gives the solve rate a plain name in every record."""

    def __init__(self, log: RunLog) -> None:
        self._log = log

    def on_eval_start(
        self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        self._log.event("evaluating", step=callback_input.global_step)

    def on_step_start(
        self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        self._log.event("training", step=callback_input.global_step, steps=callback_input.total_steps)

    def observe(self, batch: GeneratorInput) -> None:
        """Name the rows of the data set that a step trains on, in their order; evaluations take them all."""
        phase = batch.get("batch_metadata")
        if phase is not None and phase.training_phase == TRAINING_PHASE_TRAIN:
            rows = dict.fromkeys(int(trajectory.instance_id) for trajectory in batch["trajectory_ids"])
            self._log.event("played", step=phase.global_step, rows=list(rows))

    def on_save(
        self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        self._log.event("saved", step=callback_input.global_step, path=str(callback_input.ckpt_path))

    def on_log(self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl) -> None:
        logs, step = callback_input.logs, callback_input.global_step
        for name, source in (
            ("train/solve_rate", "environment"),
            ("eval/solve_rate", "eval/all/environment"),
        ):
            if name not in logs and f"{source}/solve_rate" in logs:
                logs[name] = logs[f"{source}/solve_rate"]
        self._log.metrics(step, logs)
        shown = (
            "train/solve_rate",
            "eval/solve_rate",
            "reward/avg_raw_reward",
            "generate/masked_episodes",
            "timing/step",
        )
        self._log.event(
            "measured",
            step=step,
            steps=callback_input.total_steps,
            **{name: float(logs[name]) for name in shown if name in logs},
        )


class ChatLogger(TrajectoryLogger):
    """SkyRL's trajectory table with whole conversations, pictures named by size and hash."""

    def log(self, *, prompts: list[Any], generator_output: dict[str, Any], **kwargs: Any) -> None:
        chats = generator_output.get("chats") or prompts
        super().log(prompts=chats, generator_output=generator_output, **kwargs)

    def format_trajectory(
        self,
        prompt: Any,
        response_token_ids: list[int] | None,
        loss_mask: list[int] | None,
        tokenizer: Any,
        **kwargs: Any,
    ) -> str:
        """The conversation; the ids say the same once more."""
        return str(super().format_trajectory(prompt, None, None, tokenizer, **kwargs))
