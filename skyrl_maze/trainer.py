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

from skyrl_maze import checkpoints  # noqa: E402
from skyrl_maze.advantages import TOLERANCE, rows_without_signal  # noqa: E402
from skyrl_maze.batches import TrainBatches  # noqa: E402
from skyrl_maze.config import policy_ranks  # noqa: E402
from skyrl_maze.runlog import RunLog  # noqa: E402
from skyrl_maze.sharing import MERGE_LIMIT_S, Share, start_merger  # noqa: E402
from skyrl_maze.versions import Version, clean_leftovers, new_version  # noqa: E402

_DAY_S = 86_400
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
        self._published: Version | None = None
        self._saved_step: int | None = None
        # SkyRL prints the dataset's prompt and decoded image tokens; `generate` prints the conversation.
        self._example_interval, cfg.trainer.print_example_interval = cfg.trainer.print_example_interval, 0
        super().__init__(cfg, *args, **kwargs)

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803
        from skyrl_maze import worker

        super().build_models(worker.PolicyWorker, CriticWorker, worker.RefWorker)
        if self._is_lora:
            self._merger = start_merger()
            self._share_through_folder()
            self._begin_attempt()
            if self._log is not None:
                merger = ray.get(self._merger.node_id.remote(), timeout=60)
                self._log.event("placed", merger_node=merger, rank_nodes=self.dispatch.get_node_ids())

    @property
    def _is_lora(self) -> bool:
        return bool(self.cfg.trainer.policy.model.lora.rank > 0)

    def _ask_policy(self, method: str, *args: Any) -> None:
        """Call a method of `MazePolicyWorker` on every rank."""
        ranks = self.dispatch._actor_groups["policy"]
        ray.get(ranks.async_run_ray_method("pass_through", method, *args))

    @property
    def _sync_root(self) -> Path:
        return Path(self.cfg.trainer.policy.model.lora.lora_sync_path).absolute()  # as engines are told it

    def _next_share(self) -> Share:
        """The adapter of this step: a version of its own, or the one that was merged already."""
        run, base = self.cfg.run, self.cfg.trainer.policy.model.path
        published = self._published is not None and self._published.step == self.global_step
        if self._published is None or not published:
            self._published = new_version(self._sync_root, run.id, self.global_step)
        return Share(self._published, base, run.adapter.wire_dtype, run.adapter.keep, self._merger, published)

    def _share_through_folder(self) -> None:
        """Let the trainer's synchronisations of weights go through the folder."""
        # The run's folder is locked: leftovers are a dead run's.
        clean_leftovers(self._sync_root, self.cfg.run.id, older_than_s=0)
        synchronise = self.dispatch.save_weights_for_sampler

        async def share(model_id: str | None = None) -> None:
            self._ask_policy("next_share", self._next_share())
            await synchronise(model_id)
            report = ray.get(self._merger.report.remote(), timeout=60)
            self.shared_adapter = self._published.path.name if self._published else None
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

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        """SkyRL's count of steps, over batches whose order a checkpoint can name."""
        super()._build_train_dataloader_and_compute_training_steps()
        if self.train_dataset is not None:
            rows, trainer = self.train_dataset, self.cfg.trainer
            self.train_dataloader = TrainBatches(
                rows, rows.collate_fn, trainer.train_batch_size, trainer.epochs, trainer.seed
            )

    @property
    def _checkpoint_root(self) -> Path:
        return Path(self.cfg.trainer.ckpt_path).absolute()

    def _begin_attempt(self) -> None:
        root, run = self._checkpoint_root, self.cfg.run
        # Of a folder that other runs may use, only what none of them can be writing.
        checkpoints.clean(root, 0 if root.is_relative_to(run.root) else _DAY_S)
        self._attempt = checkpoints.next_attempt(root, run.id)

    def _policy_identity(self) -> checkpoints.Policy:
        model = self.cfg.trainer.policy.model
        lora, digest = model.lora, checkpoints.base_digest(Path(model.path))
        return checkpoints.Policy(
            model.path,
            digest,
            lora.rank,
            float(lora.alpha),
            str(lora.target_modules),
            str(lora.exclude_modules),
        )

    def save_checkpoints(self) -> str:
        """A checkpoint of what is trained, whole or not there, and the merged adapter beside it."""
        if not self._is_lora:
            return str(super().save_checkpoints())
        root, step = self._checkpoint_root, self.global_step
        if self._saved_step != step:
            batches: TrainBatches = self.train_dataloader
            state = checkpoints.RunState(
                step, batches.position, batches.settings(), policy_ranks(self.cfg), self._policy_identity()
            )

            def build(scratch: Path) -> None:
                self.dispatch.save_checkpoint("policy", str(scratch), self.tokenizer)

            checkpoints.save(root, self.cfg.run.id, self._attempt, state, build)
            self._saved_step = step
            self.save_models()
            checkpoints.retain(root, self.cfg.run.id, self.cfg.trainer.max_ckpts_to_keep)
        return str(checkpoints.folder_of(root, step))

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Go on from a checkpoint, by SkyRL's settings; (0, None) if there is none.

        Raises:
            CheckpointError: it cannot be trusted, or is one of another policy.
        """
        if not self._is_lora:
            step, path = super().load_checkpoints()
            return step, path
        trainer = self.cfg.trainer
        found: checkpoints.Checkpoint | None
        if trainer.resume_mode == "from_path":
            found = checkpoints.at(Path(trainer.resume_path).absolute())
        else:
            found = checkpoints.newest(self._checkpoint_root, self.cfg.run.id, self._note)
        if found is None:
            return 0, None
        state = checkpoints.read_state(found)
        checkpoints.check_policy(found, state.policy, self._policy_identity())
        self.dispatch.load_checkpoint("policy", str(found.path))
        self._place_data(state)
        self._saved_step = state.step if found.path.parent == self._checkpoint_root else None
        self._note(f"goes on after step {state.step}, from {found.path}")
        return state.step, str(found.path)

    def _place_data(self, state: checkpoints.RunState) -> None:
        batches: TrainBatches = self.train_dataloader
        batches.position = state.position
        if state.data != batches.settings():
            batches.position = state.step
            self._note(f"the data was saved with {state.data} and is {batches.settings()}: its order is new")
        if state.step >= self.total_training_steps:
            batches.end()  # SkyRL would take one step more

    def save_models(self) -> None:
        """The merged adapter at `<export_path>/global_step_<N>/policy`, as PEFT and vLLM load it."""
        if not self._is_lora:
            super().save_models()
            return
        share = self._next_share()
        if not share.published:
            self._ask_policy("write_shards", share)
            ray.get(self._merger.merge.remote(share.version), timeout=MERGE_LIMIT_S)
        out = Path(self.cfg.trainer.export_path).absolute() / f"global_step_{self.global_step}" / "policy"
        ray.get(self._merger.export.remote(share.version, out), timeout=MERGE_LIMIT_S)

    def _note(self, text: str) -> None:
        logger.info(text)
        if self._log is not None:
            self._log.event("note", text=text)

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
