"""Kubernetes manifests as data: built by kubectl or read from a file, and taken apart without trust."""

import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from skyrl_maze.errors import ManifestError

TRAINING = ("RayCluster", "RayJob")
RAY = (*TRAINING, "RayService")
GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
SHARED = "/shared"

_BUILD_LIMIT_S = 60
# Aliases let a short text stand for endless data.
_MOST_BYTES, _MOST_VALUES, _MOST_PROBLEMS = 4_000_000, 100_000, 20
CLUSTER = {"RayCluster": (), "RayJob": ("rayClusterSpec",), "RayService": ("rayClusterConfig",)}
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", start=1)}

Object = dict[str, Any]


def read_manifests(sources: Iterable[str]) -> list[Object]:
    """The objects of all sources, in their order.

    Args:
        sources: each a folder for `kubectl kustomize`, a file of YAML, or `-` for stdin.

    Raises:
        ManifestError: names everything that cannot be read.
    """
    things, problems = list[Object](), list[str]()
    for source in sources:
        try:
            found = parse(_text_of(source))
        except ManifestError as error:
            problems += [f"{source}: {line}" for line in str(error).splitlines()]
        else:
            things += found
            problems += [] if found else [f"{source}: holds no object"]
    if problems:
        raise ManifestError.from_problems(f"{len(problems)} problem(s) in what was given:", problems)
    return things


def _text_of(source: str) -> str:
    path = Path(source)
    try:
        if source == "-":
            return sys.stdin.read(_MOST_BYTES + 1)
        if path.is_dir():
            return build(path)
        with path.open(encoding="utf-8") as file:
            return file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ManifestError(
            f"cannot be read ({reason}); give an overlay's folder, a file of YAML, or - for stdin"
        ) from error


def build(folder: Path) -> str:
    """What `kubectl kustomize` prints for a folder; ManifestError with what it says instead."""
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=_BUILD_LIMIT_S
        )
    except FileNotFoundError:
        raise ManifestError(
            "a folder is built with kubectl, which is not on PATH; install it, or give the output of kubectl "
            "kustomize as a file"
        ) from None
    except subprocess.TimeoutExpired:
        raise ManifestError(f"kubectl kustomize took longer than {_BUILD_LIMIT_S} s") from None
    if done.returncode != 0:
        raise ManifestError(f"kubectl kustomize: {' '.join(done.stderr.split())[:500]}")
    return done.stdout


def parse(text: str) -> list[Object]:
    """The objects in YAML documents, those of a List one by one.

    Raises:
        ManifestError: it is not YAML, or not objects; a line for each problem.
    """
    if len(text) > _MOST_BYTES:
        raise ManifestError(f"is longer than {_MOST_BYTES} characters")
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ManifestError(f"is not YAML: {' '.join(str(error).split())[:300]}") from error
    if problems := list(itertools.islice(_unfit(documents), _MOST_PROBLEMS)):
        raise ManifestError("\n".join(problems))
    things, problems = list[Object](), list[str]()
    for document in documents:
        items = document.get("items") if isinstance(document, dict) else None
        listed = items if isinstance(items, list) and document.get("kind") == "List" else [document]
        for thing in listed:
            lacking = [key for key in _IDENTITY if not isinstance(at(thing, *key), str)]
            problems += [f"document {len(things) + 1}: lacks {'.'.join(key)}, a text" for key in lacking]
            things.append(thing)
    if problems:
        raise ManifestError("\n".join(problems))
    return things


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, as kubectl does; PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, times in keys.items() if times > 1]:
            said = f"the key {', '.join(twice)} is there twice"
            raise yaml.composer.ComposerError("in a mapping", node.start_mark, said, node.end_mark)
        return node


_IDENTITY = (("apiVersion",), ("kind",), ("metadata", "name"))


def _unfit(documents: list[Any]) -> Iterator[str]:
    """What JSON, and so Kubernetes, cannot hold; also stops at data that an alias makes endless."""
    left, values = list(documents), 0
    while left:
        value, values = left.pop(), values + 1
        if values > _MOST_VALUES:
            yield f"holds more than {_MOST_VALUES} values"
            return
        if isinstance(value, dict):
            yield from (f"the key {key!r} must be text; quote it" for key in value if type(key) is not str)
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{value} is no number that Kubernetes takes"
        elif value is not None and not isinstance(value, str | int | float):
            yield f"{value!r} is read as a {type(value).__name__}; quote it"


