"""The run itself, inside Ray: SkyRL's stock experiment and trainer with this package's parts put in."""

from skyrl_maze import _compat

_compat.install()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import ray  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.entrypoints.main_base import BasePPOExp  # noqa: E402
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.trajectory_logging import TrajectoryLogger  # noqa: E402

from skyrl_maze import advantages, task  # noqa: E402
from skyrl_maze.exporter import MetricsExporter  # noqa: E402
from skyrl_maze.generator import MazeVLMGenerator  # noqa: E402
from skyrl_maze.narrator import ChatLogger, Narrator  # noqa: E402
from skyrl_maze.recorder import EvaluationRecorder  # noqa: E402
from skyrl_maze.runlog import RunLog  # noqa: E402
from skyrl_maze.serving import WITNESS  # noqa: E402
from skyrl_maze.settings import TrainConfig, policy_ranks  # noqa: E402
from skyrl_maze.trainer import MazeTrainer  # noqa: E402


class MazeExperiment(BasePPOExp):
    """Hooks of SkyRL's experiment, one each for data, rollouts and training."""

    def __init__(self, cfg: TrainConfig) -> None:
        self.log = RunLog(Path(cfg.run.root))
        self.evaluations = EvaluationRecorder(Path(cfg.run.root), self.log)
        self.narrator = Narrator(self.log)
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
        engine = self.cfg.generator.inference_engine
        self.log.event("starting_engines", engines=engine.num_engines)
        if engine.run_engines_locally:
            engine.engine_init_kwargs.setdefault("worker_extension_cls", WITNESS)  # SkyRL's own, and a proof
        return super().get_inference_client()

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> MazeVLMGenerator:
        return MazeVLMGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=resolve_policy_model_name(cfg),
            model_path=cfg.trainer.policy.model.path,
            notify=lambda text: self.log.event("note", text=text),
            observe=self._observe,
        )

    def _observe(self, batch: GeneratorInput, output: GeneratorOutput) -> None:
        self.narrator.observe(batch)
        self.evaluations.observe(batch, output)

    def get_trajectory_logger(self) -> TrajectoryLogger:
        return ChatLogger()

    def get_trainer(self, cfg: Any, **parts: Any) -> RayPPOTrainer:
        self.log.event("loading_policy", ranks=policy_ranks(cfg))
        # In this order: the figures are in the record before it is told and exported.
        exporter = MetricsExporter(Path(cfg.run.root), cfg.run.id, self.log)
        callbacks = [self.evaluations, self.narrator, exporter]
        return MazeTrainer(cfg=cfg, callbacks=callbacks, log=self.log, **parts)

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self._inference_router is not None:
                self._inference_router.shutdown()


@ray.remote(num_cpus=1, max_retries=0)
def train(cfg: TrainConfig) -> None:
    """The trainer task. What SkyRL's registries hold is registered here: they are one per process."""
    task.of(cfg).register()
    advantages.register()
    MazeExperiment(cfg).run()
