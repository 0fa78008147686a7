"""The doctor on a laptop: what fits passes, and each misfit is found by the check that it is of."""

import copy
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import HYPERPOD, build, built

from skyrl_maze import _compat, disk

_compat.install()

from skyrl_maze import fit, maze_task, tiny  # noqa: E402
from skyrl_maze.config import build_config, parse_config  # noqa: E402
from skyrl_maze.errors import ConfigError  # noqa: E402
from skyrl_maze.findings import Finding, Status  # noqa: E402
from skyrl_maze.fit import Plan, check_plan, settings_of  # noqa: E402
from skyrl_maze.manifests import Object, groups_of  # noqa: E402

GIVEN = ("published", "storage-new", "serving", "access")
LORA = "trainer.policy.model.lora"


def things_of(*overlays: str) -> list[Object]:
    return [copy.deepcopy(thing) for overlay in overlays for thing in built(overlay)]


@functools.cache
def config_of(*overrides: str) -> Any:
    return parse_config(settings_of(built("published"), None, overrides, {}))


def plan(*overrides: str, overlays: tuple[str, ...] = GIVEN, model: str | None = None) -> Plan:
    return Plan(config_of(*overrides), things_of(*overlays), model)


def found(plan: Plan) -> dict[str, Finding]:
    return {finding.check: finding for finding in check_plan(plan)}


def statuses(findings: dict[str, Finding], *wanted: Status) -> set[str]:
    return {name for name, finding in findings.items() if finding.status in wanted}


# --- What fits ---


@pytest.mark.parametrize(
    "run", ["published", "published-job", "governed", "governed-job", "one-node", "one-node-job"]
)
def test_every_shipped_run_fits_its_manifests(run: str) -> None:
    things = things_of(run, "storage-new", "serving", "access")
    findings = found(Plan(parse_config(settings_of(things, None, [], {})), things))
    assert statuses(findings, Status.FAIL) == set()
    # The model is in the cluster, not here; and the examples are nobody's own.
    assert statuses(findings, Status.WARN) == {"context", "adapter", "placeholders"}
    assert all("there is no model in /shared/models" in findings[n].found[0] for n in ("context", "adapter"))
    assert "6.5 GiB" in findings["disk"].found[0] or run.startswith("one-node")


def test_what_is_not_given_is_a_warning_that_names_what_to_give() -> None:
    findings = found(plan(overlays=("published",)))
    assert statuses(findings, Status.FAIL) == set()
    fixes = {name: findings[name].fix for name in ("serving", "disk", "access")}
    assert fixes["serving"].startswith("give hyperpod/overlays/serving or serving-vllm as well")
    assert statuses(findings, Status.WARN) == {*fixes, "context", "adapter", "placeholders"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    cfg = build_config(["+recipe=maze_cpu"])
    episodes = maze_task.random_walks(cfg.environment.skyrl_gym.maze, [5], 12, tiny.WarmUp())
    tiny.save_random_model(folder, [tiny.texts_of(next(episodes)) for _ in range(32)], patch_px=16)
    return folder


def test_a_model_that_is_at_hand_is_counted(model: Path) -> None:
    findings = found(plan(model=str(model)))
    assert statuses(findings, Status.WARN, Status.FAIL) == {"placeholders"}
    assert "Qwen3-VL-8B" not in findings["disk"].found[0]


def test_an_episode_that_the_context_cannot_hold_fails(model: Path) -> None:
    small = "generator.inference_engine.engine_init_kwargs.max_model_len=5000"
    assert statuses(found(plan(small, model=str(model))), Status.FAIL) == {"context"}
    # Without the model the answers alone are counted: 18 turns of 256 tokens.
    tiny_window = "generator.inference_engine.engine_init_kwargs.max_model_len=4000"
    finding = fit.context(plan(tiny_window))
    assert (finding.status, "the answers alone do not fit" in finding.found[0]) == (Status.FAIL, True)
    assert fit.context(plan(small)).status is Status.WARN


# --- What does not ---


def head(things: list[Object]) -> Object:
    return dict(groups_of(things[0])[0])


def worker(things: list[Object]) -> Object:
    return dict(groups_of(things[0])[1])


def first(group: Object) -> Object:
    made: Object = group["template"]["spec"]["containers"][0]
    return made


def service(things: list[Object]) -> Object:
    return next(thing for thing in things if thing["kind"] == "RayService")


def served(things: list[Object], **limits: Any) -> None:
    application = yaml.safe_load(service(things)["spec"]["serveConfigV2"])
    application["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"].update(limits)
    service(things)["spec"]["serveConfigV2"] = yaml.safe_dump(application)


def replace_workers(things: list[Object], number: int) -> None:
    group = things[0]["spec"]["workerGroupSpecs"][0]
    group.update(dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), number))


