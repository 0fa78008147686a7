"""What is looked at before anything starts: packages, GPUs, folders, and whether the model fits."""

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from skyrl_maze import task
from skyrl_maze.adapter import adapter_problems
from skyrl_maze.chat import ChatFormat
from skyrl_maze.errors import ConfigError, NotReadyError, SetupError
from skyrl_maze.faults import cause_of
from skyrl_maze.nodes import joined, known
from skyrl_maze.settings import TrainConfig, needed_gpus

_NEEDED_BYTES = 1_000_000_000
_SHOWN = 5


def check_engine() -> None:
    """Raise SetupError unless vLLM is installed; it comes with an extra."""
    if importlib.util.find_spec("vllm") is None:
        raise SetupError(
            f"no inference engine is installed for {sys.executable}; "
            "run: pip install 'skyrl_maze[cpu]' on a machine without a GPU, 'skyrl_maze[gpu]' on one with"
        )


def check_device(cfg: TrainConfig) -> None:
    """Raise SetupError if the run and the machine or cluster do not fit together."""
    import torch

    here = torch.cuda.device_count()
    if cfg.run.device == "cpu":
        if here:
            raise SetupError(
                f"run.device=cpu rehearses without a GPU, and this machine has {here}; "
                "run +recipe=maze_1node on it"
            )
        if not cfg.run.join_cluster:
            return
    needed, in_cluster = needed_gpus(cfg), _cluster_gpus()
    if in_cluster is not None and in_cluster < needed:
        raise NotReadyError(
            f"this run needs {needed} GPU(s), and the Ray cluster has {in_cluster}; "
            "start it where they are, or rehearse without a GPU: +recipe=maze_cpu"
        )
    if in_cluster is None and cfg.run.join_cluster:
        raise SetupError("run.join_cluster=true, and no Ray cluster runs here; start one: ray start --head")
    if in_cluster is None and here < needed:
        raise SetupError(
            f"this run needs {needed} GPU(s), and this machine has {here}; "
            "start it where they are, or rehearse without a GPU: +recipe=maze_cpu"
        )


def _cluster_gpus() -> int | None:
    """GPUs of the Ray cluster that this process would join; None if there is none."""
    with joined() as found:
        return sum(node.gpus for node in known()[0]) if found else None


def make_folders(cfg: TrainConfig) -> None:
    """Create what the run writes to; raise SetupError where that is not allowed or there is no room."""
    trainer = cfg.trainer
    run = (cfg.run.root, trainer.ckpt_path, trainer.export_path, trainer.log_path)
    for path in (*run, *task.of(cfg).folders(cfg)):
        if "://" in path:
            continue  # a cloud address, which SkyRL writes by itself
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"cannot create {folder}: {error.strerror}; give another place with run.root=..."
            ) from None
        if not os.access(folder, os.W_OK):
            raise SetupError(
                f"cannot write to {folder}: permission denied; give another place with run.root=..."
            )
        free = shutil.disk_usage(folder).free
        if free < _NEEDED_BYTES:
            raise SetupError(
                f"{folder} has {free / 1e9:.1f} GB free and a run needs {_NEEDED_BYTES / 1e9:.0f} GB; "
                "free some, or give another place with run.root=..."
            )


@contextlib.contextmanager
def sole_run(root: Path) -> Iterator[None]:
    """Hold the run's folder; raise SetupError if another run that is alive holds it."""
    lock = filelock.FileLock(root / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise NotReadyError(
            f"another run is writing to {root}; "
            "wait for it, or give this one a name of its own with run.id=..."
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_budget(cfg: TrainConfig) -> list[str]:
    """Raise SetupError if the longest episode does not fit the engine's limits.

    Returns:
        A line that says why it could not be checked, if it could not.
    """
    from skyrl.train.generators.utils import get_custom_chat_template
    from transformers import AutoTokenizer

    from skyrl_maze import budget
    from skyrl_maze.vision import PictureReader, context_window, model_config, vision_tokens

    path = cfg.trainer.policy.model.path
    if absent := _absent(path):
        return [f"whether the longest episode fits could not be checked: {absent}"]
    try:
        tokenizer, reader = AutoTokenizer.from_pretrained(path), PictureReader(path)
    except Exception as error:  # whatever a damaged file makes the libraries say
        why = f"{path} cannot be read here ({cause_of(error)})"
        return [f"whether the longest episode fits could not be checked: {why}"]
    config = model_config(path)
    chat = ChatFormat(
        tokenizer,
        get_custom_chat_template(cfg.generator.chat_template),
        cfg.generator.chat_template_kwargs,
        vision_tokens(tokenizer, config).banned_ids,
    )
    longest = budget.longest_episode(cfg, chat, reader.tokens)
    limits = cfg.generator.inference_engine.engine_init_kwargs.get("limit_mm_per_prompt") or {}
    window = context_window(cfg.generator, config)
    pictures = limits.get("image")
    allowed = pictures.get("count") if isinstance(pictures, dict) else pictures
    problems = longest.problems(window, cfg.generator.max_input_length, allowed)
    if problems:
        raise SetupError("the longest episode does not fit:\n  - " + "\n  - ".join(problems))
    return []


def _absent(path: str) -> str:
    """A line if the model is to lie in a folder that is not here."""
    return f"there is no model in {path} here" if Path(path).is_absolute() and not Path(path).is_dir() else ""


def check_adapter(cfg: TrainConfig) -> list[str]:
    """Raise ConfigError if the LoRA settings give this model matrices that the engines would ignore, or none.

    Returns:
        A line that says why it could not be checked, if it could not.
    """
    if cfg.trainer.policy.model.lora.rank == 0:
        return []
    try:
        shapes = adapter_shapes(cfg)
    except SetupError as error:
        return [f"whether the engines know every LoRA module could not be checked: {error}"]
    if problems := adapter_problems(shapes):
        more = len(problems) - _SHOWN
        shown = problems[:_SHOWN] + [f"and {more} more"] * (more > 0)
        raise ConfigError.from_problems(f"{_lora_title(cfg)}:", shown)
    return []


def _lora_names(cfg: TrainConfig) -> dict[str, Any]:
    lora = cfg.trainer.policy.model.lora
    return {"target_modules": lora.target_modules, "exclude_modules": lora.exclude_modules}


def _lora_title(cfg: TrainConfig) -> str:
    return f"these LoRA settings do not work for {cfg.trainer.policy.model.path}: {_lora_names(cfg)}"


def adapter_shapes(cfg: TrainConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each LoRA matrix that the run would train, by PEFT's name.

    Raises:
        SetupError: the model's config cannot be read here.
        ConfigError: the model has no module of that name.
    """
    import peft
    import torch
    from transformers import AutoModelForImageTextToText

    from skyrl_maze.vision import model_config

    model, lora = cfg.trainer.policy.model, cfg.trainer.policy.model.lora
    if absent := _absent(model.path):
        raise SetupError(absent)
    try:
        with torch.device("meta"):  # names and shapes without a byte of weights
            bare = AutoModelForImageTextToText.from_config(model_config(model.path))
    except Exception as error:  # whatever a damaged file makes the libraries say
        raise SetupError(f"the config of {model.path} cannot be read here ({cause_of(error)})") from error
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, **_lora_names(cfg))
    try:
        tuned = peft.get_peft_model(bare, settings)
    except ValueError as error:  # nothing of that name
        raise ConfigError(f"{_lora_title(cfg)}: {cause_of(error)}") from error
    matrices = ((n, p.shape) for n, p in tuned.named_parameters() if "lora_" in n)
    return {name.replace(".default.", "."): tuple(shape) for name, shape in matrices}
