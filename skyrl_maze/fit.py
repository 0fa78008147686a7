"""Whether a recipe and the manifests fit each other, told without a cluster; each check gives a finding."""

import copy
import functools
import importlib.metadata
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

import skyrl_maze
from skyrl_maze import preflight, task
from skyrl_maze.deploy import RANKS, STORES
from skyrl_maze.disk import disk_need
from skyrl_maze.errors import ConfigError, SkyRLMazeError
from skyrl_maze.faults import cause_of
from skyrl_maze.findings import Finding, Status, judged, passed, warned
from skyrl_maze.limits import batch_problems, folder_problems, impossible, skyrl_problems
from skyrl_maze.manifest_check import problems
from skyrl_maze.manifest_links import link_problems
from skyrl_maze.manifest_safety import policy_problems
from skyrl_maze.manifest_start import JOB, words_of
from skyrl_maze.manifests import (
    GPU,
    RAY,
    SHARED,
    TRAINING,
    Object,
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
    quantity,
    replicas,
)
from skyrl_maze.settings import TrainConfig, engine_gpus, needed_gpus, policy_ranks

_GIB = 2**30
_DEFAULT_RECIPE = "maze"  # as in train_job.sh
# Of the claim's size; a Lustre target may be full while the file system has room.
_COMFORTABLE = 0.8


@dataclass(frozen=True)
class Plan:
    """A run's settings and the manifests that it is to run with."""

    cfg: TrainConfig
    things: Sequence[Object]
    model: str | None = None
    """Where the model can be read here, if not at the path that the recipe names."""

    @functools.cached_property
    def at_hand(self) -> TrainConfig:
        """The settings with the model that can be read here."""
        cfg = copy.deepcopy(self.cfg)
        cfg.trainer.policy.model.path = self.model or cfg.trainer.policy.model.path
        return cfg

    def of_kind(self, *kinds: str) -> list[Object]:
        """The manifests of these kinds."""
        return [thing for thing in self.things if thing["kind"] in kinds]


def settings_of(
    things: Sequence[Object], recipe: str | None, overrides: Sequence[str], here: Mapping[str, str]
) -> list[str]:
    """The command line that `train_job.sh` makes of a head's environment, with what was given over it.

    Args:
        things: manifests, of which at most one is a run.
        recipe: instead of the one that the environment names.
        overrides: `key=value` settings over those in the environment.
        here: the environment if no run is among the manifests, as in a pod.

    Raises:
        ConfigError: no recipe is given or named, or several runs are given.
    """
    runs = [thing for thing in things if thing["kind"] in TRAINING]
    if len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs are given, and a recipe fits one; give one RayCluster or RayJob")
    said, theirs = here, list[str]()
    if runs:
        variables, words = words_of(runs[0])
        said = environment(groups_of(runs[0])[0]) | variables
        theirs = words[1:] if words[:1] == [JOB] else []
    name = recipe or said.get("MAZE_RECIPE") or ("" if things else _DEFAULT_RECIPE)
    if not name:
        title = "no recipe: give --recipe NAME, or the manifest of a run, which names one"
        raise ConfigError.from_problems(title, problems(runs))
    run_id, shared = said.get("MAZE_RUN_ID") or (name if runs else ""), said.get("MAZE_SHARED") or SHARED
    run = [f"run.id='{run_id}'", f"run.root={shared}/runs/{run_id}"] if run_id else []
    again = {override.partition("=")[0] for override in overrides}
    if run_id and "run.id" in again:  # as if MAZE_RUN_ID had said it
        run = [f"run.root={shared}/runs/${{run.id}}"]
    theirs = [*run, *said.get("MAZE_OVERRIDES", "").split(), *theirs]
    return [f"+recipe={name}", *(t for t in theirs if t.partition("=")[0] not in again), *overrides]


def manifest_rules(plan: Plan) -> Finding:
    """Schemas and rules of the manifests themselves."""
    names = ", ".join(f"{thing['kind']} {thing['metadata']['name']}" for thing in plan.things)
    found = [*problems(plan.things), *link_problems(plan.things)]
    return judged("manifests", found, "mend the overlay; see docs/hyperpod.md", names)


def settings(plan: Plan) -> Finding:
    """Ranges, choices and combinations of the recipe's settings, SkyRL's own check included."""
    elsewhere = {*batch_problems(plan.cfg), *folder_problems(plan.cfg)}
    found = [problem for problem in impossible(plan.cfg) if problem not in elsewhere]
    if not found and not elsewhere:
        found = skyrl_problems(plan.cfg)
    return judged("settings", found, "change the recipe, or MAZE_OVERRIDES", "all can work together")