def claim_of(things: list[Object], size: str) -> None:
    claim = next(thing for thing in things if thing["kind"] == "PersistentVolumeClaim")
    claim["spec"]["resources"]["requests"]["storage"] = size


Edit = Callable[[list[Object]], Any]
MISFITS: list[tuple[str, Edit, list[str], str, str]] = [
    (
        "fewer nodes",
        lambda t: replace_workers(t, 2),
        [],
        "gpus",
        "needs 6 GPU(s) and the manifest's workers have 4",
    ),
    (
        "other engines",
        lambda t: None,
        ["generator.inference_engine.num_engines=5"],
        "gpus",
        "engines take 5 GPU(s) and the policy has 6 ranks",
    ),
    (
        "other nodes",
        lambda t: None,
        ["trainer.placement.policy_num_nodes=6", "trainer.placement.policy_num_gpus_per_node=1"],
        "gpus",
        "policy_num_nodes=6 and the manifest has 3 worker(s)",
    ),
    ("batch", lambda t: None, ["trainer.train_batch_size=32"], "batches", "32 is not a multiple of"),
    (
        "uneven",
        lambda t: None,
        ["trainer.policy_mini_batch_size=10"],
        "batches",
        "cannot be dealt evenly to 6",
    ),
    (
        "one folder",
        lambda t: None,
        ["trainer.export_path=/shared/runs/maze/checkpoints"],
        "folders",
        "keep them apart",
    ),
    (
        "local folder",
        lambda t: None,
        [f"{LORA}.lora_sync_path=/tmp/sync"],
        "folders",
        "lora_sync_path=/tmp/sync is not on a",
    ),
    (
        "rank",
        lambda t: served(t, max_lora_rank=16),
        [],
        "serving",
        "max_lora_rank is 16 and adapters of rank 32",
    ),
    ("odd rank", lambda t: served(t, max_lora_rank=40), [], "serving", "is 40, and vLLM takes 1, 8, 16, 32"),
    (
        "short",
        lambda t: served(t, max_model_len=1000),
        [],
        "serving",
        "max_model_len is 1000 and conversations",
    ),
    ("no adapters", lambda t: served(t, enable_lora=False), [], "serving", "enable_lora must be true"),
    (
        "a folder of adapters",
        lambda t: service(t)["spec"].update(
            serveConfigV2=service(t)["spec"]["serveConfigV2"].replace("s3://BUCKET", "/shared")
        ),
        [],
        "serving",
        "dynamic_lora_loading_path is /shared/adapters, and Ray Serve fetches from s3://",
    ),
    (
        "another claim",
        lambda t: next(x for x in t if x["kind"] == "PersistentVolumeClaim")["metadata"].update(name="mine"),
        [],
        "manifests",
        "RayCluster skyrl-visgym mounts the claim fsx, and mine is given",
    ),
    ("no rank", lambda t: served(t, max_lora_rank=None), [], "serving", "max_lora_rank is None"),
    (
        "pictures",
        lambda t: served(t, limit_mm_per_prompt={"image": 15}),
        [],
        "serving",
        "image is 15 and an episode shows 18",
    ),
    (
        "no application",
        lambda t: service(t)["spec"].update(serveConfigV2="a: [1"),
        [],
        "serving",
        "is not YAML",
    ),
    (
        "other ray",
        lambda t: t[0]["spec"].update(rayVersion="2.58.0"),
        [],
        "ray",
        "2.58.0 rayVersion of RayCluster",
    ),
    ("small claim", lambda t: claim_of(t, "5Gi"), [], "disk", "the claim has 5 GiB"),
    ("no size", lambda t: claim_of(t, "plenty"), [], "disk", "the claim has nan GiB"),
    (
        "keep all",
        lambda t: claim_of(t, "20Gi"),
        ["trainer.max_ckpts_to_keep=-1", "trainer.ckpt_interval=5"],
        "disk",
        "31",
    ),
    (
        "no policy",
        lambda t: worker(t)["template"]["metadata"]["labels"].update({"app.kubernetes.io/name": "mine"}),
        [],
        "access",
        "pods that no NetworkPolicy chooses",
    ),
    (
        "a removed quote",
        lambda t: head(t)["rayStartParams"].update({"num-gpus": 0}),
        [],
        "manifests",
        "0 is not of type 'string'",
    ),
    (
        "an unknown key",
        lambda t: first(head(t)).update(imagePulPolicy="Always"),
        [],
        "manifests",
        "did you mean 'imagePullPolicy'?",
    ),
    (
        "a missing mount",
        lambda t: first(worker(t)).update(volumeMounts=[]),
        [],
        "manifests",
        "/shared: all pods must mount",
    ),
    ("range", lambda t: None, ["trainer.epochs=0"], "settings", "trainer.epochs=0: must be from 1"),
    ("skyrl", lambda t: None, ["trainer.algorithm.advantage_estimator=grop"], "settings", "(SkyRL's check)"),
    ("modules", lambda t: None, [f"{LORA}.exclude_modules=null"], "settings", "exclude_modules=None"),
]


