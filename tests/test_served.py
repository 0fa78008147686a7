"""A model that vLLM serves walks alike, asked over OpenAI's protocol or by the rollouts of training."""

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_maze import _compat

_compat.install()

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.config.config import InferenceEngineConfig  # noqa: E402
from skyrl.train.generators.base import BatchMetadata, TrajectoryID  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from benchmarks.generator import MAX_MODEL_LEN, server  # noqa: E402
from skyrl_maze import cli, dataset, maze_task, tiny  # noqa: E402
from skyrl_maze.env import MazeConfig, register  # noqa: E402
from skyrl_maze.evaluate import figures  # noqa: E402
from skyrl_maze.faults import RolloutConfig  # noqa: E402
from skyrl_maze.generator import MazeVLMGenerator  # noqa: E402
from skyrl_maze.maze import Maze  # noqa: E402
from skyrl_maze.records import EpisodeRecord  # noqa: E402
from skyrl_maze.results import read_result  # noqa: E402

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.timeout(900),
    # Said by vLLM's decoder of tensors and by SkyRL's client when it sends them.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

MAX_TURNS, ANSWER_TOKENS = 5, 10
CONFIG = MazeConfig(theme="tokens", cell_px=16, grammar="keyword", goal_rule="reach")
ROOM = ["#####", "#...#", "#...#", "#...#", "#####"]


def mazes() -> list[Maze]:
    """The goal lies to each side of the start, so a model that always goes one way solves some of them."""
    middle = (2, 2)
    sides = [(2, 3), (1, 2), (2, 1), (3, 2)]
    corners = [Maze.from_rows(ROOM, (1, 1), (3, 3)), Maze.from_rows(ROOM, (3, 3), (1, 1))]
    return [*(Maze.from_rows(ROOM, middle, goal) for goal in sides), *corners]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(model_cache))
        built = maze_task.tiny_model(CONFIG, [5], MAX_TURNS, tiny.WarmUp(steps=100, turns=MAX_TURNS))
    folder = tmp_path_factory.mktemp("served")
    (folder / "model").symlink_to(built)
    return folder / "model"


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with server(model.parent, cache_gb=0.2, max_turns=MAX_TURNS) as (address, _):
        yield address


async def rolled_out(url: str, tokenizer: Any) -> list[EpisodeRecord]:
    """The records of one evaluation batch, as the trainer gets them."""
    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="base", tokenizer=tokenizer
    )
    config = GeneratorConfig(
        max_turns=MAX_TURNS,
        max_input_length=MAX_MODEL_LEN - ANSWER_TOKENS,
        inference_engine=InferenceEngineConfig(engine_init_kwargs={"max_model_len": MAX_MODEL_LEN}),
    )
    config.rollouts = RolloutConfig(retries=0)
    gym = SkyRLGymConfig()
    gym.maze = CONFIG
    rows = dataset.rows(mazes(), "room")
    batch = {
        "prompts": [row["prompt"] for row in rows],
        "env_classes": [row["env_class"] for row in rows],
        "env_extras": rows,
        "sampling_params": {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "logprobs": 1},
        "trajectory_ids": [TrajectoryID(str(i), 0) for i in range(len(rows))],
        "batch_metadata": BatchMetadata(0, "eval"),
    }
    try:
        output = await MazeVLMGenerator(config, gym, client, tokenizer).generate(batch, disable_tqdm=True)
    finally:
        await client.teardown()
    assert output["masked_because"] == [None] * len(rows)
    return [record.played_as(i, 0, None) for i, record in enumerate(output["records"])]


def test_play_and_rollouts_solve_the_same_mazes(
    url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    inside = asyncio.run(rolled_out(url, AutoTokenizer.from_pretrained(model)))
    dataset.write_rows(tmp_path / "room.parquet", dataset.rows(mazes(), "room"))
    changed = {"theme": "tokens", "cell_px": "16", "grammar": "keyword", "goal_rule": "reach"}
    overrides = [f"environment.skyrl_gym.maze.{name}={value}" for name, value in changed.items()]
    options = {
        "--endpoint": f"{url}/v1",
        "--model": "base",
        "--mazes": tmp_path / "room.parquet",
        "--out": tmp_path / "out",
        "--max-turns": MAX_TURNS,
        "--max-tokens": ANSWER_TOKENS,
        "--temperature": 0.0,
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    monkeypatch.setattr(sys, "argv", ["skyrl-maze", "play", *overrides, *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0, capsys.readouterr().err
    result = read_result(tmp_path / "out")
    assert [dataclasses.replace(episode, seconds=None) for episode in result.episodes] == inside
    assert result.summary.figures == figures(inside)
    assert 0 < result.summary.solve_rate < 1, "a comparison that is worth something"
    assert all(turn.action is not None for episode in inside for turn in episode.turns)