def batches(plan: Plan) -> Finding:
    """Whether the batch sizes divide."""
    trainer, samples = plan.cfg.trainer, plan.cfg.generator.n_samples_per_prompt
    fine = (
        f"{trainer.train_batch_size} prompts x {samples} samples, in updates of "
        f"{trainer.policy_mini_batch_size} prompts, over {policy_ranks(plan.cfg)} ranks"
    )
    return judged("batches", batch_problems(plan.cfg), "take sizes that divide", fine)


def gpus(plan: Plan) -> Finding:
    """GPUs of the workers = engines = ranks, node by node."""
    cfg, found = plan.cfg, list[str]()
    placement, needed, engines = cfg.trainer.placement, needed_gpus(cfg), engine_gpus(cfg)
    ranks, nodes = policy_ranks(cfg), placement.policy_num_nodes
    if placement.colocate_all and engines != ranks:
        found.append(f"the engines take {engines} GPU(s) and the policy has {ranks} ranks on the same ones")
    workers = [group for thing in plan.of_kind(*TRAINING) for group in groups_of(thing)[1:]]
    there = sum(replicas(group) * count(group, GPU) for group in workers)
    if there != needed:
        found.append(f"the recipe needs {needed} GPU(s) and the manifest's workers have {there}")
    elif placement.colocate_all and sum(map(replicas, workers)) != nodes:
        found.append(f"policy_num_nodes={nodes} and the manifest has {sum(map(replicas, workers))} worker(s)")
    fix = "set workers and worker-gpu in run.yaml, or trainer.placement and num_engines, so that all agree"
    return judged("gpus", found, fix, f"{there} in the manifest, {engines} for engines, {ranks} ranks")


def hardware(plan: Plan) -> Finding:
    """How many nodes of each type all that is given takes at once; how many there are is not known here."""
    gpus_of, known = Counter[str](), instances()
    for thing in plan.of_kind(*RAY):
        for group in groups_of(thing):
            gpus_of[instance(group)] += replicas(group) * count(group, GPU)
    for thing in plan.of_kind("Deployment"):
        group = {"replicas": 1, **mapping(thing, "spec")}
        gpus_of[instance(group)] += replicas(group) * count(group, GPU)
    nodes = {
        kind: max(1, math.ceil(gpus / (known[kind]["gpu"] or 1)))
        for kind, gpus in gpus_of.items()
        if kind in known
    }
    said = ", ".join(f"{number} x {kind}" for kind, number in sorted(nodes.items())) or "none that is known"
    return passed("hardware", f"at least {said} for everything given at once")


def folders(plan: Plan) -> Finding:
    """Checkpoints and exports apart, and what the run keeps on a volume of the claim, in every pod."""
    cfg, found = plan.cfg, folder_problems(plan.cfg)
    kept = {
        "run.root": cfg.run.root,
        "trainer.ckpt_path": cfg.trainer.ckpt_path,
        "trainer.export_path": cfg.trainer.export_path,
        "trainer.policy.model.lora.lora_sync_path": cfg.trainer.policy.model.lora.lora_sync_path,
        "trainer.policy.model.path": cfg.trainer.policy.model.path,
    }
    for group in (group for thing in plan.of_kind(*TRAINING) for group in groups_of(thing)):
        shared = [path for path, volume in mounts(group).items() if "persistentVolumeClaim" in volume]
        found += [
            f"{name}={path} is not on a claim that {container(group).get('name')} mounts ({shared or 'none'})"
            for name, path in kept.items()
            if Path(path).is_absolute() and not any(Path(path).is_relative_to(place) for place in shared)
        ]
    fix = "keep what must outlive a pod below the mount of the shared claim, each kind in its own folder"
    return judged("folders", found, fix, f"all below {cfg.run.root}; checkpoints and exports apart")


def context(plan: Plan) -> Finding:
    """Turns x tokens against the engine's context and its limit of pictures."""
    fix = "raise max_model_len, max_input_length or the limit of pictures as said, or lower max_turns"
    generator = plan.cfg.generator
    try:
        unread = preflight.check_budget(plan.at_hand)
    except SkyRLMazeError as error:
        return Finding("context", Status.FAIL, tuple(str(error).splitlines()), fix)
    window = generator.inference_engine.engine_init_kwargs.get("max_model_len")
    turns, answer = generator.max_turns, generator.sampling_params.max_generate_length
    said = f"{turns} turns with answers of {answer} tokens, in a context of {window}"
    if isinstance(window, int) and turns * answer > window:
        return Finding("context", Status.FAIL, (f"{said}: the answers alone do not fit",), fix)
    if unread:
        return warned("context", f"{said}: {unread[0]}", _GIVE_MODEL)
    return passed("context", f"{said}: the longest episode fits")


