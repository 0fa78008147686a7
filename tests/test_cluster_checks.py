"""The doctor inside a cluster: a real Ray of several nodes, of which some are then lost, hung, or differ."""

import contextlib
import json
import os
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_maze import _compat

_compat.install()

from skyrl_maze import cluster_checks, nodes  # noqa: E402
from skyrl_maze.collective import RankView, Reduced  # noqa: E402
from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.findings import Status  # noqa: E402
from skyrl_maze.nodes import Answers, Node  # noqa: E402
from skyrl_maze.settings import TrainConfig  # noqa: E402

DOCTOR = Path(sysconfig.get_path("scripts")) / "skyrl-maze"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("MAZE_", "HF_", "RAY_"))}
# In each process another folder, as /shared is in a pod that mounts another volume.
ROOT = "/proc/self/cwd/runs/mine"
AHEAD_S = 90


# --- A real cluster ---


@dataclass(frozen=True)
class Ring:
    """A cluster whose nodes stand in folders of their own."""

    cluster: Any
    shared: Path

    def add(self, gpus: int, folder: Path, **variables: str) -> Any:
        """A node whose processes are started in `folder`, with these variables."""
        with contextlib.chdir(folder):
            return self.cluster.add_node(
                num_cpus=4,
                num_gpus=gpus,
                object_store_memory=80 << 20,
                include_dashboard=False,
                env_vars=variables,
            )


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    from ray.cluster_utils import Cluster

    shared = tmp_path / "shared"
    shared.mkdir()
    made = Ring(Cluster(), shared)
    try:
        made.add(0, shared)
        yield made
    finally:
        made.cluster.shutdown()


