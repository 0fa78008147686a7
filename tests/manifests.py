"""Builds the manifests as a user does, and says what is wrong with them: the rules behind test_hyperpod.py.

Some rules are schemas. The others are what a schema cannot see: rules of KubeRay's controller, of Kueue, of
HyperPod's nodes, of SkyRL's placement, and this project's own.
"""

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[1]
HYPERPOD = ROOT / "hyperpod"
OVERLAYS = sorted(path.parent.name for path in HYPERPOD.glob("overlays/*/kustomization.yaml"))
TRAINING = ("RayCluster", "RayJob")
INSTANCES: dict[str, dict[str, int]] = yaml.safe_load((HYPERPOD / "instances.yaml").read_text())
QUEUE = "kueue.x-k8s.io/queue-name"
ACCESS = "access.sagemaker.amazonaws.com"
GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
# What pods may take of a node's CPUs and memory; the rest is the system's.
USABLE = 0.9

Object = dict[str, Any]


def build(overlay: str, folder: Path = HYPERPOD) -> list[Object]:
    """The objects of an overlay, in the words of kubectl's own kustomize."""
    command = ["kubectl", "kustomize", str(folder / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def cluster_of(thing: Object) -> Object:
    """The RayClusterSpec in a Ray resource."""
    key = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}[thing["kind"]]
    spec: Object = thing["spec"] if key is None else thing["spec"][key]
    return spec


def groups_of(thing: Object) -> list[Object]:
    """Head group and worker groups; the head first, as one replica."""
    spec = cluster_of(thing)
    return [{"replicas": 1, **spec["headGroupSpec"]}, *spec["workerGroupSpecs"]]


def pods_of(thing: Object) -> list[Object]:
    """Every pod template of an object."""
    if thing["kind"].startswith("Ray"):
        return [group["template"] for group in groups_of(thing)]
    return [thing["spec"]["template"]] if thing["kind"] in ("Job", "Deployment") else []


def container(group: Object) -> Object:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def environment(group: Object) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(group).get("env", [])}


def count(group: Object, resource: str, kind: str = "limits") -> int:
    return int(container(group)["resources"][kind].get(resource, 0))


def gib(quantity: str) -> float:
    match = re.fullmatch(r"(\d+)(Gi|Mi)", quantity)
    assert match, f"{quantity!r}: give memory in Gi or Mi"
    return int(match[1]) / (1 if match[2] == "Gi" else 1024)


def instance(group: Object) -> str:
    return str(group["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"])


@functools.cache
def _kuberay(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / f"tests/kuberay/{kind.lower()}s.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema)


def schema_problems(thing: Object) -> Iterator[str]:
    """Unknown keys and wrong types, by KubeRay's schemas and those of Kubernetes; pods by both."""
    if thing["kind"].startswith("Ray"):
        for error in _kuberay(thing["kind"]).iter_errors(thing):
            yield f"{error.json_path}: {error.message[:200]}"
    else:
        yield from _kubernetes_problems(thing)
    for template in pods_of(thing):
        pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
        yield from _kubernetes_problems(pod)


def _kubernetes_problems(thing: Object) -> Iterator[str]:
    try:
        kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{thing['kind']}: {error.json_path}: {error.message[:200]}"


def name_problems(thing: Object) -> Iterator[str]:
    limit = {"RayCluster": 53, "RayJob": 47, "RayService": 47}.get(thing["kind"], 63)
    if not re.fullmatch(rf"[a-z]([-a-z0-9]{{0,{limit - 2}}}[a-z0-9])?", thing["metadata"]["name"]):
        yield f"name {thing['metadata']['name']!r}: at most {limit} of a-z, 0-9 and '-', the first a letter"
    if "FILL" in json.dumps(thing):
        yield "FILL was not filled"


def ray_problems(thing: Object) -> Iterator[str]:
    """What KubeRay's controller refuses, and what Ray and HyperPod need of a cluster."""
    head, *workers = groups_of(thing)
    if head["rayStartParams"].get("dashboard-host") != "0.0.0.0":
        yield "dashboard-host: must be 0.0.0.0, or nothing outside the head reaches the dashboard"
    for group in (head, *workers):
        params = group["rayStartParams"]
        if refused := {"labels", "resources", "num-cpus"} & set(params):
            yield f"rayStartParams: {refused}: leave them to KubeRay and the container's resources"
        store = int(params.get("object-store-memory", 0)) / 2**30
        if store > gib(_shm(group)):
            yield "object-store-memory is larger than /dev/shm"
    for group in workers:
        if not group.get("minReplicas", -1) == group["replicas"] == group.get("maxReplicas", -1):
            yield "replicas, minReplicas and maxReplicas: must be there and alike without autoscaling"
    if cluster_of(thing).get("enableInTreeAutoscaling"):
        yield "autoscaling: a checkpoint is resumed on as many ranks as wrote it"
    wanted = HEAD_PORTS | ({"serve": 8000} if thing["kind"] == "RayService" else {})
    if _ports(head) != wanted:
        yield f"the head's ports: {_ports(head)}, must be {wanted}"
    if any(_ports(group).get("metrics") != 8080 for group in workers):
        yield "a worker without its metrics port"


def _ports(group: Object) -> dict[str | None, int]:
    return {port.get("name"): port["containerPort"] for port in container(group).get("ports", [])}


def _shm(group: Object) -> str:
    """The size limit of the memory at /dev/shm."""
    pod = group["template"]["spec"]
    names = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == names.get("/dev/shm")]
    assert volume["emptyDir"]["medium"] == "Memory"
    return str(volume["emptyDir"]["sizeLimit"])


