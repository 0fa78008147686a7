"""What must be true of manifests and no schema can see, one function a subject, each giving its problems.

Rules of KubeRay's controller, of Kueue, of HyperPod's nodes, of SkyRL's placement, and this project's own.
Each takes an object whose shape was checked, and lets pass what it does not find.
"""

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from skyrl_maze.manifests import (
    EFA,
    GPU,
    RAY,
    SHARED,
    TRAINING,
    Object,
    amount,
    at,
    cluster_of,
    container,
    count,
    entries,
    environment,
    groups_of,
    instance,
    instances,
    mapping,
    mounts,
    pod_of,
    pods_of,
    quantity,
    replicas,
)

QUEUE = "kueue.x-k8s.io/queue-name"
HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
HEALTH = "sagemaker.amazonaws.com/node-health-status"
# What pods may take of a node's CPUs and memory; the rest is the system's.
USABLE = 0.9
_COLD_START_S = 1200
_GIB = 2**30


def name_problems(thing: Object) -> Iterator[str]:
    """Names that Kubernetes or KubeRay would refuse, and places that nobody filled in."""
    limit = {"RayCluster": 53, "RayJob": 47, "RayService": 47}.get(thing["kind"], 63)
    if not re.fullmatch(rf"[a-z]([-a-z0-9]{{0,{limit - 2}}}[a-z0-9])?", thing["metadata"]["name"]):
        yield f"name {thing['metadata']['name']!r}: at most {limit} of a-z, 0-9 and '-', the first a letter"
    if "FILL" in json.dumps(thing):
        yield "FILL was not filled"


API = {"PersistentVolume": "v1", "PersistentVolumeClaim": "v1", "Service": "v1", "ServiceAccount": "v1"}
API |= {"Pod": "v1", "Job": "batch/v1", "Deployment": "apps/v1", "StorageClass": "storage.k8s.io/v1"}
API |= {"NetworkPolicy": "networking.k8s.io/v1", **dict.fromkeys(RAY, "ray.io/v1")}


def object_problems(thing: Object) -> Iterator[str]:
    """What every object has: the version of its kind, and labels and annotations that are text."""
    if thing.get("apiVersion") != (wanted := API[thing["kind"]]):
        yield f"apiVersion: {thing.get('apiVersion')}, must be {wanted}"
    for of in (thing, *pods_of(thing)):
        for name in ("labels", "annotations"):
            found = at(of, "metadata", name)
            if not isinstance(found or {}, dict) or not all(
                isinstance(v, str) for v in (found or {}).values()
            ):
                yield f"{name}: {found}, must be names with texts; quote numbers and true"


def pod_problems(thing: Object) -> Iterator[str]:
    """Mounts of volumes that are not there, and requests above their limits; Kubernetes refuses both."""
    for pod in pods_of(thing):
        volumes = {volume.get("name") for volume in entries(pod, "spec", "volumes")}
        for entry in (*entries(pod, "spec", "containers"), *entries(pod, "spec", "initContainers")):
            named = {mount.get("name") for mount in entries(entry, "volumeMounts")}
            if lacking := sorted(map(str, named - volumes)):
                yield f"{entry.get('name')}: mounts {', '.join(lacking)}, and no volume has that name"
            limits, requests = (mapping(entry, "resources", kind) for kind in ("limits", "requests"))
            for name in sorted(name for name in limits if "/" in name):  # a device is whole
                if not quantity(limits[name]).is_integer():
                    yield f"{entry.get('name')}: {name}: {limits[name]}, must be a whole number"
            for name in sorted(limits.keys() & requests.keys()):
                if quantity(requests[name]) > quantity(limits[name]):
                    yield f"{entry.get('name')}: {name}: request {requests[name]} above limit {limits[name]}"