@pytest.mark.parametrize(
    ("edit", "overrides", "check", "said"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS]
)
def test_a_misfit_is_found_by_its_check(edit: Edit, overrides: list[str], check: str, said: str) -> None:
    made = plan(*overrides)
    edit(list(made.things))
    finding = found(made)[check]
    assert finding.status is Status.FAIL
    assert any(said in line for line in finding.found), finding.found
    assert finding.fix


def test_all_misfits_are_told_at_once() -> None:
    made = plan("trainer.train_batch_size=32", "generator.max_turns=10")
    replace_workers(list(made.things), 2)
    served(list(made.things), max_lora_rank=8)
    findings = found(made)
    assert statuses(findings, Status.FAIL) == {"batches", "gpus", "serving"}
    assert findings["turns"].status is Status.WARN
    assert "generator.max_turns=10 lets at most" in findings["turns"].found[0]


def test_an_image_of_another_version_is_a_warning() -> None:
    made = plan()
    for group in groups_of(made.things[0]):
        group["template"]["spec"]["containers"][0]["image"] = "registry.example/maze:7"
    assert fit.image(made).status is Status.WARN
    assert fit.image(made).found == ("registry.example/maze:7",)


@pytest.mark.parametrize(
    ("overlays", "nodes"),
    [
        (("published",), "3 x ml.g7e.12xlarge, 1 x ml.r5d.16xlarge"),
        (("published", "serving-vllm"), "4 x ml.g7e.12xlarge, 1 x ml.r5d.16xlarge"),
        (("published", "serving-vllm", "serving"), "5 x ml.g7e.12xlarge, 1 x ml.r5d.16xlarge"),
        (("one-node", "access"), "1 x ml.p5.48xlarge"),
        (("storage-new",), "none that is known"),
    ],
)
def test_training_and_serving_at_once_take_nodes_of_their_own(overlays: tuple[str, ...], nodes: str) -> None:
    finding = fit.hardware(Plan(config_of(), things_of(*overlays)))
    assert finding.status is Status.PASS
    assert finding.found == (f"at least {nodes} for everything given at once",)


