"""What it takes to serve a run's adapter beside its base model: which files, and which limits of the engine.

The same in two forms: a command line of vLLM's own OpenAI-compatible server, which reads the adapter from a
folder, and the config of Ray Serve LLM, which fetches adapters from an object store by their names.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from skyrl_maze import recipes
from skyrl_maze.adapter import CONFIG_FILE, read_config
from skyrl_maze.complete import COMPLETE, Complete, verify
from skyrl_maze.cpu import KV_CACHE_BYTES
from skyrl_maze.errors import AdapterError, ConfigError
from skyrl_maze.versions import all_versions

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `max_lora_rank` (vllm.config.lora.MaxLoRARanks, alike in 0.25 and 0.30)."""
STORES = ("s3://", "gs://", "abfss://", "azure://")
"""What `dynamic_lora_loading_path` of Ray 2.57 may begin with."""
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""What vLLM needs on a machine without a GPU that has other work as well."""
_STEP = re.compile(r"global_step_(0|[1-9]\d{0,14})")
_ADAPTERS_AT_ONCE = 4


@dataclass(frozen=True)
class TrainedAdapter:
    """An adapter of a run whose files are all as they were written."""

    path: Path
    """Folder with `adapter_model.safetensors`."""
    step: int
    attempt: int
    exported: bool
    """Whether it stays; versions that are only shared with the engines are removed in time."""

    def name(self, run_id: str) -> str:
        """What no other adapter of the run is called: engines never load a second one under a name."""
        return f"{run_id}-step{self.step}" + (f".{self.attempt}" if self.attempt else "")


@dataclass(frozen=True)
class Deployment:
    """A base model and one adapter, with the limits that the run trained under."""

    base: str
    """Folder or hub id."""
    base_name: str
    adapter: TrainedAdapter
    adapter_name: str
    max_lora_rank: int
    max_model_len: int | None
    """Tokens of a conversation; None: what the model can."""
    pictures: int
    """That one conversation may hold."""
    dtype: str | None
    """None: the base's own."""

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's settings by vLLM's names, but for where the models lie."""
        return {
            **({} if self.max_model_len is None else {"max_model_len": self.max_model_len}),
            **({} if self.dtype is None else {"dtype": self.dtype}),
            "limit_mm_per_prompt": {"image": self.pictures},
            "enable_lora": True,
            "max_lora_rank": self.max_lora_rank,
        }


def adapters(run: Path, settings: Mapping[str, Any], step: int | None = None) -> tuple[TrainedAdapter, ...]:
    """The adapters of a run that could be served, newest first, an export before the version it was made of.

    Their files were not looked at: see `verified`.

    Args:
        run: the run's folder.
        settings: as `recorded` gives them.
        step: of which they must be; any by default.
    """
    exports, shared = _places(run, settings)
    found = [*_exported(exports)]
    found += [
        TrainedAdapter(version.adapter, version.step, version.attempt, exported=False)
        for version in all_versions(shared, settings["run"]["id"])
    ]
    wanted = (adapter for adapter in found if step in (None, adapter.step))
    return tuple(sorted(wanted, key=lambda a: (a.step, a.exported, a.attempt), reverse=True))


def _exported(exports: Path) -> Iterator[TrainedAdapter]:
    for folder in exports.glob("global_step_*/policy"):
        if match := _STEP.fullmatch(folder.parent.name):
            yield TrainedAdapter(folder, int(match[1]), 0, exported=True)


def verified(adapter: TrainedAdapter, run_id: str) -> TrainedAdapter:
    """The adapter with the attempt that its COMPLETE tells.

    Raises:
        AdapterError: a file of it is not as it was written, or it is another run's.
    """
    beside = adapter.path if adapter.exported else adapter.path.parent
    found: Complete = verify(beside, run_id)
    if found.step != adapter.step:
        raise AdapterError(f"{beside / COMPLETE}: is of step {found.step}; it does not belong here")
    return TrainedAdapter(adapter.path, found.step, found.attempt, adapter.exported)


def newest(
    run: Path, settings: Mapping[str, Any], step: int | None = None
) -> tuple[TrainedAdapter, list[str]]:
    """The newest adapter of a run whose files verify, and why newer ones were passed over.

    Raises:
        AdapterError: there is none; says what was there.
    """
    problems: list[str] = []
    for adapter in adapters(run, settings, step):
        try:
            return verified(adapter, settings["run"]["id"]), problems
        except AdapterError as error:
            problems.append(str(error).replace("\n  - ", " "))
    which = "adapter" if step is None else f"adapter of step {step}"
    there = sorted({adapter.step for adapter in adapters(run, settings)})
    said = "\n  - ".join([f"; steps there: {', '.join(map(str, there)) or 'none'}", *problems])
    raise AdapterError(f"no {which} in {run} can be served{said}")


def recorded(run: Path, recipe: str | None = None) -> recipes.Settings:
    """The settings that a run was started with, or those of `recipe` for a run that recorded none.

    Raises:
        ConfigError: there are none, or they lack what serving needs to know.
    """
    kept = run / recipes.RECORD
    if recipe is None and not kept.is_file():
        raise ConfigError(
            f"{kept} is not there, so how {run} was trained is not known; give a run's folder, or --recipe "
            "for a run of an older version"
        )
    given = [f"run.root={json.dumps(str(run.absolute()))}"] if recipe else []
    settings = recipes.read_settings([f"+recipe={recipe or kept}", *given])
    needs = "run.id, run.root, trainer.export_path and lora_sync_path"
    with recipes.well_formed(str(recipe or kept), "serve", needs):
        _places(run, settings)
    return settings


def _places(run: Path, settings: Mapping[str, Any]) -> tuple[Path, Path]:
    """Where exports and shared versions lie now; the folder may be seen, or have been moved, elsewhere."""
    root, trainer = Path(settings["run"]["root"]), settings["trainer"]
    given = (trainer["export_path"], trainer["policy"]["model"]["lora"]["lora_sync_path"])
    try:
        exports, shared = (Path(path).expanduser().absolute() for path in given)
    except RuntimeError as error:  # of a ~NAME that is nobody here
        raise ValueError(f"{given}: {error}") from error
    now = [run / path.relative_to(root) if path.is_relative_to(root) else path for path in (exports, shared)]
    return now[0], now[1]


def lora_rank(config: Mapping[str, Any]) -> int:
    """The `max_lora_rank` that holds an adapter: vLLM takes some ranks only, and no smaller one.

    Raises:
        AdapterError: it is too large for vLLM.
    """
    rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 1)
    if rank > RANKS[-1]:
        raise AdapterError(
            f"an adapter of rank {rank} cannot be served: vLLM holds ranks up to {RANKS[-1]}; merge it into "
            "its base with `skyrl-maze lora export`"
        )
    return next(allowed for allowed in RANKS if allowed >= rank)


def plan(
    settings: Mapping[str, Any],
    adapter: TrainedAdapter,
    base: str | None = None,
    base_name: str | None = None,
    adapter_name: str | None = None,
) -> Deployment:
    """What serves an adapter as its run used it.

    Args:
        base: folder or hub id of the base model; by default what the adapter says.
        base_name: what requests call the base; by default the last part of `base`.
        adapter_name: what they call the adapter; by default run and step.

    Raises:
        ConfigError: the settings lack something.
        AdapterError: the adapter's config cannot be read, or vLLM cannot hold it.
    """
    config = read_config(adapter.path / CONFIG_FILE)
    base = base or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise AdapterError(f"{adapter.path / CONFIG_FILE} names no base model; give it with --base")
    needs = "run.id and generator.max_turns"
    with recipes.well_formed(str(settings["run"]["id"]), "serve", needs):
        generator = settings["generator"]
        engine = generator.get("inference_engine") or {}
        more = engine.get("engine_init_kwargs") or {}
        pictures = (more.get("limit_mm_per_prompt") or {}).get("image", generator["max_turns"])
        return Deployment(
            base=base,
            base_name=base_name or Path(base).name,
            adapter=adapter,
            adapter_name=adapter_name or adapter.name(settings["run"]["id"]),
            max_lora_rank=lora_rank(config),
            max_model_len=more.get("max_model_len"),
            pictures=pictures["count"] if isinstance(pictures, Mapping) else pictures,
            dtype=engine.get("model_dtype"),
        )


def engine_here() -> str | None:
    """Which build of vLLM this Python has: `vllm`, `vllm-cpu` or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return None


