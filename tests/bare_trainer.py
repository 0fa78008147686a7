"""A whole trainer that needs no Ray: it has no data set and no models, and may have mazes to play."""

import asyncio
from pathlib import Path

import pytest
from loguru import logger

from skyrl_maze import _compat

_compat.install()

from fake_engine import FakeEngine  # noqa: E402
from skyrl.train import trainer as skyrl_trainer  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from skyrl_maze import tiny  # noqa: E402
from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.env import register  # noqa: E402
from skyrl_maze.generator import MazeVLMGenerator  # noqa: E402
from skyrl_maze.maze import generate_maze  # noqa: E402
from skyrl_maze.trainer import MazeTrainer  # noqa: E402
from skyrl_maze.vision import PictureReader  # noqa: E402

FILTER = "trainer.algorithm.zero_variance_filter=true"
_WORDS = "user\nassistant\n<action>right</action> You moved. Walls are in the way."


def trainer_of(*settings, tokenizer=None):
    """The trainer of the rehearsal with these settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skyrl_trainer, "configure_ray_worker_logging", lambda: None)  # would move the logs
        no_ray = "generator.inference_engine.enable_ray_prometheus_stats=false"
        cfg = build_config(["+recipe=maze_cpu", no_ray, *settings])
        return MazeTrainer(cfg, None, tokenizer, None, None, None)


def playing_trainer(folder: Path, *settings):
    """A trainer whose generator really plays mazes, three turns each and always to the right."""
    register()
    if not (folder / "config.json").exists():
        tiny.save_random_model(folder, [_WORDS])
    tokenizer, reader = AutoTokenizer.from_pretrained(folder), PictureReader(str(folder))
    answer = tokenizer.encode("<action>right</action><|im_end|>")
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    engine = FakeEngine(reader, image_id, lambda _prompt, _room: (list(answer), "stop"))
    room = f"generator.sampling_params.max_generate_length={len(answer)}"
    trainer = trainer_of("generator.max_turns=3", room, *settings, tokenizer=tokenizer)
    parts = trainer.cfg.generator, trainer.cfg.environment.skyrl_gym, engine, tokenizer
    trainer.generator = MazeVLMGenerator(*parts, policy_model_name="policy")
    return trainer


def play(trainer, step, samples=2):
    """The output of a step and what was logged meanwhile."""
    trainer.global_step = step
    batch = {
        "prompts": [[{"role": "user", "content": "maze"}]] * samples,
        "env_classes": ["maze"] * samples,
        "env_extras": [{"maze": generate_maze(7, seed).to_text()} for seed in range(samples)],
        "trajectory_ids": [TrajectoryID(f"maze-{i}", 0) for i in range(samples)],
    }
    lines = []
    sink = logger.add(lines.append, format="{message}")
    try:
        return asyncio.run(trainer.generate(batch)), "".join(lines)
    finally:
        logger.remove(sink)


def output_of(rewards, masks=None, **more):
    """A generator's output with these rewards per token."""
    masks = masks or [[1] * len(row) for row in rewards]
    ids = [[5] * len(mask) for mask in masks]
    return {"response_ids": ids, "rewards": rewards, "loss_masks": masks, **more}
