"""The example environment: its rules, what it shows, and its way through the job script of a cluster."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import CLEAN, PATH, job_client, local_cluster, wait_for_job
from manifests import HYPERPOD, ROOT, build
from PIL import Image

from skyrl_maze import _compat, fit, recipes
from skyrl_maze.errors import ConfigError
from skyrl_maze.findings import Status

_compat.install()

import skyrl_gym  # noqa: E402
from sliding_puzzle.env import ENV_ID, SlidingPuzzleConfig, SlidingPuzzleEnv, answer, register  # noqa: E402
from sliding_puzzle.picture import data_uri  # noqa: E402
from sliding_puzzle.puzzle import SLIDES, Board, draw, within  # noqa: E402
from sliding_puzzle.task import SlidingPuzzleTask  # noqa: E402

from skyrl_maze.config import build_config  # noqa: E402

TASK = SlidingPuzzleTask()
EXAMPLE = ROOT / "examples/sliding_puzzle"
HEADER = ["Purpose", "Hardware", "Expected", "Launch", "Override"]
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
words = st.lists(st.sampled_from(sorted(SLIDES)), max_size=30)


def cfg_of(recipe: str, *overrides: str) -> Any:
    return build_config([f"+recipe=sliding_puzzle:{recipe}", *overrides])


def env_of(board: Board, max_turns: int = 5, **settings: Any) -> SlidingPuzzleEnv:
    extras = {"board": board.to_text(), "max_turns": max_turns}
    return SlidingPuzzleEnv(SlidingPuzzleConfig(**settings), extras)


# --- the puzzle


@given(st.integers(2, 4), words)
def test_a_slide_can_be_taken_back_and_a_board_told_by_its_text(size: int, path: list[str]) -> None:
    board = Board.solved(size)
    for word in path:
        after = board.slide(word)
        assert after == board or after.slide(OPPOSITE[word]) == board
        assert abs(after.distance - board.distance) <= 1
        board = after
        assert Board.from_text(board.to_text()) == board
        assert board.is_solved == (board.distance == 0)


@pytest.mark.parametrize("text", ["", "0", "1 0", "1 2 3", "1 2 3 4", "0 1 2 2", "a b c d", "-1 0 1 2"])
def test_another_text_is_no_board(text: str) -> None:
    with pytest.raises(ValueError, match=r"no square board|invalid literal"):
        Board.from_text(text)


def test_every_board_within_reach_is_listed_once() -> None:
    # Known counts of the 8-puzzle with the gap in a corner: 2, 4, 8, 16, 20 boards more, slide by slide.
    assert [len(set(within(3, slides))) for slides in range(1, 6)] == [2, 6, 14, 30, 50]
    assert len(list(within(2, 6))) == 11, "of the 12 that can be reached"
    drawn = draw(3, 5, 50, seed=0)
    assert len(set(drawn)) == 50
    assert drawn == draw(3, 5, 50, seed=0) != draw(3, 5, 50, seed=1)
    with pytest.raises(ValueError, match="50 boards of size 3 need at most 5 slides, not 51"):
        draw(3, 5, 51, seed=0)


def test_a_picture_shows_each_tile_in_its_cell() -> None:
    board = Board.solved(3).slide("up")
    picture = Image.open(io.BytesIO(base64.b64decode(data_uri(board, 16).partition(",")[2])))
    assert picture.size == (48, 48)
    middles = [picture.getpixel((16 * col + 8, 16 * row + 8)) for row in range(3) for col in range(3)]
    assert len(set(middles)) == 9
    assert middles[board.tiles.index(0)] == (255, 255, 255)
    numbered = Image.open(io.BytesIO(base64.b64decode(data_uri(board, 64).partition(",")[2])))
    colours = {colour for _, colour in numbered.crop((0, 0, 64, 64)).getcolors(4096) or []}
    assert (0, 0, 0) in colours, "a number is on the tile"


# --- the environment


def test_solving_pays_and_ends_it() -> None:
    env = env_of(Board.solved(3).slide("up").slide("left"))
    (message,), _ = env.init([])
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert "3 by 3 cells" in message["content"][1]["text"]
    first, second = env.step(answer("right")), env.step(f" {answer('down')}\n")
    assert (first["reward"], first["done"], len(first["observations"])) == (0.25, False, 1)
    assert (second["reward"], second["done"], second["observations"]) == (1.25, True, [])
    assert env.get_metrics() == {"success": 1.0, "turns": 2.0, "misunderstood": 0.0}


@pytest.mark.parametrize(
    "said", ["", "up", "<slide>up</slide><slide>up</slide>", "<slide>UP</slide>", "\ud800"]
)
def test_an_answer_that_is_no_action_costs_a_turn(said: str) -> None:
    env = env_of(Board.solved(2).slide("up"), max_turns=2)
    env.init([])
    step = env.step(said)
    assert (step["reward"], step["done"]) == (0.0, False)
    assert "was not understood" in step["observations"][0]["content"][1]["text"]
    assert env.step(said)["done"], "the turns are used up"
    assert env.get_metrics() == {"success": 0.0, "turns": 2.0, "misunderstood": 1.0}


@given(st.sampled_from(list(within(3, 5))), words)
def test_no_detour_pays(board: Board, path: list[str]) -> None:
    env = env_of(board, max_turns=len(path) + 1, shaping_weight=0.5)
    env.init([])
    total = 0.0
    for word in path:
        step = env.step(answer(word))
        total += step["reward"]
        if step["done"]:
            break
    shaping = 0.5 * (1 - env.board.distance / board.distance)
    assert total == pytest.approx(float(env.board.is_solved) + shaping)


def test_skyrl_makes_it_by_its_name() -> None:
    register()
    register()
    extras = {"board": Board.solved(2).slide("left").to_text(), "max_turns": 3}
    env = skyrl_gym.make(ENV_ID, env_config=SlidingPuzzleConfig(cell_px=16), extras=extras)
    env.init([])
    assert env.step(answer("right"))["done"]
    assert SlidingPuzzleEnv.aggregate_metrics([{"success": 1.0}, {"success": 0.0}])["solve_rate"] == 0.5


# --- the task


@pytest.mark.parametrize("recipe", ["cpu", "gpu"])
def test_its_recipes_are_sound(recipe: str, tmp_path: Path) -> None:
    cfg = cfg_of(recipe, f"data.boards.folder={tmp_path}/boards")
    assert TASK.warnings(cfg) == []
    assert list(recipes.about(recipes.find(f"sliding_puzzle:{recipe}"))) == HEADER
    train, evaluation = TASK.write_data(cfg)
    rows = pq.read_table(train).to_pylist()
    assert len(rows) == TASK.rows(cfg)
    assert {row["env_class"] for row in rows} == {ENV_ID}
    held_out = {row["board"] for row in pq.read_table(evaluation).to_pylist()}
    assert held_out.isdisjoint(row["board"] for row in rows)
    assert len(held_out) == cfg.data.boards.eval


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.boards.slides=0", "data.boards: size=3 must be from 2 to 4, slides=0 from 1"),
        ("data.boards.size=9", "data.boards: size=9 must be from 2 to 4, slides=5 from 1"),
        ("data.boards.train=100", "data.boards: 50 boards of size 3 need at most 5 slides, not 108; lower"),
        ("environment.skyrl_gym.sliding_puzzle.cell_px=1", "cell_px=1: must be from 4 to 512"),
        ("data.boards.sise=3", "data.boards.sise: there is no such setting; did you mean 'size'"),
        ("data.mazes.folder=x", "data.mazes: there is no such setting"),
        ("data.boards.train=3", "the training set has 3 row.s., which give no full batch of"),
    ],
)
def test_settings_that_cannot_work_are_told(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cfg_of("cpu", override)


def test_too_few_turns_are_warned_of() -> None:
    assert TASK.warnings(cfg_of("cpu", "generator.max_turns=4")) == [
        "generator.max_turns=4: some boards need 5 slides"
    ]


def test_the_manifests_fit_its_recipe_as_they_are() -> None:
    things = build("published")
    settings = fit.settings_of(things, "sliding_puzzle:gpu", [], {})
    findings = fit.check_plan(fit.Plan(build_config(settings), things))
    assert [finding.name for finding in findings if finding.status is Status.FAIL] == []


# --- installed, and on a cluster


@pytest.mark.slow
def test_its_package_can_be_installed_and_its_recipe_is_found(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    source = shutil.copytree(EXAMPLE, tmp_path / "source")  # building writes beside it
    install = [scripts / "uv", "pip", "install", "--no-deps", "--python", sys.executable]
    done = subprocess.run([*install, "--target", tmp_path / "site", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [scripts / "skyrl-maze", "recipes", "show", "sliding_puzzle:gpu"],
        env={**CLEAN, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), CLEAN.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert yaml.safe_load(shown.stdout)["run"]["task"] == "sliding_puzzle.task:SlidingPuzzleTask"


@pytest.mark.rehearsal
@pytest.mark.timeout(900)
def test_the_job_script_trains_it_with_another_recipe_alone(tmp_path: Path, model_cache: Path) -> None:
    """The package comes with the job, as `ray job submit --working-dir` sends it; nothing else is changed."""
    given = {
        **CLEAN,
        "PATH": PATH,
        "MAZE_SHARED": str(tmp_path / "shared"),
        "MAZE_RECIPE": "sliding_puzzle:cpu",
        "MAZE_RUN_ID": "boards",
        "MAZE_OVERRIDES": "trainer.max_training_steps=2",
        "XDG_CACHE_HOME": str(model_cache),
    }
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        local_cluster(Path(folder), given) as cluster,
    ):
        client = job_client(cluster.dashboard)
        job = client.submit_job(
            entrypoint=f"bash {HYPERPOD / 'train_job.sh'}", runtime_env={"working_dir": str(EXAMPLE)}
        )
        assert wait_for_job(client, job) == "SUCCEEDED", client.get_job_logs(job)
    run = tmp_path / "shared/runs/boards"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "timing/step" in record] == [1, 2]
    assert [name for name in ("eval/solve_rate", "train/solve_rate") if name not in records[-1]] == []
    assert yaml.safe_load((run / "recipe.yaml").read_text())["environment"]["env_class"] == ENV_ID
    assert (run / "lora_sync/boards/versions/2.0/COMPLETE").is_file()
