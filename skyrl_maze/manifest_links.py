"""What manifests say of each other: names that lead nowhere. What is not given at all is not looked for."""

from collections import Counter
from collections.abc import Iterator, Sequence

from skyrl_maze.manifests import Object, at, entries, mapping, pods_of, quantity

_OF_NO_NAMESPACE = ("PersistentVolume", "StorageClass")


def link_problems(things: Sequence[Object]) -> Iterator[str]:
    """Objects that are there twice or in several namespaces, and links to what is not among the given."""
    keys = Counter((thing["kind"], str(at(thing, "metadata", "name"))) for thing in things)
    yield from (f"{kind} {name} is given {times} times" for (kind, name), times in keys.items() if times > 1)
    spaces = {
        str(at(thing, "metadata", "namespace")) for thing in things if thing["kind"] not in _OF_NO_NAMESPACE
    }
    if len(spaces) > 1:
        yield f"objects are in several namespaces: {', '.join(sorted(spaces))}"
    yield from _pod_problems(things)
    for claim in _of(things, "PersistentVolumeClaim"):
        yield from _claim_problems(things, claim)
    for service in _of(things, "Service"):
        selector, pods = mapping(service, "spec", "selector"), [pod for t in things for pod in pods_of(t)]
        if pods and not any(selector.items() <= mapping(p, "metadata", "labels").items() for p in pods):
            yield f"{_name(service)} selects {selector}, and no pod has these labels"


def _pod_problems(things: Sequence[Object]) -> Iterator[str]:
    claims = {str(at(t, "metadata", "name")) for t in _of(things, "PersistentVolumeClaim")}
    accounts = {str(at(t, "metadata", "name")) for t in _of(things, "ServiceAccount")}
    for thing in things:
        wanted_claims, wanted_accounts = set[str](), set[str]()
        for pod in pods_of(thing):
            wanted_accounts.add(str(at(pod, "spec", "serviceAccountName")))
            for volume in entries(pod, "spec", "volumes"):
                if claim := at(volume, "persistentVolumeClaim", "claimName"):
                    wanted_claims.add(str(claim))
        if claims and (lacking := wanted_claims - claims):
            yield f"{_name(thing)} mounts the claim {_some(lacking)}, and {_some(claims)} is given"
        if accounts and (lacking := wanted_accounts - accounts):
            yield f"{_name(thing)} runs as the account {_some(lacking)}, and {_some(accounts)} is given"


def _claim_problems(things: Sequence[Object], claim: Object) -> Iterator[str]:
    volumes = {str(at(t, "metadata", "name")): t for t in _of(things, "PersistentVolume")}
    classes = {str(at(t, "metadata", "name")) for t in _of(things, "StorageClass")}
    chosen, kind = at(claim, "spec", "volumeName"), at(claim, "spec", "storageClassName")
    if classes and kind and str(kind) not in classes:
        yield f"{_name(claim)} is of the class {kind}, and {_some(classes)} is given"
    if not volumes or not chosen:
        return
    if str(chosen) not in volumes:
        yield f"{_name(claim)} wants the volume {chosen}, and {_some(set(volumes))} is given"
        return
    volume = volumes[str(chosen)]
    if at(volume, "spec", "storageClassName") != kind:
        yield f"{_name(claim)} and its volume are of different classes"
    wanted = quantity(at(claim, "spec", "resources", "requests", "storage"))
    if wanted > quantity(at(volume, "spec", "capacity", "storage")):
        yield f"{_name(claim)} is larger than its volume"
    held = [at(volume, "spec", "claimRef", key) for key in ("name", "namespace")]
    if any(held) and held != [at(claim, "metadata", key) for key in ("name", "namespace")]:
        yield f"{_name(volume)} is kept for the claim {held[1]}/{held[0]}, not for {_name(claim)}"


def _of(things: Sequence[Object], kind: str) -> list[Object]:
    return [thing for thing in things if thing["kind"] == kind]


def _name(thing: Object) -> str:
    return f"{thing['kind']} {at(thing, 'metadata', 'name')}"


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names))