def at(thing: Any, *path: str) -> Any:
    """What lies below these keys; None where one of them is missing."""
    for key in path:
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def mapping(thing: Any, *path: str) -> Object:
    """The mapping at a path; empty if there is none."""
    found = at(thing, *path)
    return found if isinstance(found, dict) else {}


def entries(thing: Any, *path: str) -> list[Object]:
    """The mappings in the list at a path; none if there is no list."""
    found = at(thing, *path)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def cluster_of(thing: Object) -> Object:
    """The RayClusterSpec in a Ray resource."""
    return mapping(thing, "spec", *CLUSTER[thing["kind"]])


def groups_of(thing: Object) -> list[Object]:
    """Head group and worker groups; the head first, as one replica."""
    spec = cluster_of(thing)
    return [{"replicas": 1, **mapping(spec, "headGroupSpec")}, *entries(spec, "workerGroupSpecs")]


def pods_of(thing: Object) -> list[Object]:
    """Every pod template of an object; a pod is its own."""
    if thing["kind"] in RAY:
        return [mapping(group, "template") for group in groups_of(thing)]
    if thing["kind"] == "Pod":
        return [thing]
    return [mapping(thing, "spec", "template")] if thing["kind"] in ("Job", "Deployment") else []


def pod_of(group: Object) -> Object:
    """The pod spec of a group."""
    return mapping(group, "template", "spec")


def container(group: Object) -> Object:
    """A group's Ray container, which KubeRay takes to be the first."""
    return next(iter(entries(pod_of(group), "containers")), {})


def environment(group: Object) -> dict[str, str]:
    """What the Ray container's environment says in plain text."""
    variables = entries(container(group), "env")
    return {str(entry.get("name")): str(entry.get("value", "")) for entry in variables}


def mounts(group: Object) -> dict[str, Object]:
    """The volume at each path of the Ray container."""
    volumes = {str(volume.get("name")): volume for volume in entries(pod_of(group), "volumes")}
    paths = entries(container(group), "volumeMounts")
    return {str(mount.get("mountPath")): volumes.get(str(mount.get("name")), {}) for mount in paths}


def quantity(value: Any) -> float:
    """A Kubernetes quantity, such as `500m`, `2` or `420Gi`, as a number; NaN if it is none.

    Source: kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([A-Za-z]{0,2})", str(value))
    return float(match[1]) * _SUFFIXES[match[2]] if match and match[2] in _SUFFIXES else math.nan


def amount(group: Object, resource: str, kind: str = "limits") -> float:
    """How much of a resource the Ray container may have, or asks for; 0 if it says nothing."""
    return quantity(mapping(container(group), "resources", kind).get(resource, 0))


def count(group: Object, resource: str, kind: str = "limits") -> int:
    """An amount that is counted in pieces; 0 also for what is no whole quantity."""
    found = amount(group, resource, kind)
    return int(found) if found.is_integer() else 0


def replicas(group: Object) -> int:
    """Pods of a group; 0 where the number is missing or none."""
    found = group.get("replicas")
    return found if isinstance(found, int) else 0


def instance(group: Object) -> str:
    """The instance type that a group's pods select; empty if they select none."""
    return str(mapping(pod_of(group), "nodeSelector").get("node.kubernetes.io/instance-type", ""))


def shipped(name: str) -> str:
    """The text of a file of the package `skyrl_maze.hyperpod`."""
    return resources.files("skyrl_maze.hyperpod").joinpath(name).read_text(encoding="utf-8")


def instances() -> dict[str, dict[str, int]]:
    """What a node of each known instance type has: `cpu`, `memory_gib`, `gpu`, `efa`."""
    known: dict[str, dict[str, int]] = yaml.safe_load(shipped("instances.yaml"))
    return known


def schema(kind: str) -> Object:
    """KubeRay's JSON schema of a Ray resource."""
    found: Object = json.loads(shipped(f"kuberay/{kind.lower()}s.schema.json"))
    return found