_GIVE_MODEL = "give --model FOLDER_OR_HUB_ID, with the config and the tokenizer of the model"


def adapter(plan: Plan) -> Finding:
    """Whether the engines know every LoRA module of the model."""
    try:
        unread = preflight.check_adapter(plan.at_hand)
    except SkyRLMazeError as error:
        fix = "set target_modules and exclude_modules"
        return Finding("adapter", Status.FAIL, tuple(str(error).splitlines()), fix)
    if unread:
        return warned("adapter", unread[0], _GIVE_MODEL)
    return passed("adapter", f"rank {plan.cfg.trainer.policy.model.lora.rank}; the engines know every module")


def serving(plan: Plan) -> Finding:
    """The serving engine must take adapters of the trained rank, and as many pictures."""
    rank, turns = plan.cfg.trainer.policy.model.lora.rank, plan.cfg.generator.max_turns
    fix = "set max_lora_rank and limit_mm_per_prompt in the application of serving.yaml"
    found, fine = list[str](), list[str]()
    for service in plan.of_kind("RayService"):
        try:
            application = yaml.safe_load(str(at(service, "spec", "serveConfigV2")))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            found.append(f"serveConfigV2 is not YAML: {cause_of(error)}")
            continue
        configs = [
            model
            for served in entries(application, "applications")
            for model in entries(served, "args", "llm_configs")
        ]
        found += [] if configs else ["serveConfigV2 has no llm_configs"]
        for model in configs:
            limits = mapping(model, "engine_kwargs")
            most, pictures = limits.get("max_lora_rank"), at(limits, "limit_mm_per_prompt", "image")
            if not isinstance(most, int) or most < rank:
                found.append(f"max_lora_rank is {most} and adapters of rank {rank} are trained")
            elif most not in RANKS:
                found.append(f"max_lora_rank is {most}, and vLLM takes {', '.join(map(str, RANKS))}")
            found += _unservable(model, plan.cfg)
            if isinstance(pictures, int) and pictures < turns:
                found.append(f"limit_mm_per_prompt.image is {pictures} and an episode shows {turns}")
            fine.append(f"max_lora_rank {most} for adapters of rank {rank}")
    fine += [f"Deployment {server} takes its limits from the adapter" for server in _servers(plan)]
    if not found and not fine:
        give = "give hyperpod/overlays/serving or serving-vllm as well, whichever you will apply"
        return warned("serving", "neither a RayService nor a server of vLLM is given", give)
    return judged("serving", found, fix, "; ".join(fine))


def _unservable(model: Object, cfg: TrainConfig) -> Iterator[str]:
    """Adapters that Ray Serve does not fetch or apply, and conversations that it cuts short."""
    address = str(at(model, "lora_config", "dynamic_lora_loading_path"))
    if not address.startswith(STORES):
        yield f"dynamic_lora_loading_path is {address}, and Ray Serve fetches from {', '.join(STORES)} only"
    if at(model, "engine_kwargs", "enable_lora") is not True:
        yield "enable_lora must be true"
    trained = cfg.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    served = at(model, "engine_kwargs", "max_model_len")
    if isinstance(trained, int) and isinstance(served, int) and served < trained:
        yield f"max_model_len is {served} and conversations of {trained} tokens are trained"


def _servers(plan: Plan) -> list[str]:
    """Names of the Deployments that run `skyrl-maze serve`."""
    return [
        thing["metadata"]["name"]
        for thing in plan.of_kind("Deployment")
        for entry in entries(thing, "spec", "template", "spec", "containers")
        if isinstance(args := entry.get("args"), list) and args[:2] == ["skyrl-maze", "serve"]
    ]