def vllm_command(deployment: Deployment, host: str, port: int, engine: str | None) -> list[str]:
    """The command of vLLM's own server; on `vllm-cpu` it needs `CPU_ENVIRONMENT` as well.

    Args:
        engine: as `engine_here` gives it. The command `vllm serve` of vllm-cpu asks for the version of a
            distribution called vllm, and fails.
    """
    module = "vllm.entrypoints.openai.api_server"
    start = [sys.executable, "-m", module, "--model"] if engine == "vllm-cpu" else ["vllm", "serve"]
    settings = deployment.engine | (_CPU_ENGINE if engine == "vllm-cpu" else {})
    adapter = {
        "name": deployment.adapter_name,
        "path": str(deployment.adapter.path.absolute()),
        "base_model_name": deployment.base_name,
    }
    options = {
        "served_model_name": deployment.base_name,
        "host": host,
        "port": port,
        **settings,
        "lora_modules": adapter,
    }
    return [*start, deployment.base, *_as_options(options)]


_CPU_ENGINE: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": KV_CACHE_BYTES}


def _as_options(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield json.dumps(value) if isinstance(value, dict) else str(value)


def ray_config(deployment: Deployment, address: str, replicas: int, cpu: bool) -> dict[str, Any]:
    """The config of a Ray Serve application, for `serve run`, `serve deploy` or a RayService.

    A request for `BASE_NAME` asks the base, one for `BASE_NAME:NAME` the adapter in `ADDRESS/NAME/`.

    Args:
        address: below which the adapters lie, such as `s3://bucket/adapters`.
        replicas: engines, each with a GPU.
        cpu: whether they shall run without GPUs.
    """
    model: dict[str, Any] = {
        "model_loading_config": {"model_id": deployment.base_name, "model_source": deployment.base},
        "lora_config": {
            "dynamic_lora_loading_path": address,
            "max_num_adapters_per_replica": _ADAPTERS_AT_ONCE,
        },
        "engine_kwargs": {**deployment.engine, "max_loras": _ADAPTERS_AT_ONCE},
        "deployment_config": {"num_replicas": replicas},
    }
    args: dict[str, Any] = {"llm_configs": [model]}
    if cpu:  # Ray would ask for a GPU an engine, and for more CPUs than a small machine has
        model["engine_kwargs"] |= _CPU_ENGINE
        model["accelerator_config"] = {"kind": "cpu"}
        model["placement_group_config"] = {"bundles": [{"CPU": 1}]}
        args["ingress_deployment_config"] = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    return {
        "applications": [
            {
                "name": "visgym",
                "import_path": "ray.serve.llm:build_openai_app",
                "route_prefix": "/",
                "args": args,
            }
        ]
    }
