"""What runs in a cluster: the download, the wait for GPUs, the job's script; with real processes and Ray.

The Hub is a server on this machine. The clusters are real, with the manifests' GPUs as logical ones.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import hang_agent
import hyperpod_gateway
import psutil
import pytest
import typer
from hub_server import COMMIT, Hub, serve
from hyperpod_gateway import Gateway
from local_cluster import CLEAN, PATH, free_port, job_client, local_cluster, lose, wait_for_job
from manifests import HYPERPOD, ROOT, build
from typer.testing import CliRunner

from skyrl_maze.errors import SetupError, exit_code
from skyrl_maze.hyperpod.fetch import fetch as fetch_here
from skyrl_maze.hyperpod.fetch import main as fetch_main
from skyrl_maze.hyperpod.ready import _gpus_lacking, _wait_while
from skyrl_maze.hyperpod.ready import main as ready_main
from skyrl_maze.manifests import GPU, container, count, environment, groups_of

REPO = "VisGym/visgym_model"
FILES = "mixed_qwen3vl/*"
BIG = "mixed_qwen3vl/model.safetensors"
SCRIPT = HYPERPOD / "train_job.sh"
NODE = "127.0.0.90"  # of a pod, to HyperPod's agent


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {BIG: os.urandom(24 << 20), "mixed_qwen3vl/config.json": b"{}", "other/config.json": b"{}"}
    with serve(Hub(REPO, files)) as served:
        yield served


def fetch(hub: Hub, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "skyrl_maze.hyperpod.fetch", REPO, str(folder), "--files", FILES, *options],
        env={**CLEAN, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return line


def downloads(hub: Hub, name: str) -> list[str]:
    return [request for request in hub.requests if request.startswith("GET") and name in request]


# --- fetch ---


def test_a_model_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path).returncode == 0
    assert (tmp_path / BIG).read_bytes() == hub.files[BIG]
    assert not (tmp_path / "other").exists()
    marker = json.loads((tmp_path / "FETCHED.json").read_text())
    assert marker == {"repo": REPO, "revision": "main", "files": FILES, "commit": COMMIT}
    hub.requests.clear()
    done = fetch(hub, tmp_path)
    assert "as fetched before" in done.stdout
    assert not [request for request in hub.requests if REPO in request]


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.breaks[BIG] = 12 << 20
    assert fetch(hub, tmp_path).returncode == 0
    assert (tmp_path / BIG).read_bytes() == hub.files[BIG]
    assert [request.partition("bytes=")[2] for request in downloads(hub, BIG)] == ["", f"{10 << 20}-"]


def test_a_job_that_was_killed_leaves_nothing_in_the_way(hub: Hub, tmp_path: Path) -> None:
    left = tmp_path / ".cache/huggingface/download/mixed_qwen3vl/x.0123.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert fetch(hub, tmp_path).returncode == 0
    assert not left.exists()


def test_a_damaged_file_is_found_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.damaged.add(BIG)
    done = fetch(hub, tmp_path)
    assert done.returncode == 75
    assert f"damaged: ['{BIG}']" in error_of(done)
    assert not (tmp_path / "FETCHED.json").exists()
    hub.damaged.clear()
    assert fetch(hub, tmp_path).returncode == 0
    assert (tmp_path / BIG).read_bytes() == hub.files[BIG]
    assert len(downloads(hub, "config.json")) == 1  # what was whole stayed


def test_the_token_comes_from_a_file(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    done = fetch(hub, tmp_path / "without")
    assert done.returncode == 2
    assert f"the Hub refuses {REPO} at main" in error_of(done)
    (tmp_path / "token").write_text("hf_secret\n")
    done = fetch(hub, tmp_path / "with", HF_TOKEN_PATH=str(tmp_path / "token"))
    assert done.returncode == 0, done.stderr
    assert "hf_secret" not in done.stdout + done.stderr


def test_another_model_does_not_take_the_place_of_one(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path).returncode == 0
    done = fetch(hub, tmp_path, "--revision", COMMIT)
    assert done.returncode == 2
    assert f"holds {FILES} of {REPO} at main, and {FILES} of {REPO} at {COMMIT} is asked" in error_of(done)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--revision", "gone"], "refuses VisGym/visgym_model at gone"),
        (["--files", "x/*"], "0 file(s) match"),
    ],
)
def test_what_is_not_there_is_said(hub: Hub, tmp_path: Path, options: list[str], said: str) -> None:
    done = fetch(hub, tmp_path, *options)
    assert done.returncode == 2
    assert said in error_of(done)


@pytest.mark.parametrize("repo", ["VisGym/visgym model", "a/b/c", "a/b/", ".."])
def test_a_name_that_no_model_has_is_not_tried_again(
    hub: Hub, tmp_path: Path, monkeypatch, repo: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with pytest.raises(SetupError, match="HFValidationError") as refused:
        fetch_here(repo, tmp_path)
    assert exit_code(refused.value) == 2


@pytest.mark.parametrize("marker", ["", "{", "[3]", "\x00", "3"])
def test_a_damaged_marker_is_said(tmp_path: Path, marker: str) -> None:
    (tmp_path / "FETCHED.json").write_text(marker)
    with pytest.raises(SetupError, match=r"FETCHED.json is damaged .*; remove it to fetch anew"):
        fetch_here(REPO, tmp_path)


@pytest.mark.parametrize("wait_s", ["-5", "nan", "inf", "abc"])
@pytest.mark.parametrize(("main", "words"), [(fetch_main, [REPO, "folder"]), (ready_main, ["+recipe=maze"])])
def test_a_wait_has_an_end(main: Callable[..., None], words: list[str], wait_s: str) -> None:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, ["--wait-s", wait_s, "--", *words])
    assert done.exit_code == 2
    assert "Invalid value for '--wait-s'" in done.output


def test_a_hub_that_does_not_answer_is_said(hub: Hub, tmp_path: Path) -> None:
    hub.url = f"http://127.0.0.1:{free_port()}"
    done = fetch(hub, tmp_path)
    assert done.returncode == 75
    assert f"cannot fetch {REPO} into {tmp_path}" in error_of(done)


def test_two_jobs_fetch_once(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyrl_maze.hyperpod.fetch", REPO, str(tmp_path), "--files", FILES]
    jobs = [
        subprocess.Popen(command, env={**CLEAN, "HF_ENDPOINT": hub.url}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert sum("fetched and checked" in text for text in said) == 1
    assert len(downloads(hub, BIG)) == 1


def test_waiting_for_another_job_is_bounded(hub: Hub, tmp_path: Path) -> None:
    with filelock.FileLock(tmp_path / ".lock"):
        done = fetch(hub, tmp_path, "--wait-s", "1")
    assert done.returncode == 75
    assert "another job has held" in error_of(done)


# --- ready ---


def test_the_wait_ends_when_the_gpus_are_free() -> None:
    states = iter([(0, 0), (4, 4), (6, 2), (6, 6)])
    _wait_while(lambda: _gpus_lacking(6, *next(states)), 60, poll_s=0)
    assert list(states) == []


@pytest.mark.parametrize("state", [(4, 4), (6, 2)])
def test_the_wait_for_gpus_is_bounded(state: tuple[int, int]) -> None:
    with pytest.raises(
        SetupError, match=rf"6 GPU\(s\) are needed, the cluster has {state[0]} and {state[1]} are"
    ):
        _wait_while(lambda: _gpus_lacking(6, *state), 0.01, poll_s=0.001)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a Ray cluster with the nodes of the published manifest: their CPUs and GPUs, as numbers."""
    from ray.cluster_utils import Cluster

    (manifest,) = build("published")
    head, worker = groups_of(manifest)
    small = {"object_store_memory": 100 << 20}

    def cpus(group: dict[str, Any]) -> int:
        return int(container(group)["resources"]["requests"]["cpu"])

    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": cpus(head),
            "num_gpus": count(head, GPU),
            "include_dashboard": False,
            **small,
        },
    )
    try:
        for _ in range(worker["replicas"]):
            made.add_node(num_cpus=cpus(worker), num_gpus=count(worker, GPU), **small)
        yield str(made.address)
    finally:
        made.shutdown()