def ray_versions(plan: Plan) -> Finding:
    """One version of Ray: in the manifest, in the image, and here."""
    said = {"installed here": importlib.metadata.version("ray")}
    for requirement in importlib.metadata.requires("skyrl_maze") or ():
        if pin := re.match(r"ray(?:\[\w+\])?==([\w.]+)", requirement):
            said["required by skyrl_maze"] = pin[1]
    lock = Path(skyrl_maze.__file__).parents[1] / "requirements/gpu.txt"  # what the Dockerfile installs
    if lock.is_file() and (pin := re.search(r"^ray==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)):
        said["in the image (requirements/gpu.txt)"] = pin[1]
    for thing in plan.of_kind(*TRAINING):
        said[f"rayVersion of {thing['kind']} {thing['metadata']['name']}"] = str(
            cluster_of(thing).get("rayVersion")
        )
    lines = [f"{version} {where}" for where, version in said.items()]
    fix = "set rayVersion to the Ray of the image, and build the image from this package's lock"
    return judged("ray", lines if len(set(said.values())) > 1 else [], fix, "; ".join(lines))


def image(plan: Plan) -> Finding:
    """An image whose tag is another version of this package."""
    images = {str(container(g).get("image", "")) for t in plan.of_kind(*TRAINING) for g in groups_of(t)}
    others = sorted(i for i in images if "@" not in i and i.rpartition(":")[2] != skyrl_maze.__version__)
    if not others:
        return passed("image", ", ".join(sorted(images)) or "none")
    fix = f"see that it holds skyrl_maze {skyrl_maze.__version__}, or what was checked here is not what runs"
    return warned("image", ", ".join(others), fix)


def placeholders(plan: Plan) -> Finding:
    """Accounts, file systems and buckets that are those of the shipped examples."""
    found = [
        f"{thing['kind']} {thing['metadata']['name']}: {', '.join(left)}"
        for thing in plan.things
        if (left := sorted(set(re.findall(_EXAMPLES, json.dumps(thing)))))
    ]
    if found:
        fix = "put your own into hyperpod/settings/settings.yaml, a bucket into application.yaml"
        return Finding("placeholders", Status.WARN, tuple(found), fix)
    return passed("placeholders", "no account, file system or bucket of the examples is left")


_EXAMPLES = r"\b111122223333\b|\b(?:fs|subnet|sg)-0123456789abcdef0\b|s3://BUCKET"


def disk(plan: Plan) -> Finding:
    """What the run keeps against the size of the claim."""
    try:
        need = disk_need(plan.at_hand)
    except ConfigError as error:
        return warned("disk", str(error), "leave room for whole checkpoints, 4 bytes a parameter and more")
    parts = {"checkpoints": need.checkpoints, "versions": need.versions, "exports": need.exports}
    said = f"{need.total / _GIB:.1f} GiB: " + ", ".join(f"{n} {b / _GIB:.1f}" for n, b in parts.items())
    if need.assumed:
        said += f", if the adapter is as that of Qwen3-VL-8B; {need.assumed}"
    sizes = {
        claim["metadata"]["name"]: quantity(at(claim, "spec", "resources", "requests", "storage"))
        for claim in plan.of_kind("PersistentVolumeClaim")
    }
    if not sizes:
        return warned("disk", f"{said}; no claim is given", "give hyperpod/overlays/storage-... as well")
    size = min(sizes.values())
    said += f"; the claim has {size / _GIB:.0f} GiB, the model and other runs included"
    if not need.total <= size:  # also true of a size that is no quantity
        fix = "keep fewer checkpoints (trainer.max_ckpts_to_keep), export less often, or take a larger volume"
        return Finding("disk", Status.FAIL, (said,), fix)
    if need.total > _COMFORTABLE * size:
        return warned("disk", said, "leave room for the model, other runs, and targets that fill unevenly")
    return passed("disk", said)


def doors(plan: Plan) -> Finding:
    """A network policy that is given must be about the pods of the run."""
    if not plan.of_kind("NetworkPolicy"):
        return warned("access", "no NetworkPolicy is given", "give hyperpod/overlays/access as well")
    policies = plan.of_kind("NetworkPolicy")
    said = {
        f"{thing['kind']} {thing['metadata']['name']} {problem}": None  # once for all pods of a thing
        for thing in plan.things
        for problem in policy_problems(policies, thing)
    }
    fix = "label the pods as the policies select them, or add them to hyperpod/overlays/access/network.yaml"
    return judged("access", list(said), fix, "every pod has its policy")


def ceiling(plan: Plan) -> Finding:
    """Whether the turns let every episode of the evaluation set succeed."""
    if found := task.of(plan.cfg).warnings(plan.cfg):
        return warned("turns", found[0], "raise generator.max_turns")
    return passed("turns", f"{plan.cfg.generator.max_turns} turns are enough for the whole evaluation set")


Check = Callable[[Plan], Finding]
CHECKS: Sequence[Check] = (
    *(manifest_rules, settings, batches, gpus, hardware, folders, context, ceiling, adapter, serving),
    *(ray_versions, image, placeholders, disk, doors),
)


def check_plan(plan: Plan) -> list[Finding]:
    """All findings. A check that stumbles over settings another one refuses is a failure of its own."""
    findings = []
    for check in CHECKS:
        try:
            findings.append(check(plan))
        except (SkyRLMazeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            name = check.__name__.replace("_", " ")
            said = f"could not be looked at: {cause_of(error)}"
            findings.append(Finding(name, Status.FAIL, (said,), "mend what the other checks found first"))
    return findings
