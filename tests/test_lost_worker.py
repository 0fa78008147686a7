"""A run on a Ray cluster, from submission to a maze played with what it learned; a node is lost on the way.

One run for all tests here: a head and two workers, `skyrl-maze resubmit`, the image's `train_job.sh` with the
CPU recipe. A worker that holds a rank is killed in the middle of a step; another takes its place later.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serve
from local_cluster import (
    CLEAN,
    PATH,
    LocalCluster,
    end,
    free_port,
    job_client,
    local_cluster,
    lose,
    node_id,
)
from manifests import HYPERPOD

from skyrl_maze import checkpoints, versions
from skyrl_maze.adapter import CONFIG_FILE
from skyrl_maze.batches import TrainBatches
from skyrl_maze.results import read_result
from skyrl_maze.runlog import EVENTS_FILE, read_metrics

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(3000)]

PROGRAM = Path(sysconfig.get_path("scripts")) / "skyrl-maze"
REPO, BIG = "VisGym/visgym_model", "model.safetensors"
RUN_ID, STEPS, SEED, ROWS, BATCH = "007", 3, 3, 12, 4
TOKEN = "hf_never_to_be_seen"
SETTINGS = (
    "run.join_cluster=true",
    f"trainer.max_training_steps={STEPS}",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=1",
    "trainer.resume_mode=latest",
    "trainer.placement.policy_num_nodes=2",
    "trainer.placement.policy_num_gpus_per_node=1",
    "generator.n_samples_per_prompt=4",
)
LIMIT_S = 900


@dataclass(frozen=True)
class Run:
    """A run that is over, and what was seen of it."""

    root: Path
    exit_code: int
    log: str
    """Of all jobs, as the supervisor shows it."""
    told: str
    """By the supervisor itself."""
    events: list[dict[str, Any]]
    lost_step: int
    """The step that was going on when the worker was lost."""


def read_events(root: Path) -> list[dict[str, Any]]:
    path = root / EVENTS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(what: Callable[[], bool], supervisor: subprocess.Popen[bytes], files: tuple[Path, ...]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not what():
        said = "\n".join(path.read_text(errors="replace")[-5000:] for path in files)
        assert supervisor.poll() is None, said
        assert time.monotonic() < deadline_s, said
        time.sleep(0.2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Run:
    shared = tmp_path_factory.mktemp("shared")
    environment = {
        **CLEAN,
        "PATH": PATH,
        "PYTHONUNBUFFERED": "1",
        "MAZE_SHARED": str(shared),
        "MAZE_RECIPE": "maze_cpu",
        "MAZE_RUN_ID": RUN_ID,
        "MAZE_OVERRIDES": " ".join(SETTINGS),
        "MAZE_WAIT_S": "300",
        "HF_TOKEN": TOKEN,
        "XDG_CACHE_HOME": str(model_cache),
    }
    with (
        serve(Hub(REPO, {BIG: os.urandom(1 << 20)})) as hub,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        local_cluster(Path(folder), environment) as cluster,
    ):
        job_client(cluster.dashboard)
        for _ in range(2):
            cluster.add_worker(gpus=2)
        return _run(cluster, shared, f"HF_ENDPOINT={hub.url}", f"MAZE_MODEL_REPO={REPO}")


def _run(cluster: LocalCluster, shared: Path, *variables: str) -> Run:
    root, out, err = shared / "runs" / RUN_ID, shared / "out", shared / "err"
    job = [*variables, "bash", str(HYPERPOD / "train_job.sh"), f"trainer.seed={SEED}"]
    with (
        out.open("wb") as stdout,
        err.open("wb") as stderr,
        subprocess.Popen(
            [PROGRAM, "resubmit", "--address", cluster.dashboard, "--tries", "3", "--wait", "1", "--", *job],
            env={**CLEAN, "COLUMNS": "200"},
            stdout=stdout,
            stderr=stderr,
        ) as supervisor,
    ):

        def happened(kind: str, step: int) -> bool:
            return any(event["event"] == kind and event.get("step") == step for event in read_events(root))

        try:
            wait_for(lambda: happened("saved", 1) and happened("played", 2), supervisor, (out, err))
            (placed,) = [event for event in read_events(root) if event["event"] == "placed"]
            (victim,) = [w for w in cluster.workers if node_id(w) == placed["rank_nodes"][-1]]
            lost_step = [event["step"] for event in read_events(root) if event["event"] == "training"][-1]
            lose(victim)
            wait_for(lambda: b"waiting: 3 GPU(s) are needed" in out.read_bytes(), supervisor, (out, err))
            cluster.add_worker(gpus=2)
            supervisor.wait(LIMIT_S)
        finally:
            supervisor.kill()
    return Run(root, supervisor.returncode, out.read_text(), err.read_text(), read_events(root), lost_step)


def test_it_ends_complete_on_the_second_try_that_begins(run: Run) -> None:
    assert run.exit_code == 0, run.told + run.log
    rows = [line for line in run.told.splitlines() if re.match(r"│ \d", line)]  # a long one goes on below
    first, *unbegun, last = rows  # while Ray has not noticed the loss, it may place the job on the lost node
    assert re.search(r"│ 1 of 3 +│ failed, exit code 1: ", first)
    assert all(re.search(r"│ none +│ failed: it never began", row) for row in unbegun), run.told
    assert re.search(r"│ 2 to 3 of 3 +│ succeeded, exit code 0", last)
    assert [record["step"] for record in read_metrics(run.root)] == [1, 2, 3]


def test_a_lost_worker_ends_the_job_with_one_clear_line(run: Run) -> None:
    errors = [line for line in run.log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.match(
        r"error: 1 node\(s\) of the cluster were lost: [0-9.]+ \([0-9a-f]{8}\) \(.+\); with", errors[0]
    )
    # What Python's own resource tracker may print at exit, when its node is gone, comes after.
    assert "Traceback" not in run.log.partition("error: ")[0]


def test_it_goes_on_from_the_last_checkpoint(run: Run) -> None:
    assert run.lost_step == 2
    assert "goes on after step 1, from " in run.log
    last = checkpoints.newest(run.root / "checkpoints", RUN_ID, lambda _: None)
    assert last is not None
    state = checkpoints.read_state(last)
    assert (state.step, state.position, state.ranks) == (STEPS, STEPS, 2)


def test_each_step_takes_the_rows_of_an_undisturbed_run(run: Run) -> None:
    expected = list(TrainBatches(range(ROWS), list, BATCH, epochs=1, seed=SEED))
    played = [(event["step"], event["rows"]) for event in run.events if event["event"] == "played"]
    assert [step for step, _ in played] == [1, 2, 2, 3]
    assert [rows for _, rows in played] == [expected[step - 1] for step, _ in played]


def test_the_adapter_is_merged_on_the_head_and_published(run: Run) -> None:
    for placed in [event for event in run.events if event["event"] == "placed"]:
        assert placed["merger_node"] not in placed["rank_nodes"]
        assert placed["rank_nodes"]  # both ranks may be on one node
    shared = [event for event in run.events if event["event"] == "shared"]
    assert all(event["on_head"] for event in shared)
    newest = versions.latest(run.root / "lora_sync", RUN_ID)
    assert newest is not None
    assert newest.step == STEPS
    exported = run.root / f"exports/global_step_{STEPS}/policy/adapter_model.safetensors"
    assert exported.read_bytes() == (newest.adapter / exported.name).read_bytes()


def test_the_model_is_fetched_once_and_no_token_is_seen(run: Run) -> None:
    assert run.log.count("fetched and checked") == 1
    assert run.log.count("as fetched before") == 1
    assert (run.root.parents[1] / "models/visgym_model" / BIG).stat().st_size == 1 << 20
    logs = [run.log, *(path.read_text(errors="replace") for path in run.root.glob("logs/*"))]
    assert len(logs) > 1
    assert not [text for text in logs if TOKEN in text]


@contextlib.contextmanager
def served(adapter: Path, name: str, log: Path) -> Iterator[str]:
    """Plain vLLM with an adapter on its base; gives the address of its OpenAI API."""
    base = json.loads((adapter / CONFIG_FILE).read_text())["base_model_name_or_path"]
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", base, "--port", str(port)),
        *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(1 << 28), "--limit-mm-per-prompt", '{"image": 12}'),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{name}={adapter}"),
    ]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env={**CLEAN, **environment}, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            deadline_s = time.monotonic() + LIMIT_S
            while True:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end(process)


def test_a_maze_is_played_with_the_adapter_that_is_served(run: Run, tmp_path: Path) -> None:
    adapter = run.root / f"exports/global_step_{STEPS}/policy"
    with served(adapter, "maze-grpo", tmp_path / "server.log") as url:
        models = json.load(urllib.request.urlopen(f"{url}/models", timeout=30))
        assert "maze-grpo" in [model["id"] for model in models["data"]]
        command = [PROGRAM, "play", "--endpoint", url, "--model", "maze-grpo", "--recipe", "maze_cpu"]
        done = subprocess.run(
            [*command, "--samples", "1", "--out", tmp_path / "played"],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "played")
    assert [episode.error for episode in result.episodes] == [None] * 4
    assert all(episode.turns for episode in result.episodes)