def run_ready(address: str, cwd: Path, *settings: str, wait_s: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "skyrl_maze.hyperpod.ready", "--wait-s", str(wait_s), "--", *settings],
        env={**CLEAN, "RAY_ADDRESS": address},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_cluster_that_can_run_the_recipe_is_ready(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    paths = (f"run.root={tmp_path}/run", f"trainer.policy.model.path={tmp_path}/model")
    done = run_ready(cluster, tmp_path, "+recipe=maze", *paths)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_a_file_that_a_node_does_not_see_is_named(cluster: str, tmp_path: Path) -> None:
    # A path that means another folder in each process, as /shared does on a pod without the volume.
    done = run_ready(cluster, tmp_path, "+recipe=maze", "run.root=/proc/self/cwd/run")
    assert done.returncode == 2
    assert "these files are not there on these nodes; mount the shared folder on every pod" in error_of(done)
    assert done.stderr.count("/proc/self/cwd/run/.seen-") == 4
    assert done.stderr.count("/shared/models/visgym_model/mixed_qwen3vl") == 4


@pytest.mark.slow
def test_too_few_gpus_are_said(cluster: str, tmp_path: Path) -> None:
    done = run_ready(cluster, tmp_path, "+recipe=maze_1node", f"run.root={tmp_path}")
    assert done.returncode == 75
    assert "8 GPU(s) are needed, the cluster has 6 and 6 are free" in error_of(done)


@pytest.mark.slow
def test_a_node_that_was_lost_a_moment_ago_does_not_count(tmp_path: Path) -> None:
    small = ["+recipe=maze_cpu", "run.join_cluster=true", f"run.root={tmp_path}/run"]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        local_cluster(Path(folder), {**CLEAN, "PATH": PATH}) as cluster,
    ):
        job_client(cluster.dashboard)  # the head is up
        for _ in range(2):
            cluster.add_worker(gpus=2)
        assert run_ready(cluster.gcs, tmp_path, *small).returncode == 0
        lose(cluster.workers[0])  # Ray takes some seconds to notice
        done = run_ready(cluster.gcs, tmp_path, *small, wait_s=30)
        assert done.returncode == 75, done.stdout + done.stderr
        assert "3 GPU(s) are needed, the cluster has 2 and 2 are free after 3" in error_of(done)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_said(tmp_path: Path) -> None:
    done = run_ready(f"127.0.0.1:{free_port()}", tmp_path, "+recipe=maze", f"run.root={tmp_path}")
    assert done.returncode == 2
    assert "names a Ray cluster that does not answer" in error_of(done)


