"""From a command line to a typed SkyRL config: recipe below, command line above, every problem at once."""

import dataclasses
import typing
from typing import Any

from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from skyrl_maze import task
from skyrl_maze.errors import ConfigError, closest
from skyrl_maze.limits import impossible, skyrl_problems
from skyrl_maze.recipes import read_settings
from skyrl_maze.settings import RunConfig, TrainConfig


def build_config(argv: list[str]) -> TrainConfig:
    """The config of a command line such as `["+recipe=maze", "trainer.seed=3"]`.

    SkyRL's defaults lie below the recipe, the recipe below the command line.

    Raises:
        ConfigError: names every unknown key, every value of a wrong type and every impossible setting.
    """
    cfg = parse_config(argv)
    if problems := impossible(cfg) or skyrl_problems(cfg):
        raise ConfigError.from_problems(f"{len(problems)} setting(s) cannot work:", problems)
    return cfg


def parse_config(argv: list[str]) -> TrainConfig:
    """As `build_config`, without asking whether the settings can work."""
    settings = read_settings(argv)
    schema = task.load(_task_of(settings)).config
    if problems := _structural_problems(schema, settings, ""):
        raise ConfigError.from_problems(f"{len(problems)} setting(s) cannot be used:", problems)
    try:
        cfg = schema.from_dict_config(OmegaConf.create(settings))
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"SkyRL refuses these settings: {error}") from error
    return typing.cast(TrainConfig, cfg)


def _task_of(settings: dict[str, Any]) -> str:
    run = settings.get("run")
    name = run.get("task") if isinstance(run, dict) else None
    return name if isinstance(name, str) else RunConfig.task


def _structural_problems(schema: Any, settings: dict[str, Any], prefix: str) -> list[str]:
    """Unknown keys and values of a wrong type, against a dataclass and all those nested in it."""
    hints = typing.get_type_hints(schema)
    known = {f.name: hints[f.name] for f in dataclasses.fields(schema)}
    problems = []
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if key not in known:
            problems.append(f"{name}: there is no such setting{closest(str(key), known)}")
            continue
        section = next(
            (t for t in (known[key], *typing.get_args(known[key])) if dataclasses.is_dataclass(t)), None
        )
        if section and isinstance(value, dict):
            problems += _structural_problems(section, value, f"{name}.")
        else:
            problems += _type_problem(name, known[key], value)
    return problems


def _type_problem(name: str, annotation: Any, value: Any) -> list[str]:
    strict = None if dataclasses.is_dataclass(annotation) else ConfigDict(strict=True)
    try:
        TypeAdapter(annotation, config=strict).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        hint = ""
        if fault["type"] == "string_type" and isinstance(value, int | float):
            hint = f"; to keep it text, quote it: {name}=\"'{value}'\""
        return [f"{name}={value!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}{hint}"]
    return []