def node_problems(thing: Object) -> Iterator[str]:
    """Whether the pods fit on their nodes, use all of the GPUs there, and are on healthy ones."""
    head, *workers = groups_of(thing)
    if count(head, GPU) or float(container(head)["resources"]["requests"]["cpu"]) < 2:
        yield "the head needs CPUs, which keep the trainer and the merger there, and no GPU"
    for group in (head, *workers):
        pod = group["template"]["spec"]
        gpus = count(group, GPU)
        if gpus and gpus != INSTANCES[instance(group)]["gpu"]:
            yield f"{GPU}: {gpus}, and {instance(group)} has {INSTANCES[instance(group)]['gpu']}"
        efa = INSTANCES[instance(group)]["efa"] if gpus and thing["kind"] in TRAINING else 0
        if count(group, EFA) != efa:
            yield f"{EFA}: {count(group, EFA)}, must be {efa}; without it NCCL silently takes TCP"
        for resource in (GPU, EFA, "memory"):
            limits = {
                kind: container(group)["resources"][kind].get(resource) for kind in ("limits", "requests")
            }
            if len(set(limits.values())) > 1:
                yield f"{resource}: {limits} must be alike"
        if (environment(group).get("NVIDIA_VISIBLE_DEVICES") == "void") == bool(gpus):
            yield "NVIDIA_VISIBLE_DEVICES: must be void without a GPU, and only then"
        if gib(_shm(group)) > gib(container(group)["resources"]["limits"]["memory"]) / 2:
            yield "/dev/shm may take more than half of the memory limit that it counts to"
        if pod["nodeSelector"].get("sagemaker.amazonaws.com/node-health-status") != "Schedulable":
            yield "no selector of healthy nodes"
        if not any(t["key"] == GPU and t["operator"] == "Exists" for t in pod["tolerations"]):
            yield f"no toleration of {GPU}"
        if pod["terminationGracePeriodSeconds"] < 120:
            yield "terminationGracePeriodSeconds: less than 120"
    yield from _crowded(groups_of(thing))


def _crowded(groups: list[Object]) -> Iterator[str]:
    """Instance types on whose nodes the pods do not fit; worker pods are one a node, the head beside one."""
    for name in {instance(group) for group in groups}:
        pods = [container(group)["resources"]["requests"] for group in groups if instance(group) == name]
        cpus, memory = sum(float(p["cpu"]) for p in pods), sum(gib(p["memory"]) for p in pods)
        if cpus > USABLE * INSTANCES[name]["cpu"] or memory > USABLE * INSTANCES[name]["memory_gib"]:
            yield f"{cpus:.0f} CPUs and {memory:.0f} GiB are too much for the usable part of {name}"