def ray_problems(thing: Object) -> Iterator[str]:
    """What KubeRay's controller refuses, and what Ray and HyperPod need of a cluster."""
    head, *workers = groups_of(thing)
    if mapping(head, "rayStartParams").get("dashboard-host") != "0.0.0.0":
        yield "dashboard-host: must be 0.0.0.0, or nothing outside the head reaches the dashboard"
    for group in (head, *workers):
        params = mapping(group, "rayStartParams")
        if refused := {"labels", "resources", "num-cpus"} & set(params):
            yield f"rayStartParams: {refused}: leave them to KubeRay and the container's resources"
        if not quantity(params.get("object-store-memory", 0)) <= shm_bytes(group):
            yield "object-store-memory is larger than /dev/shm"
    for group in workers:
        if not group.get("minReplicas", -1) == replicas(group) == group.get("maxReplicas", -1):
            yield "replicas, minReplicas and maxReplicas: must be there and alike without autoscaling"
    if cluster_of(thing).get("enableInTreeAutoscaling"):
        yield "autoscaling: a run has all of its ranks from its start to its end"
    wanted = HEAD_PORTS | ({"serve": 8000} if thing["kind"] == "RayService" else {})
    if _ports(head) != wanted:
        yield f"the head's ports: {_ports(head)}, must be {wanted}"
    if any(_ports(group).get("metrics") != 8080 for group in workers):
        yield "a worker without its metrics port"


def upgrade_problems(thing: Object) -> Iterator[str]:
    """Whether a changed manifest reaches the pods; KubeRay takes the setting of a RayCluster alone."""
    chosen = at(cluster_of(thing), "upgradeStrategy", "type")
    if thing["kind"] != "RayCluster" and chosen is not None:
        yield f"upgradeStrategy: {chosen}: KubeRay refuses it in the cluster of a {thing['kind']}"
    if thing["kind"] == "RayCluster" and chosen != "Recreate":
        yield f"upgradeStrategy: {chosen}, must be Recreate, or pods keep what the manifest said before"


def _ports(group: Object) -> dict[Any, Any]:
    return {port.get("name"): port.get("containerPort") for port in entries(container(group), "ports")}


def shm_bytes(group: Object) -> float:
    """Size of the memory at /dev/shm; the container runtime's 64 MiB where none is mounted."""
    volume = mapping(mounts(group).get("/dev/shm"), "emptyDir")
    return quantity(volume.get("sizeLimit")) if volume.get("medium") == "Memory" else 64 * 2.0**20


def node_problems(thing: Object) -> Iterator[str]:
    """Whether the pods fit on their nodes, use all of the GPUs there, and are on healthy ones."""
    head, *workers = groups_of(thing)
    if count(head, GPU) or not amount(head, "cpu", "requests") >= 2:
        yield "the head needs CPUs, which keep the trainer and the merger there, and no GPU"
    for group in (head, *workers):
        pod = pod_of(group)
        yield from _device_problems(group, thing["kind"] in TRAINING)
        if shm_bytes(group) > amount(group, "memory") / 2:
            yield "/dev/shm may take more than half of the memory limit that it counts to"
        if mapping(pod, "nodeSelector").get(HEALTH) != "Schedulable":
            yield "no selector of healthy nodes"
        if not any(
            t.get("key") == GPU and t.get("operator") == "Exists" for t in entries(pod, "tolerations")
        ):
            yield f"no toleration of {GPU}"
        if pod.get("terminationGracePeriodSeconds", 30) < 120:
            yield "terminationGracePeriodSeconds: less than 120"
    yield from _crowded(groups_of(thing))


def _device_problems(group: Object, training: bool) -> Iterator[str]:
    gpus, node = count(group, GPU), _known_nodes().get(instance(group))
    if node is None:
        yield f"instance type {instance(group)!r} is not in instances.yaml; add what a node of it has"
        return
    if gpus and gpus != node["gpu"]:
        yield f"{GPU}: {gpus}, and {instance(group)} has {node['gpu']}"
    efa = node["efa"] if gpus and training else 0
    if count(group, EFA) != efa:
        yield f"{EFA}: {count(group, EFA)}, must be {efa}; without it NCCL silently takes TCP"
    for resource in (GPU, EFA, "memory"):
        said = {
            kind: mapping(container(group), "resources", kind).get(resource)
            for kind in ("limits", "requests")
        }
        if len(set(said.values())) > 1:
            yield f"{resource}: {said} must be alike"
    if (environment(group).get("NVIDIA_VISIBLE_DEVICES") == "void") == bool(gpus):
        yield "NVIDIA_VISIBLE_DEVICES: must be void without a GPU, and only then"


@functools.cache
def _known_nodes() -> dict[str, dict[str, int]]:
    return instances()