@pytest.mark.slow
def test_trainer_and_merger_run_on_the_head_and_ranks_beside_the_gpus(cluster: str) -> None:
    """As SkyRL and this package ask for their places, in the cluster that the manifest describes."""
    code = """
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_maze.merger import start_merger

ray.init(log_to_driver=False)
node = lambda: ray.get_runtime_context().get_node_id()
(head,) = [n["NodeID"] for n in ray.nodes() if "node:__internal_head__" in n["Resources"]]
group = placement_group([{"GPU": 1, "CPU": 1}] * 6, strategy="PACK")
ray.get(group.ready(), timeout=60)
trainers = [ray.remote(num_cpus=1)(node).remote() for _ in range(3)]
ranks = [
    ray.remote(num_cpus=1, num_gpus=1)(node)
    .options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i))
    .remote()
    for i in range(6)
]
merger = ray.get(start_merger().__ray_call__.remote(lambda self: (node(), self._on_head)))
ranks = set(ray.get(ranks))
print(set(ray.get(trainers)) == {head}, merger == (head, True), head in ranks, len(ranks))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**CLEAN, "RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["True", "True", "False", "3"], done.stderr


# --- train_job.sh ---


def test_settings_may_be_on_several_lines(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    python.chmod(0o755)
    for variable in ("a=1 b=2", "a=1\nb=2\n", " a=1\n\n  b=2"):
        done = subprocess.run(
            ["bash", str(SCRIPT), "c=3"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MAZE_OVERRIDES": variable},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert [
            line.endswith(" run.root=/shared/runs/maze a=1 b=2 c=3") for line in done.stdout.splitlines()
        ] == [
            True,
            True,
        ]


def job_environment(shared: Path, **variables: str) -> dict[str, str]:
    given = {
        "PATH": PATH,
        "MAZE_SHARED": str(shared),
        "MAZE_WAIT_S": "1",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    return {**CLEAN, **given}


def run_script(shared: Path, *settings: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *settings],
        env=job_environment(shared, **variables),
        cwd=shared,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_the_script_ends_where_the_download_fails(tmp_path: Path) -> None:
    hub = f"http://127.0.0.1:{free_port()}"
    done = run_script(tmp_path, MAZE_MODEL_REPO=REPO, HF_ENDPOINT=hub)
    assert done.returncode == 75
    assert f"cannot fetch {REPO} into {tmp_path}/models/visgym_model" in error_of(done)


@pytest.mark.slow
def test_the_script_refuses_settings_before_it_waits(tmp_path: Path) -> None:
    done = run_script(tmp_path, "trainer.sed=1", MAZE_OVERRIDES="generator.max_turns=many  run.console=full")
    assert done.returncode == 2
    assert error_of(done) == "error: 2 setting(s) cannot be used:"
    assert "trainer.sed: there is no such setting" in done.stderr


@pytest.mark.slow
def test_a_job_that_is_stopped_while_it_waits_ends_at_once(cluster: str, tmp_path: Path) -> None:
    environment = job_environment(tmp_path, RAY_ADDRESS=cluster, MAZE_RECIPE="maze_1node", MAZE_WAIT_S="600")
    with subprocess.Popen(
        ["bash", str(SCRIPT)], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        assert any(line.startswith("waiting: 8 GPU(s)") for line in job.stdout)
        children = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)  # to the script alone, as Ray does
        assert job.wait(timeout=30) == 143
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@dataclass(frozen=True)
class Jobs:
    """A head that takes jobs, and the folder that its pods would share."""

    client: Any
    shared: Path
    gateway: Gateway
    """For who comes from outside the cluster."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Jobs]:
    """Ray's job server, whose jobs get the environment of the head's container."""
    shared = tmp_path_factory.mktemp("shared")
    (manifest,) = build("published")
    name = "RAY_JOB_STOP_WAIT_TIME_S"
    given = job_environment(
        shared,
        MAZE_RECIPE="maze_cpu",
        MAZE_RUN_ID="007",
        MAZE_OVERRIDES="trainer.max_training_steps=1 trainer.eval_before_train=false",
        HF_TOKEN="hf_never_to_be_seen",
        HYPERPOD_JMA_HOST=NODE,
        XDG_CACHE_HOME=str(model_cache),
        **{name: environment(groups_of(manifest)[0])[name]},
    )
    # Not pytest's folder: Ray's sockets lie below, and their paths may not be long.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        local_cluster(Path(folder), given) as head,
        hyperpod_gateway.serve(Gateway(head.dashboard, tmp_path_factory.mktemp("gateway"))) as gateway,
    ):
        yield Jobs(job_client(head.dashboard), shared, gateway)


