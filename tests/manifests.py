"""The project's own manifests, built as a user does it, and every rule about them.

Beside the rules of the package these are the schemas of Kubernetes, which are too large to be shipped.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate

from skyrl_maze import manifest_check, manifests
from skyrl_maze.manifests import Object, mapping, pods_of

ROOT = Path(__file__).parents[1]
HYPERPOD = ROOT / "hyperpod"
OVERLAYS = sorted(path.parent.name for path in HYPERPOD.glob("overlays/*/kustomization.yaml"))


def build(overlay: str, folder: Path = HYPERPOD) -> list[Object]:
    """The objects of an overlay, in the words of kubectl's own kustomize."""
    return manifests.parse(manifests.build(folder / "overlays" / overlay))


built = functools.cache(build)


def kubernetes_problems(thing: Object) -> Iterator[str]:
    """Unknown keys and wrong types by the schemas of Kubernetes, of an object or of the pods in it."""
    checked = [{"apiVersion": "v1", "kind": "Pod", "spec": mapping(pod, "spec")} for pod in pods_of(thing)]
    if thing["kind"] not in manifests.RAY:
        checked.append(thing)
    for each in checked:
        try:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{each['kind']}: {error.json_path}: {error.message[:200]}"


def problems(things: list[Object]) -> list[str]:
    """Everything that is wrong with these objects."""
    by_kubernetes = [
        f"{thing['kind']} {thing['metadata']['name']}: {problem}"
        for thing in things
        for problem in kubernetes_problems(thing)
    ]
    return by_kubernetes + manifest_check.problems(things)
