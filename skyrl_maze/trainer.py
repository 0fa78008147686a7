"""SkyRL's trainer with this package's workers, group statistics and readable examples put in."""

from skyrl_maze import _compat

_compat.install()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import ray  # noqa: E402
from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl  # noqa: E402
from skyrl.train.utils.trajectory_logging import TrajectoryLogger, pretty_print_example  # noqa: E402

from skyrl_maze.advantages import TOLERANCE, rows_without_signal  # noqa: E402
from skyrl_maze.runlog import RunLog  # noqa: E402
from skyrl_maze.sharing import Share, start_merger  # noqa: E402
from skyrl_maze.versions import clean_leftovers, new_version  # noqa: E402

_compat.count_passes_by_success()
_compat.average_environment_metrics()


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


class MazeTrainer(RayPPOTrainer):
    """SkyRL's trainer; lost episodes take no part in its statistics, and its examples can be read."""

    def __init__(self, cfg: Any, *args: Any, log: RunLog | None = None, **kwargs: Any) -> None:
        self._log = log
        self.shared_adapter: str | None = None  # the version that the engines serve
        # SkyRL prints the dataset's prompt and decoded image tokens; `generate` prints the conversation.
        self._example_interval, cfg.trainer.print_example_interval = cfg.trainer.print_example_interval, 0
        super().__init__(cfg, *args, **kwargs)

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803
        from skyrl_maze import worker

        super().build_models(worker.PolicyWorker, CriticWorker, worker.RefWorker)
        if self.cfg.trainer.policy.model.lora.rank > 0:
            self._share_through_folder()

    def _share_through_folder(self) -> None:
        """Give every synchronisation of weights a version of its own, numbered by the step."""
        run, lora = self.cfg.run, self.cfg.trainer.policy.model.lora
        root = Path(lora.lora_sync_path).absolute()  # as the engines are told it
        clean_leftovers(root, run.id, older_than_s=0)  # the run's folder is locked: they are a dead run's
        merger, policy = start_merger(), self.dispatch._actor_groups["policy"]
        synchronise = self.dispatch.save_weights_for_sampler

        async def share(model_id: str | None = None) -> None:
            version = new_version(root, run.id, self.global_step)
            base = self.cfg.trainer.policy.model.path
            coming = Share(version, base, run.adapter.wire_dtype, run.adapter.keep, merger)
            ray.get(policy.async_run_ray_method("pass_through", "next_share", coming))
            await synchronise(model_id)
            report = ray.get(merger.report.remote(), timeout=60)
            self.shared_adapter = version.path.name
            self.all_metrics["adapter/step"] = report["step"]
            self.all_metrics["adapter/bytes"] = report["bytes"]
            self.all_metrics["timing/adapter_merge"] = report["seconds"]
            if self._log is not None:
                self._log.event("shared", **report)

        self.dispatch.save_weights_for_sampler = share

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await super().generate(input_batch)
        if self._example_interval > 0 and self.global_step % self._example_interval == 0:
            chat = output["chats"][0]
            first = next((i for i, message in enumerate(chat) if message["role"] == "assistant"), len(chat))
            response = "\n".join(f"[{message['role']}] {message['content']}" for message in chat[first:])
            pretty_print_example(logger, chat[:first], response, output["rewards"][0])
        return output

    def postprocess_generator_output(
        self, generator_output: GeneratorOutput, uids: list[str], *args: Any, **kwargs: Any
    ) -> tuple[GeneratorOutput, list[str]]:
        """SkyRL's step, whose zero-variance filter leaves rewards per token alone."""
        filtered: set[int] = set()
        algorithm = self.cfg.trainer.algorithm
        if algorithm.zero_variance_filter and self.cfg.generator.n_samples_per_prompt > 1:
            tolerance = max(TOLERANCE, algorithm.zero_variance_filter_tol)
            masks = generator_output["loss_masks"]
            filtered = set(rows_without_signal(generator_output["rewards"], uids, masks, tolerance))
            generator_output["loss_masks"] = [
                [0] * len(mask) if i in filtered else mask for i, mask in enumerate(masks)
            ]
        generator_output, uids = super().postprocess_generator_output(generator_output, uids, *args, **kwargs)
        if algorithm.zero_variance_filter:
            self.all_metrics["reward/num_zero_variance_filtered"] = len({uids[i] for i in filtered})
        return generator_output, uids

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """SkyRL's step, which shows the estimator no sample without a trainable token."""
        response_mask, living = data["response_mask"], data["loss_mask"].any(dim=-1, keepdim=True)
        if living.any():  # with none the means that SkyRL logs would be over nothing
            data["response_mask"] = response_mask * living
        data = super().compute_advantages_and_returns(data)
        data["response_mask"] = response_mask
        for name in ("advantages", "returns"):
            data[name] = data[name] * living
        return data

    def handle_dynamic_sampling(
        self, generator_output: GeneratorOutput, uids: list[str]
    ) -> tuple[GeneratorOutput, list[str], bool]:
        """SkyRL's step, to which a lost episode is as good as its group: it makes none look mixed."""
        rewards, masks = generator_output["rewards"], generator_output["loss_masks"]
        returns = [sum(reward) for reward in rewards]
        for i, mask in enumerate(masks):
            if any(mask):
                continue
            alike = [returns[j] for j, uid in enumerate(uids) if uid == uids[i] and any(masks[j])]
            if alike:
                rewards[i] = [*[0.0] * (len(rewards[i]) - 1), alike[0]]
        generator_output, uids, keep = super().handle_dynamic_sampling(generator_output, uids)
        return generator_output, uids, keep

    async def train(self) -> None:
        try:
            await super().train()
        finally:
            # Here and not later: the client's connections belong to this event loop.
            await self.inference_engine_client.teardown()


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