def training_problems(thing: Object) -> Iterator[str]:
    """What a run relies on: a folder that all see, pods that are replaced, workers on nodes of their own."""
    claims = set()
    for group in groups_of(thing):
        pod = group["template"]["spec"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claims.add(volumes.get(mounts.get("/shared"), {}).get("persistentVolumeClaim", {}).get("claimName"))
        if pod.get("restartPolicy") != "Never":
            yield "restartPolicy: must be Never, so that KubeRay replaces the pod"
        if not {"/tmp", "/home/maze", "/dev/shm"} <= set(mounts):
            yield "a read-only root needs /tmp, /home/maze and /dev/shm to be mounted"
        if environment(group).get("HF_HOME", "").partition("/shared")[0]:
            yield "HF_HOME: must lie on /shared"
        if not count(group, GPU) and int(environment(group).get("RAY_JOB_STOP_WAIT_TIME_S", 3)) < 30:
            yield "RAY_JOB_STOP_WAIT_TIME_S: a stopped job is killed before it has cleaned up"
        if not _agent(group):
            yield "HYPERPOD_JMA_HOST: must be the node's address"
    if len(claims) > 1 or None in claims:
        yield f"/shared: all pods must mount the same claim, not {claims}"
    for group in groups_of(thing)[1:]:
        rules = group["template"]["spec"].get("affinity", {}).get("podAntiAffinity", {})
        terms = rules.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        labels = group["template"]["metadata"]["labels"].items()
        if not any(term["labelSelector"]["matchLabels"].items() <= labels for term in terms):
            yield "workers may share a node"


def _agent(group: Object) -> bool:
    wanted = {"name": "HYPERPOD_JMA_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    return wanted in container(group)["env"]


def image_problems(thing: Object) -> Iterator[str]:
    images = {c["image"] for pod in pods_of(thing) for c in pod["spec"]["containers"]}
    if len(images) > 1:
        yield f"pods of one object run different images: {images}"
    for image in images:
        tag = image.rpartition("/")[2].partition(":")[2]
        if not tag or tag.startswith("latest"):
            yield f"image {image}: give a tag that stays, or a digest"


def security_problems(thing: Object) -> Iterator[str]:
    for template in pods_of(thing):
        pod = template["spec"]
        if pod["automountServiceAccountToken"] is not False or not pod["serviceAccountName"]:
            yield "the pod can call the Kubernetes API"
        if pod["securityContext"]["seccompProfile"] != {"type": "RuntimeDefault"}:
            yield "seccompProfile: must be RuntimeDefault"
        if pod["securityContext"].get("runAsNonRoot") is not True and thing["kind"] != "Job":
            yield "runAsNonRoot: must be true"
        for entry in pod["containers"]:
            rights = entry["securityContext"]
            if rights["capabilities"]["drop"] != ["ALL"] or rights["allowPrivilegeEscalation"] is not False:
                yield f"{entry['name']}: all capabilities must be dropped, and none be gained"
            if not rights.get("readOnlyRootFilesystem"):
                yield f"{entry['name']}: readOnlyRootFilesystem must be true"
            yield from _secrets(entry)


def _secrets(entry: Object) -> Iterator[str]:
    for variable in entry.get("env", []):
        secret = re.search("TOKEN|SECRET|PASSWORD|_KEY", variable["name"])
        if (secret and variable["name"] != "HF_TOKEN_PATH") or "secretKeyRef" in variable.get(
            "valueFrom", {}
        ):
            yield f"{variable['name']}: mount a secret as a file; the dashboard shows the environment"
    if entry.get("envFrom"):
        yield "envFrom: name each variable"


def access_problems(thing: Object) -> Iterator[str]:
    notes = thing["metadata"]["annotations"]
    if notes.get(f"{ACCESS}/enabled") != "true":
        yield f"{ACCESS}/enabled: must be the text true"
    if notes.get(f"{ACCESS}/access-strategy") not in {
        "ray-access-strategy-private",
        "ray-access-strategy-public",
    }:
        yield f"{ACCESS}/access-strategy: {notes.get(f'{ACCESS}/access-strategy')!r}"


def queue_problems(thing: Object) -> Iterator[str]:
    """Kueue's label is on the object and on all of its pods, or nowhere."""
    labelled = [thing, *pods_of(thing)]
    queues = {each["metadata"].get("labels", {}).get(QUEUE) for each in labelled}
    if len(queues) > 1:
        yield f"{QUEUE}: {queues}: must be on the object and on every pod template alike"


def job_problems(thing: Object) -> Iterator[str]:
    spec = thing["spec"]
    if not spec.get("shutdownAfterJobFinishes"):
        yield "shutdownAfterJobFinishes: needed by ttlSecondsAfterFinished and by Kueue"
    if spec.get("backoffLimit", 0) < 1 or spec.get("activeDeadlineSeconds", 0) < 1:
        yield "backoffLimit, activeDeadlineSeconds: a try that fails is repeated, one that hangs is ended"
    if spec.get("submissionMode") != "SidecarMode":
        yield "submissionMode: in the others a job whose head died is not tried again"
    if refused := {"submitterPodTemplate", "submitterConfig", "clusterSelector"} & set(spec):
        yield f"{refused}: refused in SidecarMode"
    if "env_vars" in spec.get("runtimeEnvYAML", ""):
        yield "runtimeEnvYAML: SkyRL sets env_vars of its own, and Ray refuses a name that is in both"


def storage_problems(thing: Object) -> Iterator[str]:
    spec = thing.get("spec", {})
    if thing["kind"] != "StorageClass" and spec["accessModes"] != ["ReadWriteMany"]:
        yield "accessModes: must be ReadWriteMany"
    if thing["kind"] == "PersistentVolumeClaim":
        if "storageClassName" not in spec:
            yield "storageClassName: must be there; without it the cluster's default class is taken"
        return
    options = thing.get("mountOptions") or spec.get("mountOptions")
    if options != ["flock"]:
        yield f"mountOptions: {options}, must be [flock]: locks that hold across nodes"
    if "Retain" not in (thing.get("reclaimPolicy"), spec.get("persistentVolumeReclaimPolicy")):
        yield "reclaim policy: must be Retain, or the claim takes the checkpoints with it"


def server_problems(thing: Object) -> Iterator[str]:
    """What a server of a model needs: GPUs that its node has, time to start, and the model."""
    group: Object = {"template": pods_of(thing)[0]}
    pod, entry = group["template"]["spec"], container(group)
    if not 0 < count(group, GPU) <= INSTANCES[instance(group)]["gpu"]:
        yield f"{GPU}: {count(group, GPU)}, and {instance(group)} has {INSTANCES[instance(group)]['gpu']}"
    for resource in (GPU, "memory"):
        if entry["resources"]["limits"].get(resource) != entry["resources"]["requests"].get(resource):
            yield f"{resource}: limits and requests must be alike"
    probe = entry.get("startupProbe", {})
    if probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3) < 1200:
        yield "startupProbe: ends the container before a cold start is over"
    if {"/shared", "/tmp", "/home/maze", "/dev/shm"} - {
        mount["mountPath"] for mount in entry["volumeMounts"]
    }:
        yield "a read-only root needs /tmp, /home/maze and /dev/shm to be mounted, and the model /shared"
    if pod["nodeSelector"].get("sagemaker.amazonaws.com/node-health-status") != "Schedulable":
        yield "no selector of healthy nodes"
    if pod.get("enableServiceLinks", True):
        yield "enableServiceLinks: VLLM_ variables of a service's name are read by vLLM"
    labels = thing["spec"]["template"]["metadata"]["labels"].items()
    if not thing["spec"]["selector"]["matchLabels"].items() <= labels:
        yield "selector: does not match the pods"


def network_problems(thing: Object) -> Iterator[str]:
    rules = thing["spec"]["ingress"]
    if thing["spec"]["policyTypes"] != ["Ingress"] or any(not rule.get("from") for rule in rules):
        yield "ingress: a rule that lets everyone in"
    for rule in rules:
        for peer in rule.get("from", []):
            if peer.keys() == {"namespaceSelector"} and not peer["namespaceSelector"].get("matchLabels"):
                yield "ingress: all namespaces are let in"
            if "namespaceSelector" in peer and "ports" not in rule:
                yield "ingress: another namespace is let in on every port"


RULES = {
    "RayCluster": [ray_problems, node_problems, training_problems, access_problems, queue_problems],
    "RayJob": [
        *(ray_problems, node_problems, training_problems, access_problems, queue_problems),
        job_problems,
    ],
    "RayService": [ray_problems, node_problems, access_problems],
    "PersistentVolume": [storage_problems],
    "PersistentVolumeClaim": [storage_problems],
    "StorageClass": [storage_problems],
    "NetworkPolicy": [network_problems],
    "Deployment": [server_problems],
    "Service": [],
    "ServiceAccount": [],
    "Job": [],
}


def problems(things: list[Object]) -> list[str]:
    """Everything that is wrong with these objects, each with the object's kind and name."""
    found = []
    for thing in things:
        wrong = list(schema_problems(thing))
        if not wrong:  # the other rules rely on the shape
            rules = (name_problems, image_problems, security_problems, *RULES[thing["kind"]])
            wrong = [problem for rule in rules for problem in rule(thing)]
        found += [f"{thing['kind']} {thing['metadata']['name']}: {problem}" for problem in wrong]
    return found
