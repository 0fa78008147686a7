"""What a training run keeps of each evaluation: a result folder, and the figures in its log, from one source.

Nothing that goes wrong here ends or holds up a run: it is said once, and training goes on.
"""

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loguru import logger
from skyrl.train.generators.base import TRAINING_PHASE_EVAL, GeneratorInput, GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl

from skyrl_maze.actions import GoalRule
from skyrl_maze.env import ENV_ID, MazeEnv
from skyrl_maze.errors import RecordError, SkyRLMazeError
from skyrl_maze.evaluate import figures, metrics
from skyrl_maze.records import Conditions, EpisodeRecord, Summary
from skyrl_maze.results import step_folder, write_result
from skyrl_maze.runlog import RunLog

_Taken = tuple[int, int, dict[str, Any], Any, str | None, float | None]


class EvaluationRecorder(TrainingCallback):
    """Takes what the environments recorded during an evaluation, and writes it when that is over.

    Mazes are numbered in the order of the evaluation set, which SkyRL does not shuffle. A lost episode is
    kept as far as it came, and counts as unsolved.

    Args:
        root: the run's folder.
        log: is told if something goes wrong.
        write_limit_s: seconds that a write may hold up the run; after that it goes on by itself.
    """

    def __init__(self, root: Path, log: RunLog, write_limit_s: float = 60.0) -> None:
        self._root, self._log, self._write_limit_s = root, log, write_limit_s
        self._taken: list[_Taken] = []
        self._numbers: dict[str, int] = {}
        self._metrics: dict[str, float] = {}

    def observe(self, batch: GeneratorInput, output: GeneratorOutput) -> None:
        """Take the records of an evaluation's batch; for `MazeVLMGenerator(observe=...)`."""
        phase = batch.get("batch_metadata")
        if phase is None or phase.training_phase != TRAINING_PHASE_EVAL:
            return
        seconds = output.get("trajectory_generation_times") or [None] * len(batch["prompts"])
        for i, trajectory in enumerate(batch["trajectory_ids"]):
            number = self._numbers.setdefault(trajectory.instance_id, len(self._numbers))
            if batch["env_classes"][i] == ENV_ID:
                row, lost = batch["env_extras"][i], output["masked_because"][i]
                record = output["records"][i]
                self._taken.append((number, trajectory.repetition_id, row, record, lost, seconds[i]))

    def on_eval_start(
        self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        self._taken, self._numbers, self._metrics = [], {}, {}

    def on_eval_end(
        self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        taken, self._taken = self._taken, []
        if not taken:
            return
        try:
            records = [_record(trainer.cfg, *one) for one in taken]
            found = figures(records)
            self._metrics = metrics(found)
            summary = Summary.of(_conditions(trainer, callback_input.global_step), found)
            folder = step_folder(self._root, callback_input.global_step)
            _within(self._write_limit_s, lambda: write_result(folder, summary, records), folder)
        except Exception as error:
            if not isinstance(error, SkyRLMazeError):
                logger.error(f"an evaluation was not kept, which was not foreseen:\n{traceback.format_exc()}")
            self._log.event("note", text=f"the evaluation is not kept: {error}")

    def on_log(self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl) -> None:
        if callback_input.logs is not None:
            callback_input.logs.update(self._metrics)
        self._metrics = {}


def _record(
    cfg: Any, index: int, sample: int, row: dict[str, Any], kept: Any, lost: str | None, seconds: float | None
) -> EpisodeRecord:
    """An episode's record with its place; one that was lost before it began has no turns."""
    if isinstance(kept, EpisodeRecord):
        as_far = kept
    else:
        extras = {**row, "max_turns": cfg.generator.max_turns}
        as_far = MazeEnv(cfg.environment.skyrl_gym.maze, extras).record().failed("it did not begin")
    record = as_far.played_as(index, sample, seconds)
    return record.failed(lost) if lost is not None else record


def _conditions(trainer: RayPPOTrainer, step: int) -> Conditions:
    cfg = trainer.cfg
    maze, model = cfg.environment.skyrl_gym.maze, str(cfg.trainer.policy.model.path)
    return Conditions(
        policy=Path(model).name if Path(model).is_absolute() else model,
        step=step,
        adapter=trainer.generator.adapter_version,
        mazes=cfg.data.mazes.eval.name,
        goal_rule=GoalRule(maze.goal_rule),
        max_turns=cfg.generator.max_turns,
        grammar=maze.grammar,
        theme=maze.theme,
        temperature=cfg.generator.eval_sampling_params.temperature,
    )


def _within(limit_s: float, write: Callable[[], None], folder: Path) -> None:
    """Call `write`, and raise what it raises; RecordError if it takes longer, and it goes on alone."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            write()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="evaluation", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise RecordError(f"writing {folder} takes longer than {limit_s:g} s; check its disk")
    if raised:
        raise raised[0]