def from_outside(jobs: Jobs, command: str, *arguments: str) -> subprocess.Popen[str]:
    """`ray job COMMAND`, with the toolkit's address, in the checkout."""
    return subprocess.Popen(
        ["ray", "job", command, "--address", "sagemaker_ray://skyrl-visgym/hyperpod-ns-maze", *arguments],
        env={**CLEAN, "PATH": PATH, **jobs.gateway.variables},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.rehearsal
@pytest.mark.timeout(1000)
def test_a_submitted_job_fetches_and_trains(hub: Hub, jobs: Jobs) -> None:
    says = (f"HF_ENDPOINT={hub.url}", f"MAZE_MODEL_REPO={REPO}", f"MAZE_MODEL_FILES={FILES}")
    job = ("env", *says, "bash", "hyperpod/train_job.sh", "trainer.seed=3")
    with (
        hang_agent.serve(NODE) as told,
        from_outside(jobs, "submit", "--working-dir", ".", "--", *job) as submitted,
    ):
        log, error = submitted.communicate(timeout=900)
    assert submitted.returncode == 0, log + error
    assert "fetched and checked" in log
    run = jobs.shared / "runs/007"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1]
    assert (jobs.shared / "models/visgym_model" / BIG).stat().st_size == 24 << 20
    logs = [log, *(path.read_text(errors="replace") for path in run.glob("logs/*"))]
    assert not [text for text in logs if "hf_never_to_be_seen" in text]
    assert not [request for request in jobs.gateway.requests if request.endswith((" 401", " 403"))]
    watched(told)


