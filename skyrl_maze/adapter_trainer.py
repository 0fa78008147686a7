"""SkyRL's trainer of a LoRA policy, which is shared through a folder, saved alone and continued anywhere.

With `trainer.policy.model.lora.rank=0` all of this is SkyRL's own.
"""

from skyrl_maze import _compat

_compat.install()

import functools  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import ray  # noqa: E402
from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

from skyrl_maze import checkpoints  # noqa: E402
from skyrl_maze.batches import TrainBatches  # noqa: E402
from skyrl_maze.merger import start_merger  # noqa: E402
from skyrl_maze.probe import probe_engines, probe_ids  # noqa: E402
from skyrl_maze.runlog import METRICS_FILE, RunLog  # noqa: E402
from skyrl_maze.serving import WITNESS, label  # noqa: E402
from skyrl_maze.settings import policy_ranks  # noqa: E402
from skyrl_maze.sharing import MERGE_LIMIT_S, Share, Shared  # noqa: E402
from skyrl_maze.versions import Version, clean_leftovers, new_version  # noqa: E402

_DAY_S = 86_400


class AdapterTrainer(RayPPOTrainer):
    """SkyRL's trainer with this package's workers, synchronisation and checkpoints.

    Args:
        log: is told where things are and what was shared; nobody is if it is None.
    """

    def __init__(self, cfg: Any, *args: Any, log: RunLog | None = None, **kwargs: Any) -> None:
        self._log = log
        self._published: Version | None = None
        """The version that was made last."""
        self._served: Version | None = None
        """The version that all engines serve."""
        self._saved_step: int | None = None
        super().__init__(cfg, *args, **kwargs)

    @property
    def _is_lora(self) -> bool:
        return bool(self.cfg.trainer.policy.model.lora.rank > 0)

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803
        from skyrl_maze import worker

        super().build_models(worker.PolicyWorker, CriticWorker, worker.RefWorker)
        if self._is_lora:
            self._ask_policy("watch", self.cfg.run.hang)
            self._merger = start_merger()
            self._share_through_folder()
            self._begin_attempt()

    def _share_through_folder(self) -> None:
        """Let the trainer's synchronisations of weights go through the folder."""
        # The run's folder is locked: leftovers are a dead run's.
        clean_leftovers(self._sync_root, self.cfg.run.id, older_than_s=0)
        if self._log is not None:
            merger = ray.get(self._merger.node_id.remote(), timeout=60)
            self._log.event("placed", merger_node=merger, rank_nodes=self.dispatch.get_node_ids())
        if not self._witnessed:
            self._note(
                "these engines cannot tell which LoRA modules they apply; a probe of their answers must do"
            )
        synchronise = self.dispatch.save_weights_for_sampler

        async def share(model_id: str | None = None) -> None:
            coming = self._next_share()
            self._ask_policy("next_share", coming)
            await synchronise(model_id)
            shared = next(filter(None, self._ask_policy("last_shared")))
            proof = await self._proof(coming.version, shared)
            self._served = coming.version
            report = ray.get(self._merger.report.remote(), timeout=60)
            self.all_metrics["adapter/step"] = report["step"]
            self.all_metrics["adapter/attempt"] = report["attempt"]
            self.all_metrics["adapter/served_at_s"] = time.time()
            self.all_metrics["adapter/bytes"] = report["bytes"]
            self.all_metrics["timing/adapter_merge"] = report["seconds"]
            self.all_metrics.update(proof)
            if self._log is not None:
                told = {name.replace("timing/adapter_", "seconds_"): value for name, value in proof.items()}
                told = {name.removeprefix("adapter/"): value for name, value in told.items()}
                self._log.event("shared", **report, **told)

        self.dispatch.save_weights_for_sampler = share

    @property
    def _sync_root(self) -> Path:
        return Path(self.cfg.trainer.policy.model.lora.lora_sync_path).absolute()  # as engines are told it

    @property
    def _witnessed(self) -> bool:
        engine = self.cfg.generator.inference_engine.engine_init_kwargs
        return bool(engine.get("worker_extension_cls") == WITNESS)

    def _ask_policy(self, method: str, *args: Any) -> list[Any]:
        """What a method of `MazePolicyWorker` answers on every rank."""
        ranks = self.dispatch._actor_groups["policy"]
        answers: list[Any] = ray.get(ranks.async_run_ray_method("pass_through", method, *args))
        return answers

    def _next_share(self) -> Share:
        """The adapter of this step: a version of its own, or the one that was merged already."""
        run, base = self.cfg.run, self.cfg.trainer.policy.model.path
        version = self._published
        published = version is not None and version.step == self.global_step
        if version is None or not published:
            version = self._published = new_version(self._sync_root, run.id, self.global_step)
        wire = run.adapter.wire_dtype, run.adapter.keep
        return Share(version, base, *wire, self._merger, self._served, self._witnessed, published)

    async def _proof(self, version: Version, shared: Shared) -> dict[str, float]:
        """Prove that the engines, which are awake now, answer with this version, and let rollouts name it.

        Returns:
            Metrics.
        """
        client, served, name = self.inference_engine_client, shared.served, label(version.adapter)
        models = client.model_name, resolve_policy_model_name(self.cfg)
        ids = probe_ids(self.tokenizer)
        probed = await probe_engines(client.server_urls, *models, ids, name, shared.largest_b)
        self.generator.adapter_version = name
        return {
            "adapter/engines": served.engines,
            "adapter/modules": served.modules if served.proven else 0,
            "adapter/largest_b": shared.largest_b,
            "adapter/probe_difference": probed.difference,
            "timing/adapter_load": served.seconds,
            "timing/adapter_probe": probed.seconds,
        }

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

    @functools.cached_property  # it reads the base model's files
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
                step, batches.position, batches.settings(), policy_ranks(self.cfg), self._policy_identity
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
            if (Path(self.cfg.run.root) / METRICS_FILE).exists():
                self._note("begins anew: an earlier launch of this run left no checkpoint to go on from")
            return 0, None
        state = checkpoints.read_state(found)
        checkpoints.check_policy(found, state.policy, self._policy_identity)
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

    async def train(self) -> None:
        await super().train()
        if self._is_lora:
            self._ask_policy("training_is_over")

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
