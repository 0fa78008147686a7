"""How a run begins: what `ray start` and `train_job.sh` are told. Problems as in `manifest_rules`."""

import math
import shlex
from collections.abc import Iterator
from typing import Any

from skyrl_maze.errors import closest
from skyrl_maze.manifests import GPU, Object, cluster_of, count, environment, groups_of, mapping

JOB = "train_job.sh"
_READ = ("RECIPE", "RUN_ID", "OVERRIDES", "SHARED", "MODEL_REPO", "MODEL_REVISION", "MODEL_FILES", "WAIT_S")
VARIABLES = tuple(f"MAZE_{name}" for name in _READ)
"""What `train_job.sh` reads."""
_PORTS = {"port": 6379, "dashboard-port": 8265, "ray-client-server-port": 10001, "metrics-export-port": 8080}
_ELSEWHERE = ("labels", "resources", "num-cpus")  # a rule of its own


def start_problems(thing: Object) -> Iterator[str]:
    """Options that `ray start` does not know or cannot read, and those that contradict the container."""
    for group in groups_of(thing):
        for name, value in mapping(group, "rayStartParams").items():
            if name not in _ELSEWHERE and (why := _refused(name, value)):
                yield f"rayStartParams: {name}: {why}"
            elif name == "num-gpus" and value != str(count(group, GPU)):
                yield f"rayStartParams: num-gpus: {value}, and the container has {count(group, GPU)}"
            elif name in _PORTS and value != str(_PORTS[name]):
                yield f"rayStartParams: {name}: {value}, and everything else relies on {_PORTS[name]}"


def _refused(name: str, value: str) -> str:
    from ray.scripts.scripts import start

    options: dict[str, Any] = {word.lstrip("-"): option for option in start.params for word in option.opts}
    if name not in options:
        return f"ray start has no such option{closest(name, options)}"
    if options[name].is_flag:
        return "" if value.lower() in ("true", "false") else f"{value!r}, must be the text true or false"
    try:
        options[name].type.convert(value, options[name], None)
    except Exception as error:  # of whatever Ray's command line is made with
        return str(getattr(error, "message", error))
    return ""


def shape_problems(thing: Object) -> Iterator[str]:
    """Pods that are not as many as `replicas` says, or never there."""
    spec = cluster_of(thing)
    groups = groups_of(thing)[1:]
    names = [group.get("groupName") for group in groups]
    if not all(names) or len(set(names)) < len(names):
        yield f"groupName: {names}, must be there and differ"
    if any(group.get("numOfHosts", 1) != 1 for group in groups):
        yield "numOfHosts: must be 1, a pod a replica"
    if spec.get("suspend") or mapping(thing, "spec").get("suspend") or any(g.get("suspend") for g in groups):
        yield "suspend: no pod is made before somebody takes it out; Kueue sets it by itself"


def command_problems(thing: Object) -> Iterator[str]:
    """Variables that no script reads, and a RayJob of another command: what is checked is not what runs."""
    said = environment(groups_of(thing)[0])
    for name in sorted(said):
        if name.startswith("MAZE_") and name not in VARIABLES:
            yield f"{name}: {JOB} reads no such variable{closest(name, VARIABLES)}"
    if not _is_wait(said.get("MAZE_WAIT_S") or "0"):
        yield f"MAZE_WAIT_S: {said['MAZE_WAIT_S']!r}, must be a number of seconds, 0 or more"
    if thing["kind"] == "RayJob" and words_of(thing)[1][:1] != [JOB]:
        yield f"entrypoint: {mapping(thing, 'spec').get('entrypoint')!r}, must run {JOB}, of the image"


def _is_wait(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def words_of(thing: Object) -> tuple[dict[str, str], list[str]]:
    """The variables that a RayJob's entrypoint sets, and its command; nothing where there is none."""
    try:
        words = shlex.split(str(mapping(thing, "spec").get("entrypoint", "")))
    except ValueError:
        return {}, []
    words = words[words[:1] == ["env"] :]
    said = dict[str, str]()
    while words and words[0].partition("=")[0].isidentifier() and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        said[name] = value
    return said, words
