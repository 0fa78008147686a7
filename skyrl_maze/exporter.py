"""Exports a run's metrics to Prometheus, by way of Ray.

Nothing that goes wrong here ends or holds up a run: it is said once, and training goes on.
"""

import functools
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from loguru import logger
from ray.util.metrics import Gauge
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl
from skyrl.train.utils.vllm_metrics_scraper import discover_ray_metrics_urls

from skyrl_maze.faults import logged_only
from skyrl_maze.gauges import CAUSE_LABEL, RUN_LABEL, Exported, readings
from skyrl_maze.runlog import RunLog


class MetricsExporter(TrainingCallback):
    """Sets the gauges of `gauges.TABLE`; Ray's agent on this node serves them while this process lives.

    Args:
        root: the run's folder, whose file system is watched.
        run_id: value of the label `run_id`.
        log: is told where the metrics can be read, and if they cannot be exported.
    """

    def __init__(self, root: Path, run_id: str, log: RunLog) -> None:
        self._root, self._run_id, self._log = root, run_id, log
        self._gauges: dict[str, Gauge] = {}
        self._failed: set[str] = set()

    def on_train_start(
        self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        with self._guarded("finding Ray's metrics endpoints"):
            self._log.event("exporting_metrics", urls=discover_ray_metrics_urls())
        self._export(trainer.all_metrics)  # what sharing the first adapter came to
        self._export(self._state(callback_input))

    def on_save(
        self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        # The last checkpoint of a run may come after its last record.
        self._export({f"timing/{name}": seconds for name, seconds in trainer.all_timings.items()})

    def on_log(self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl) -> None:
        self._export({**(callback_input.logs or {}), **self._state(callback_input)})

    def _state(self, now: CallbackInput) -> dict[str, float]:
        state = {"run/step": now.global_step, "run/steps": now.total_steps, "run/ended_at_s": time.time()}
        with self._guarded("reading how full the run's file system is"):
            disk = shutil.disk_usage(self._root)
            state |= {"run/free_bytes": disk.free, "run/size_bytes": disk.total}
        return state

    def _export(self, logs: Mapping[str, Any]) -> None:
        with self._guarded("exporting metrics"):
            for exported, value in readings(logs):
                self._set(exported, value)

    def _set(self, exported: Exported, value: float) -> None:
        tags = {RUN_LABEL: self._run_id}
        if exported.cause is not None:
            tags[CAUSE_LABEL] = exported.cause
        if exported.gauge not in self._gauges:
            self._gauges[exported.gauge] = Gauge(exported.gauge, exported.description, tuple(tags))
        self._gauges[exported.gauge].set(value, tags)

    def _guarded(self, what: str) -> AbstractContextManager[None]:
        guard: AbstractContextManager[None] = logged_only(what, functools.partial(self._say_once, what))
        return guard

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._failed:
            self._failed.add(what)
            logger.warning(text)
            self._log.event("note", text=f"{text}; training goes on")