def _crowded(groups: list[Object]) -> Iterator[str]:
    """Instance types on whose nodes the pods do not fit; worker pods are one a node, the head beside one."""
    for name in sorted({instance(group) for group in groups} & set(_known_nodes())):
        node, pods = _known_nodes()[name], [group for group in groups if instance(group) == name]
        cpus = sum(amount(group, "cpu", "requests") for group in pods)
        memory = sum(amount(group, "memory", "requests") for group in pods) / _GIB
        if not math.isfinite(cpus + memory):
            yield f"requests of CPU or memory on {name} are no quantities"
        elif cpus > USABLE * node["cpu"] or memory > USABLE * node["memory_gib"]:
            yield f"{cpus:.0f} CPUs and {memory:.0f} GiB are too much for the usable part of {name}"


def training_problems(thing: Object) -> Iterator[str]:
    """What a run relies on: a folder that all see, pods that are replaced, workers on nodes of their own."""
    claims = set()
    for group in groups_of(thing):
        claims.add(at(mounts(group).get(SHARED), "persistentVolumeClaim", "claimName"))
        if pod_of(group).get("restartPolicy") != "Never":
            yield "restartPolicy: must be Never, so that KubeRay replaces the pod"
        if not {"/tmp", "/home/maze", "/dev/shm"} <= set(mounts(group)):
            yield "a read-only root needs /tmp, /home/maze and /dev/shm to be mounted"
        if any(
            m.get("mountPath") == SHARED and (m.get("readOnly") or m.get("subPath")) for m in _mounts(group)
        ):
            yield f"{SHARED}: must be mounted whole and to be written to"
        if at(mounts(group).get(SHARED), "persistentVolumeClaim", "readOnly"):
            yield f"{SHARED}: the claim must be mounted to be written to"
        if not PurePosixPath(environment(group).get("HF_HOME", SHARED)).is_relative_to(SHARED):
            yield f"HF_HOME: must lie on {SHARED}"
        stop_s = quantity(environment(group).get("RAY_JOB_STOP_WAIT_TIME_S", 3))
        if not count(group, GPU) and not stop_s >= 30:
            yield "RAY_JOB_STOP_WAIT_TIME_S: a stopped job is killed before it has cleaned up"
        if _AGENT not in entries(container(group), "env"):
            yield "HYPERPOD_JMA_HOST: must be the node's address"
    if len(claims) > 1 or None in claims:
        yield f"{SHARED}: all pods must mount the same claim, not {claims}"
    for group in groups_of(thing)[1:]:
        kept = [term for term in _kept_apart(group) if term.get("topologyKey") == "kubernetes.io/hostname"]
        if not any(_matches(term, group) for term in kept):
            yield "workers may share a node"
        if len(kept) < len(_kept_apart(group)):
            yield "podAntiAffinity: topologyKey must be kubernetes.io/hostname, for one worker a node"
        head = groups_of(thing)[0]
        if instance(head) == instance(group) and any(_matches(term, head) for term in kept):
            yield "podAntiAffinity: also keeps the head apart, which is to be beside a worker"


def _mounts(group: Object) -> list[Object]:
    return entries(container(group), "volumeMounts")


def _kept_apart(group: Object) -> list[Object]:
    rules = mapping(pod_of(group), "affinity", "podAntiAffinity")
    return entries(rules, "requiredDuringSchedulingIgnoredDuringExecution")


def _matches(term: Object, group: Object) -> bool:
    wanted = mapping(term, "labelSelector", "matchLabels")
    return bool(wanted) and wanted.items() <= mapping(group, "template", "metadata", "labels").items()