def test_a_server_of_vllm_is_one_that_serves() -> None:
    finding = fit.serving(plan(overlays=("published", "serving-vllm")))
    assert finding.status is Status.PASS
    assert finding.found == ("Deployment visgym-vllm takes its limits from the adapter",)
    other = plan(overlays=("published", "serving-vllm"))
    server = next(thing for thing in other.things if thing["kind"] == "Deployment")
    server["spec"]["template"]["spec"]["containers"][0]["args"][1] = "play"
    assert fit.serving(other).status is Status.WARN


@pytest.mark.parametrize("overlay", ["serving", "serving-vllm"])
def test_an_endpoint_that_the_namespace_does_not_reach_is_found(overlay: str) -> None:
    made = plan(overlays=("published", overlay, "access"))
    assert fit.doors(made).status is Status.PASS
    (policy,) = [t for t in made.of_kind("NetworkPolicy") if t["metadata"]["name"] == "skyrl-maze-serve"]
    policy["spec"]["podSelector"]["matchExpressions"][0]["values"] = ["serve-head"]
    finding = fit.doors(made)
    assert finding.status is Status.FAIL
    assert ["serves on 8000, where no NetworkPolicy lets" in line for line in finding.found] == [True]


@pytest.mark.parametrize(
    "edit",
    [
        lambda rule: rule.update(ports=[{"protocol": "TCP", "port": 8001}]),
        lambda rule: rule["from"][0].update(podSelector={"matchLabels": {"a": "b"}}),
    ],
)
def test_a_door_that_is_not_the_endpoints_is_found(edit: Callable[[Object], Any]) -> None:
    made = plan(overlays=("published", "serving-vllm", "access"))
    (policy,) = [t for t in made.of_kind("NetworkPolicy") if t["metadata"]["name"] == "skyrl-maze-serve"]
    edit(policy["spec"]["ingress"][0])
    assert fit.doors(made).found == (
        "Deployment visgym-vllm serves on 8000, where no NetworkPolicy lets the namespace in: requests hang",
    )


@pytest.mark.parametrize("overlay", ["shell", "serving-vllm"])
def test_a_pod_that_is_not_rays_needs_a_policy_too(overlay: str) -> None:
    made = plan(overlays=("published", overlay, "access"))
    pod = next(thing for thing in made.things if thing["kind"] in ("Pod", "Deployment"))
    labelled = pod if pod["kind"] == "Pod" else pod["spec"]["template"]
    labelled["metadata"]["labels"] = {"app.kubernetes.io/name": "mine"}
    (said,) = fit.doors(made).found
    assert said.startswith(f"{pod['kind']} {pod['metadata']['name']} has pods that no NetworkPolicy chooses")


@pytest.mark.parametrize(
    ("overlay", "left"),
    [
        ("published", "RayCluster skyrl-visgym: 111122223333"),
        ("serving", "RayService visgym: 111122223333, s3://BUCKET"),
        ("storage-existing", "PersistentVolumeClaim fsx: fs-0123456789abcdef0"),
        ("storage-new", "StorageClass skyrl-maze-lustre: sg-0123456789abcdef0, subnet-0123456789abcdef0"),
    ],
)
def test_a_value_that_nobody_filled_in_is_a_warning(overlay: str, left: str) -> None:
    finding = fit.placeholders(Plan(config_of(), things_of(overlay)))
    assert finding.status is Status.WARN
    assert left in finding.found


def test_values_of_ones_own_are_no_placeholders() -> None:
    text = json.dumps(things_of("published", "storage-existing", "storage-new", "serving", "access"))
    for example, own in {"111122223333": "4111122223333", "0123456789abcdef0": "9", "BUCKET": "mine"}.items():
        text = text.replace(example, own)
    assert fit.placeholders(Plan(config_of(), json.loads(text))).status is Status.PASS


