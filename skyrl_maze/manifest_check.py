"""Everything that is wrong with manifests: KubeRay's schemas first, then the rules that rely on the shape."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from skyrl_maze.errors import closest
from skyrl_maze.manifest_rules import (
    image_problems,
    job_problems,
    name_problems,
    node_problems,
    object_problems,
    pod_problems,
    queue_problems,
    ray_problems,
    server_problems,
    storage_problems,
    training_problems,
    upgrade_problems,
)
from skyrl_maze.manifest_safety import (
    access_problems,
    account_problems,
    network_problems,
    security_problems,
    service_problems,
)
from skyrl_maze.manifest_start import command_problems, shape_problems, start_problems
from skyrl_maze.manifests import RAY, Object, schema

Rule = Callable[[Object], Iterator[str]]

_EVERYWHERE: Sequence[Rule] = (
    name_problems,
    object_problems,
    image_problems,
    pod_problems,
    security_problems,
)
_RAY: Sequence[Rule] = (
    *(ray_problems, upgrade_problems, node_problems, access_problems),
    *(service_problems, start_problems, shape_problems),
)
_RUN: Sequence[Rule] = (*_RAY, training_problems, queue_problems, command_problems)
RULES: Mapping[str, Sequence[Rule]] = {
    "RayCluster": _RUN,
    "RayJob": (*_RUN, job_problems),
    "RayService": _RAY,
    "PersistentVolume": (storage_problems,),
    "PersistentVolumeClaim": (storage_problems,),
    "StorageClass": (storage_problems,),
    "NetworkPolicy": (network_problems,),
    "Deployment": (server_problems,),
    "Service": (service_problems,),
    "ServiceAccount": (account_problems,),
    "Job": (),
    "Pod": (),
}
_SHOWN_CHARACTERS = 200


@functools.cache
def _validator(kind: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(schema(kind))


def schema_problems(thing: Object) -> Iterator[str]:
    """Unknown keys and wrong types in a Ray resource, by KubeRay's schemas; nothing for other kinds."""
    if thing["kind"] in RAY:
        for error in _validator(thing["kind"]).iter_errors(thing):
            yield f"{error.json_path}: {error.message[:_SHOWN_CHARACTERS]}{_meant(error)}"


def _meant(error: Any) -> str:
    """The closest known key, where an unknown one was given."""
    if error.validator != "additionalProperties":
        return ""
    known = error.schema.get("properties", {})
    return "".join(closest(name, known) for name in sorted(set(error.instance) - set(known)))


def problems_of(thing: Object) -> list[str]:
    """What is wrong with one object; its rules are tried only once its schema holds."""
    rules = RULES.get(thing["kind"])
    if rules is None:
        return [f"kind {thing['kind']!r} is not known here{closest(thing['kind'], RULES)}"]
    found = list(schema_problems(thing))
    return found or [problem for rule in (*_EVERYWHERE, *rules) for problem in _tried(rule, thing)]


def _tried(rule: Rule, thing: Object) -> Iterator[str]:
    try:
        yield from rule(thing)
    except (TypeError, ValueError, AttributeError) as error:  # of kinds that have no schema here
        yield f"{rule.__name__.replace('_', ' ')} cannot be looked for, a value is of a wrong type ({error})"


def problems(things: Sequence[Object]) -> list[str]:
    """Everything that is wrong with these objects, each with the object's kind and name."""
    return [
        f"{thing['kind']} {thing['metadata']['name']}: {problem}"
        for thing in things
        for problem in problems_of(thing)
    ]