def watched(told: list[dict[str, Any]]) -> None:
    """One rank of the node has told the agent, and printed what it told, where the agent looks."""
    (rank,) = told
    (rule,) = rank["rules_content"]["rules"]
    lines = hang_agent.stdout_of(rank)
    assert [line for line in lines if re.search(rule["log_pattern"], line)] == [
        f"skyrl_maze: the engines have the weights of step {step}" for step in (0, 1)
    ]
    assert re.search(rule["stop_pattern"], lines[-1])
    assert "skyrl_maze: hung-job detection: configured" in lines


@pytest.mark.slow
def test_a_login_that_ends_ends_what_is_shown_and_not_the_job(jobs: Jobs, tmp_path: Path) -> None:
    wait = f"echo begun; until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    with from_outside(jobs, "submit", "--submission-id", "long", "--", "bash", "-c", wait) as submitted:
        assert submitted.stdout is not None
        assert any(line == "begun\n" for line in submitted.stdout)
        jobs.gateway.sessions.clear()
        (tmp_path / "go").touch()
        _, error = submitted.communicate(timeout=120)
    assert submitted.returncode == 1
    assert "AuthenticationError: Authentication required: no session" in error
    assert wait_for_job(jobs.client, "long", 60) == "SUCCEEDED"
    with from_outside(jobs, "status", "long") as asked:  # with a login of its own
        said, _ = asked.communicate(timeout=120)
    assert "'long' succeeded" in said


@pytest.mark.slow
def test_a_working_directory_that_is_too_large_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(101 << 20)
    with from_outside(jobs, "submit", "--working-dir", str(tmp_path), "--", "true") as submitted:
        _, error = submitted.communicate(timeout=120)
    assert submitted.returncode == 1
    assert f"File {tmp_path}/model.safetensors is very large (101.00MiB)" in error
    assert "status code 413: Maximum request body size 104857600 exceeded" in error


@pytest.mark.slow
def test_the_job_has_the_exit_code_of_what_failed(jobs: Jobs) -> None:
    job = jobs.client.submit_job(entrypoint=f"MAZE_RUN_ID=b bash {SCRIPT} trainer.seed=no")
    assert wait_for_job(jobs.client, job) == "FAILED"
    assert jobs.client.get_job_info(job).driver_exit_code == 2


@pytest.mark.rehearsal
@pytest.mark.timeout(1000)
def test_a_job_that_is_stopped_ends_what_it_started(jobs: Jobs) -> None:
    job = jobs.client.submit_job(entrypoint=f"MAZE_RUN_ID=c bash {SCRIPT}")
    deadline_s = time.monotonic() + 300
    while "starting Ray" not in jobs.client.get_job_logs(job):
        assert time.monotonic() < deadline_s, jobs.client.get_job_logs(job)
        time.sleep(0.5)
    jobs.client.stop_job(job)
    assert wait_for_job(jobs.client, job, 90) == "STOPPED"
    log = jobs.client.get_job_logs(job)
    assert "error: interrupted; all processes of the run are stopped" in log