# --- Mistakes in the text of an overlay, as hands make them ---

TEXTS = [
    ("cluster/raycluster.yaml", 'num-gpus: "0"', "num-gpus: 0", "0 is not of type 'string'"),
    ("cluster/raycluster.yaml", "imagePullPolicy:", "imagePulPolicy:", "did you mean 'imagePullPolicy'?"),
    (
        "cluster/raycluster.yaml",
        "                - *shared-mount\n",
        "",
        "/shared: all pods must mount the same",
    ),
    ("overlays/published/run.yaml", 'worker-gpu: "2"', 'worker-gpu: "1"', "1, and ml.g7e.12xlarge has 2"),
    ("overlays/published/run.yaml", 'workers: "3"', 'workers: "2"', "the manifest's workers have 4"),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), TEXTS)
def test_a_mistake_in_an_overlays_text_is_caught_by_name(
    file: str, old: str, new: str, said: str, tmp_path: Path
) -> None:
    shutil.copytree(HYPERPOD, tmp_path / "hyperpod")
    path = tmp_path / "hyperpod" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    findings = check_plan(Plan(config_of(), build("published", tmp_path / "hyperpod")))
    assert any(
        said in line for finding in findings for line in finding.found if finding.status is Status.FAIL
    )


# --- Settings come from the manifest, as train_job.sh takes them from the pod ---


def test_the_manifest_names_recipe_run_and_overrides() -> None:
    argv = settings_of(built("one-node"), None, ["trainer.seed=3"], {})
    assert argv == [
        "+recipe=maze_1node",
        "run.id='maze-1node'",
        "run.root=/shared/runs/maze-1node",
        "trainer.policy.model.path=/shared/models/visgym_model/mixed_qwen3vl",
        "trainer.seed=3",
    ]
    over = settings_of(built("one-node"), "maze", ["run.root=/shared/x"], {})
    assert over[0] == "+recipe=maze"
    assert [setting for setting in over if setting.startswith("run.root")] == ["run.root=/shared/x"]


def test_another_run_id_is_another_folder() -> None:
    things = things_of(*GIVEN)
    argv = settings_of(things, None, ["run.id=maze-b"], {})
    cfg = parse_config(argv)
    assert (cfg.run.id, cfg.run.root) == ("maze-b", "/shared/runs/maze-b")
    assert "/shared/runs/maze-b" in fit.folders(Plan(cfg, things)).found[0]
    both = settings_of(things, None, ["run.id=maze-b", "run.root=/shared/x"], {})
    assert parse_config(both).run.root == "/shared/x"
    assert settings_of([], "maze_cpu", ["run.id=b"], {}) == ["+recipe=maze_cpu", "run.id=b"]


def test_a_pod_names_them_in_its_environment() -> None:
    here = {
        "MAZE_RECIPE": "maze_cpu",
        "MAZE_RUN_ID": "007",
        "MAZE_SHARED": "/data",
        "MAZE_OVERRIDES": "a=1  b=2",
    }
    assert settings_of([], None, [], here) == [
        *("+recipe=maze_cpu", "run.id='007'", "run.root=/data/runs/007", "a=1", "b=2")
    ]
    assert settings_of([], None, [], {}) == ["+recipe=maze"]


def test_a_jobs_command_is_over_its_environment() -> None:
    things = copy.deepcopy(built("published-job"))
    things[0]["spec"]["entrypoint"] = "env MAZE_RUN_ID=b 'MAZE_OVERRIDES=a=1  b=2' train_job.sh c='x y'"
    assert settings_of(things, None, ["d=4"], {}) == [
        *("+recipe=maze", "run.id='b'", "run.root=/shared/runs/b", "a=1", "b=2", "c=x y", "d=4")
    ]