_AGENT = {"name": "HYPERPOD_JMA_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}


def image_problems(thing: Object) -> Iterator[str]:
    """Images that may be another tomorrow, or that differ between pods."""
    images = {c.get("image", "") for pod in pods_of(thing) for c in entries(pod, "spec", "containers")}
    if len(images) > 1:
        yield f"pods of one object run different images: {images}"
    images |= {c.get("image", "") for pod in pods_of(thing) for c in entries(pod, "spec", "initContainers")}
    for image in images:
        tag = image.rpartition("/")[2].partition(":")[2]
        if not tag or tag.startswith("latest"):
            yield f"image {image}: give a tag that stays, or a digest"


def queue_problems(thing: Object) -> Iterator[str]:
    """Kueue's label is on the object and on all of its pods, or nowhere."""
    queues = {at(each, "metadata", "labels", QUEUE) for each in (thing, *pods_of(thing))}
    if len(queues) > 1:
        yield f"{QUEUE}: {queues}: must be on the object and on every pod template alike"


def job_problems(thing: Object) -> Iterator[str]:
    """What makes a RayJob be tried again, and end."""
    spec = mapping(thing, "spec")
    if not spec.get("shutdownAfterJobFinishes"):
        yield "shutdownAfterJobFinishes: needed by ttlSecondsAfterFinished and by Kueue"
    if spec.get("backoffLimit", 0) < 1 or spec.get("activeDeadlineSeconds", 0) < 1:
        yield "backoffLimit, activeDeadlineSeconds: a try that fails is repeated, one that hangs is ended"
    if spec.get("submissionMode") != "SidecarMode":
        yield "submissionMode: in the others a job whose head died is not tried again"
    if refused := {"submitterPodTemplate", "submitterConfig", "clusterSelector"} & set(spec):
        yield f"{refused}: refused in SidecarMode"
    if spec.get("entrypointNumGpus"):
        yield "entrypointNumGpus: the trainer would take a GPU from the ranks"
    if "env_vars" in spec.get("runtimeEnvYAML", ""):
        yield "runtimeEnvYAML: SkyRL sets env_vars of its own, and Ray refuses a name that is in both"


def storage_problems(thing: Object) -> Iterator[str]:
    """A file system that all nodes write to, whose locks hold across them, and that outlives its claim."""
    if thing["kind"] != "StorageClass" and at(thing, "spec", "accessModes") != ["ReadWriteMany"]:
        yield "accessModes: must be ReadWriteMany"
    if thing["kind"] == "PersistentVolumeClaim":
        if at(thing, "spec", "storageClassName") is None:
            yield "storageClassName: must be there; without it the cluster's default class is taken"
        return
    if not all(isinstance(value, str) for value in mapping(thing, "parameters").values()):
        yield f"parameters: {mapping(thing, 'parameters')}: every value must be a text; quote it"
    options = at(thing, "mountOptions") or at(thing, "spec", "mountOptions")
    if options != ["flock"]:
        yield f"mountOptions: {options}, must be [flock]: locks that hold across nodes"
    policies = (at(thing, "reclaimPolicy"), at(thing, "spec", "persistentVolumeReclaimPolicy"))
    if "Retain" not in policies:
        yield "reclaim policy: must be Retain, or the claim takes the checkpoints with it"


def server_problems(thing: Object) -> Iterator[str]:
    """What a server of a model needs: GPUs that its node has, time to start, and the model."""
    group: Object = {"template": pods_of(thing)[0]}
    entry, has = container(group), instances().get(instance(group), {})
    if not 0 < count(group, GPU) <= has.get("gpu", 0):
        yield f"{GPU}: {count(group, GPU)}, and {instance(group)} has {has.get('gpu', 0)}"
    for resource in (GPU, "memory"):
        if at(entry, "resources", "limits", resource) != at(entry, "resources", "requests", resource):
            yield f"{resource}: limits and requests must be alike"
    probe = mapping(entry, "startupProbe")
    if probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3) < _COLD_START_S:
        yield "startupProbe: ends the container before a cold start is over"
    if {SHARED, "/tmp", "/home/maze", "/dev/shm"} - set(mounts(group)):
        yield "a read-only root needs /tmp, /home/maze and /dev/shm to be mounted, and the model /shared"
    if at(pod_of(group), "nodeSelector", HEALTH) != "Schedulable":
        yield "no selector of healthy nodes"
    if not any(
        t.get("key") == GPU and t.get("operator") == "Exists" for t in entries(pod_of(group), "tolerations")
    ):
        yield f"no toleration of {GPU}"
    if pod_of(group).get("enableServiceLinks", True):
        yield "enableServiceLinks: VLLM_ variables of a service's name are read by vLLM"
    labels = mapping(thing, "spec", "template", "metadata", "labels").items()
    if not mapping(thing, "spec", "selector", "matchLabels").items() <= labels:
        yield "selector: does not match the pods"
