"""The run itself, inside Ray: SkyRL's stock experiment and trainer with this package's parts put in."""

from skyrl_maze import _compat

_compat.install()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import ray  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.entrypoints.main_base import BasePPOExp  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl  # noqa: E402

from skyrl_maze.config import MazeTrainConfig, policy_ranks  # noqa: E402
from skyrl_maze.env import register  # noqa: E402
from skyrl_maze.generator import MazeVLMGenerator  # noqa: E402
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
            if f"{source}/solve_rate" in logs:
                logs[name] = logs[f"{source}/solve_rate"]
        self._log.metrics(step, logs)
        shown = ("train/solve_rate", "eval/solve_rate", "reward/avg_raw_reward", "timing/step")
        self._log.event(
            "measured",
            step=step,
            steps=callback_input.total_steps,
            **{name: float(logs[name]) for name in shown if name in logs},
        )


class MazeTrainer(RayPPOTrainer):
    """SkyRL's trainer; only the classes of its ranks differ."""

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803
        from skyrl_maze import worker

        super().build_models(worker.PolicyWorker, CriticWorker, worker.RefWorker)

    async def train(self) -> None:
        try:
            await super().train()
        finally:
            # Here and not later: the client's connections belong to this event loop.
            await self.inference_engine_client.teardown()


class MazeExperiment(BasePPOExp):
    """Hooks of SkyRL's experiment, one each for data, rollouts and training."""

    def __init__(self, cfg: MazeTrainConfig) -> None:
        self.log = RunLog(Path(cfg.run.root))
        super().__init__(cfg)

    def get_train_dataset(self) -> PromptDataset:
        return self._dataset(self.cfg.data.train_data)

    def get_eval_dataset(self) -> PromptDataset | None:
        if self.cfg.trainer.eval_interval <= 0 or not self.cfg.data.val_data:
            return None
        return self._dataset(self.cfg.data.val_data)

    def _dataset(self, files: list[str]) -> PromptDataset:
        # One process: SkyRL's eight would each import the whole trainer to filter a few short prompts.
        return PromptDataset(
            datasets=files,
            tokenizer=self.tokenizer,
            max_prompt_length=self.cfg.trainer.max_prompt_length,
            num_workers=1,
        )

    def get_inference_client(self) -> Any:
        self.log.event("starting_engines", engines=self.cfg.generator.inference_engine.num_engines)
        return super().get_inference_client()

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> MazeVLMGenerator:
        return MazeVLMGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=resolve_policy_model_name(cfg),
        )

    def get_trainer(self, cfg: Any, **parts: Any) -> RayPPOTrainer:
        self.log.event("loading_policy", ranks=policy_ranks(cfg))
        return MazeTrainer(cfg=cfg, callbacks=[Narrator(self.log)], **parts)

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self._inference_router is not None:
                self._inference_router.shutdown()


@ray.remote(num_cpus=1, max_retries=0)
def train(cfg: MazeTrainConfig) -> None:
    """The trainer task. The environment is registered here: SkyRL's registry is one per process."""
    register()
    MazeExperiment(cfg).run()