@pytest.mark.parametrize("value", ["", None])
def test_what_a_manifest_leaves_open_is_what_the_script_takes(value: str | None) -> None:
    things = copy.deepcopy(built("published"))
    variables = first(head(things))["env"]
    variables[:] = [entry for entry in variables if entry["name"] != "MAZE_RUN_ID"]
    if value is not None:
        variables += [{"name": name, "value": value} for name in ("MAZE_RUN_ID", "MAZE_SHARED")]
    assert settings_of(things, None, [], {})[1:] == ["run.id='maze'", "run.root=/shared/runs/maze"]


def test_a_manifest_whose_environment_is_lost_says_why() -> None:
    things = copy.deepcopy(built("published"))
    things[0]["spec"]["headGroupSpec"] = None
    with pytest.raises(ConfigError, match=r"no recipe: (?s:.*)headGroupSpec: None is not of type 'object'"):
        settings_of(things, None, [], {})


def test_a_run_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 runs are given"):
        settings_of([*built("published"), *built("one-node")], None, [], {})
    with pytest.raises(ConfigError, match="no recipe: give --recipe NAME"):
        settings_of(built("storage-new"), None, [], {})


# --- Disk ---


def test_the_disk_holds_what_is_kept_and_one_more() -> None:
    cfg = config_of()
    need = disk.disk_need(cfg)
    assert need.parameters == 32 * disk.PARAMETERS_PER_RANK_8B == 87_293_952  # as counted in docs/lora.md
    assert disk.steps_of(cfg) == 160
    assert need.checkpoints == 4 * 12 * need.parameters  # 3 kept, 12 bytes: weights and two moments
    assert need.versions == 4 * 2 * 2 * need.parameters
    assert need.exports == 8 * 2 * need.parameters
    assert need.total == need.checkpoints + need.versions + need.exports
    assert "there is no model" in need.assumed


@pytest.mark.parametrize(
    ("override", "checkpoints", "exports"),
    [
        ("trainer.max_ckpts_to_keep=-1", 8, 8),
        ("trainer.max_ckpts_to_keep=100", 8, 8),
        ("trainer.ckpt_interval=-1", 0, 8),
        ("trainer.hf_save_interval=-1", 4, 0),
        ("trainer.max_training_steps=21", 2, 2),
        ("trainer.epochs=2", 4, 17),
    ],
)
def test_the_disk_follows_the_intervals(override: str, checkpoints: int, exports: int) -> None:
    need = disk.disk_need(config_of(override))
    assert need.checkpoints == checkpoints * 12 * need.parameters
    assert need.exports == exports * 2 * need.parameters


# --- Manifests from users are data ---

JUNK = st.one_of(st.none(), st.integers(-2, 3), st.text(max_size=4), st.just([]), st.just({}), st.just([{}]))


def places(thing: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a tree."""
    below = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    return [path, *(place for key, value in below for place in places(value, (*path, key)))]


ALL = things_of("published-job", *GIVEN[1:], "storage-existing", "serving-vllm", "shell")
IDENTITY = {("kind",), ("metadata",), ("metadata", "name")}  # refused when read
PLACES = [place for place in places(ALL) if len(place) > 1 and place[1:] not in IDENTITY]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_manifest_makes_the_doctor_stumble(data: st.DataObject) -> None:
    things = copy.deepcopy(ALL)
    *way, last = data.draw(st.sampled_from(PLACES))
    parent: Any = things
    for key in way:
        parent = parent[key]
    if isinstance(parent, dict) and data.draw(st.booleans()):
        del parent[last]
    else:
        parent[last] = data.draw(JUNK)
    of_run = (fit.gpus, fit.hardware, fit.folders, fit.serving, fit.ray_versions, fit.image)
    for check in (fit.manifest_rules, *of_run, fit.placeholders, fit.disk, fit.doors):
        assert check(Plan(config_of(), things)).status in Status