def doctor(ring: Ring, limit_s: int) -> tuple[int, dict[str, Any]]:
    """Exit code, and the findings by name."""
    done = subprocess.run(
        [
            *(str(DOCTOR), "doctor", "--cluster", "--json", f"--limit-s={limit_s}"),
            *("--recipe=maze_cpu", f"--set=run.root={ROOT}"),
        ],
        env={**CLEAN, "RAY_ADDRESS": ring.cluster.address, "HF_HUB_OFFLINE": "1"},
        cwd=ring.shared,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, {found["check"]: found for found in json.loads(done.stdout)["checks"]}


@pytest.mark.slow
def test_nothing_is_wrong_with_a_cluster_that_can_run_the_recipe(ring: Ring) -> None:
    for gpus in (2, 1):
        ring.add(gpus, ring.shared)
    code, found = doctor(ring, 120)
    failed = {name: f for name, f in found.items() if f["status"] == "fail"}
    assert (code, failed) == (0, {})
    assert found["nodes"]["found"] == ["3 nodes with 3 GPU(s), of which the run needs 3"]
    assert found["collective"]["found"][0].startswith("gloo summed over 2 ranks")
    assert list(ring.shared.iterdir()) == []  # nothing is left behind


@pytest.mark.slow
def test_everything_that_is_wrong_with_a_cluster_is_told_of_its_node(ring: Ring, tmp_path: Path) -> None:
    good, hung, lost = (ring.add(gpus, ring.shared) for gpus in (2, 1, 1))
    odd = add_odd_node(ring, tmp_path)
    raylet_of(lost).kill()
    raylet_of(hung).send_signal(signal.SIGSTOP)
    try:
        code, found = doctor(ring, 25)
    finally:
        raylet_of(hung).send_signal(signal.SIGCONT)
    assert code == 1
    short = {name: node.node_id[:8] for name, node in (("hung", hung), ("lost", lost), ("odd", odd))}
    told = {name: "\n".join(f["found"]) for name, f in found.items() if f["status"] == "fail"}
    # Whether Ray has given the hung node up by then is a matter of seconds.
    ends = ("did not answer within 25 s", "was lost while it was asked", "is gone")
    assert any(f"{short['hung']}): {end}" in told["nodes"] for end in ends)
    assert "the run needs 3 GPU(s), and the nodes that answer have 2" in told["nodes"]
    assert short["lost"] in told["nodes"]
    assert (
        f"{short['odd']}): cannot see in {ROOT.removesuffix('/runs/mine')}/.doctor-" in told["shared folder"]
    )
    assert f"{short['odd']}): a lock that is held here: flock fails" in told["locks"]
    assert f"{short['odd']}): +{AHEAD_S}." in told["clocks"]
    assert "transformers: " in told["versions"]
    assert f"0.0.1 on {odd.node_ip_address} ({short['odd']})" in told["versions"]
    assert all(good.node_id[:8] not in text for text in told.values())
    assert found["collective"]["status"] == "pass"  # both ranks have room on the good node
    assert list(ring.shared.iterdir()) == []


def raylet_of(node: Any) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = node.all_processes["raylet"][0].process
    return process


def add_odd_node(ring: Ring, folder: Path) -> Any:
    """A node with another folder, another clock, and another version of a package."""
    modules, elsewhere = folder / "modules", folder / "elsewhere"
    for made in (modules / "transformers-0.0.1.dist-info", elsewhere):
        made.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n"
    (modules / "transformers-0.0.1.dist-info/METADATA").write_text(metadata)
    shift = f"import time\nreal = time.time\ntime.time = lambda: real() + {AHEAD_S}\n"
    (modules / "sitecustomize.py").write_text(shift)
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ring.add(0, elsewhere, PYTHONPATH=path)


# --- Each check, on nodes that answer as they are told ---

HEAD, FIRST, SECOND = (Node(c * 56, f"10.0.0.{n}", n, n == 0) for n, c in enumerate("abc"))


def cluster_of(*overrides: str, **fields: Any) -> cluster_checks.Cluster:
    cfg = build_config(["+recipe=maze_cpu", *overrides])
    given = {"answering": [HEAD, FIRST, SECOND], "silent": {}, "gone": [], "here": HEAD.id, "limit_s": 1.0}
    return cluster_checks.Cluster(cfg, **{**given, **fields})


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What nodes say, by the name of the question; a text that begins with `!` is a node that is silent."""
    told: dict[str, Any] = {}

    def ask(question: Any, asked: Any, _limit_s: float, *_arguments: Any) -> Answers:
        said = {node: told[question.__name__][node] for node in asked}
        silent = {n: s[1:] for n, s in said.items() if isinstance(s, str) and s.startswith("!")}
        return Answers({n: s for n, s in said.items() if n not in silent}, silent)

    monkeypatch.setattr(nodes, "ask", ask)
    return told


def test_nodes_that_were_replaced_are_a_warning() -> None:
    found = cluster_checks.reachable(cluster_of(gone=[SECOND]))
    assert found.status is Status.WARN
    assert "10.0.0.2 (cccccccc)" in found.found[0]


def test_too_few_gpus_name_the_nodes_that_are_gone() -> None:
    found = cluster_checks.reachable(cluster_of(answering=[HEAD, FIRST], gone=[SECOND]))
    assert found.status is Status.FAIL
    assert found.found == (
        "the run needs 3 GPU(s), and the nodes that answer have 1",
        "10.0.0.2 (cccccccc): is gone",
    )


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cluster = cluster_of(f"run.root={tmp_path}/file/run", answering=[])
    # The folder above can be, and is where the run's would be made.
    assert [f.status for f in cluster_checks.run(cluster, [cluster_checks.shared])] == [Status.PASS]
    cluster = cluster_of("run.root=/proc/nowhere/run", answering=[])
    [found] = cluster_checks.run(cluster, [cluster_checks.shared])
    assert found.status is Status.FAIL
    assert "cannot write to /proc for /proc/nowhere/run" in found.found[0]


def test_locks_that_do_not_hold_across_nodes_are_found(answers: dict[str, Any], tmp_path: Path) -> None:
    answers["try_lock"] = {FIRST: "taken", SECOND: "flock fails: Function not implemented"}
    found = cluster_checks.locks(cluster_of(f"run.root={tmp_path}"))
    assert found.status is Status.FAIL
    assert found.found[0] == "10.0.0.1 (bbbbbbbb): a lock that is held here: taken"
    assert "Function not implemented" in found.found[1]
    assert "option flock" in found.fix


def test_one_node_locks_nobody_out() -> None:
    assert cluster_checks.locks(cluster_of(answering=[HEAD])).status is Status.PASS


@pytest.mark.parametrize(
    ("lacking", "status"),
    [([], Status.PASS), ([FIRST], Status.FAIL), ([HEAD, FIRST, SECOND], Status.WARN)],
)
def test_a_model_is_on_all_nodes_or_fetched_later(
    answers: dict[str, Any], lacking: list[Node], status: Status
) -> None:
    answers["missing"] = {node: ["/m"] if node in lacking else [] for node in (HEAD, FIRST, SECOND)}
    found = cluster_checks.model(cluster_of("trainer.policy.model.path=/m"))
    assert found.status is status
    if status is Status.FAIL:
        assert found.found == ("10.0.0.1 (bbbbbbbb): /m is not there",)


def test_a_full_file_system_fails_and_a_small_disk_warns(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"here": 1 << 40}
    monkeypatch.setattr(nodes, "free_bytes", named("free_bytes", lambda _path: free["here"]))
    monkeypatch.setattr(cluster_checks, "disk_need", lambda _cfg: SimpleNamespace(total=5 << 30, assumed=""))
    answers["free_bytes"] = {HEAD: 1 << 40, FIRST: 1 << 30, SECOND: 1 << 40}
    cluster = cluster_of(f"run.root={tmp_path}")
    found = cluster_checks.space(cluster)
    assert (found.status, "10.0.0.1 (bbbbbbbb): 1.0 GiB" in found.found[0]) == (Status.WARN, True)
    free["here"] = 4 << 30
    found = cluster_checks.space(cluster)
    assert found.status is Status.FAIL
    assert found.found == ("4.0 GiB are free for the run's 5.0",)


def named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("offset_s", "bound_s", "status"),
    [(0.2, 0.1, Status.PASS), (3.0, 0.1, Status.WARN), (-90.0, 0.1, Status.FAIL), (3.0, 2.5, Status.PASS)],
)
def test_a_skew_counts_as_far_as_it_is_sure(
    offset_s: float, bound_s: float, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "clock_offset_s", lambda _node, _limit_s: (offset_s, bound_s))
    found = cluster_checks.clocks(cluster_of())
    assert found.status is status
    if status is not Status.PASS:
        assert f"10.0.0.2 (cccccccc): {offset_s:+.1f} s" in " ".join(found.found)


def test_versions_that_differ_name_package_and_node(answers: dict[str, Any]) -> None:
    alike = {"python": "3.12.1", **dict.fromkeys(cluster_checks.PACKAGES, "1")}
    answers["versions"] = {HEAD: alike, FIRST: {**alike, "torch": "2"}, SECOND: "!did not answer"}
    found = cluster_checks.same_versions(cluster_of())
    assert found.found == (
        "10.0.0.2 (cccccccc): did not answer",
        "torch: 1 on 1 node(s), 2 on 10.0.0.1 (bbbbbbbb)",
    )
    answers["versions"] = {node: {**alike, "vllm": "none"} for node in (HEAD, FIRST, SECOND)}
    assert cluster_checks.same_versions(cluster_of()).found == ("vllm: is installed on no node",)


def reduced(cluster: cluster_checks.Cluster, **fields: Any) -> cluster_checks.Cluster:
    cluster.__dict__["reduced"] = Reduced(**fields)
    return cluster


def on_gpus(cfg: TrainConfig) -> TrainConfig:
    cfg.run.device = "cuda"
    return cfg


def test_a_rank_that_sees_no_gpu_fails_a_run_on_gpus_only() -> None:
    ranks = {0: RankView("10.0.0.1", "RTX", 1), 1: RankView("10.0.0.2", "", 1)}
    cluster = reduced(cluster_of(), ranks=ranks)
    assert cluster_checks.gpus_seen(cluster).status is Status.PASS
    on_gpus(cluster.cfg)
    assert cluster_checks.gpus_seen(cluster).found == ("rank 1 on 10.0.0.2: torch sees no GPU",)


def test_ranks_that_do_not_reach_each_other_fail() -> None:
    problem = "rank 1 on node cccccccc did not answer within 1 s"
    found = cluster_checks.collective(reduced(cluster_of(), problems=(problem,)))
    assert (found.status, found.found) == (Status.FAIL, (problem,))
    assert "security group" in found.fix


@pytest.mark.parametrize(("free", "status"), [(1, Status.WARN), (2, Status.FAIL)])
def test_gpus_in_use_are_a_warning(free: int, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": free})
    cluster = reduced(cluster_of(), unplaced=True)
    assert cluster_checks.collective(cluster).status is status
    assert cluster_checks.gpus_seen(cluster).status is Status.WARN
