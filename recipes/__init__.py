"""Recipes: one YAML file per way to run. `read_settings` turns a command line that names one into settings.

A recipe holds SkyRL's own keys and this package's (`run`, `data.mazes`, `environment.skyrl_gym.maze`), in
SkyRL's nesting. Its first lines say what it is for, on which hardware, with which result, and how to launch
it. `extends: NAME` builds on another recipe; `${...}` is OmegaConf interpolation.
"""

import contextlib
import importlib.resources
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_maze.dataset import write_whole
from skyrl_maze.errors import ConfigError, SkyRLMazeError, closest

FOLDER = Path(__file__).parent
RECORD = "recipe.yaml"
"""In a run's folder: what it was started with, itself a recipe."""

Settings = dict[str, Any]


def names() -> list[str]:
    """The shipped recipes, sorted. Those whose name begins with `_` are only there to be extended."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.yaml"))


def find(name_or_path: str, beside: Path | None = None) -> Path:
    """The file of a recipe.

    Args:
        name_or_path: a shipped recipe's name; `PACKAGE:NAME`, NAME.yaml in a package that is installed; or
            the path of a YAML file, where `~` is the home folder.
        beside: folder that a relative path is looked up in first (that of the extending recipe).

    Raises:
        ConfigError: there is no such recipe.
    """
    if name_or_path.isidentifier() and (shipped := FOLDER / f"{name_or_path}.yaml").is_file():
        return shipped
    if in_package := re.fullmatch(r"([A-Za-z_][\w.]*):([\w-]+)", name_or_path):
        return _of_package(*in_package.groups())
    given = Path(name_or_path).expanduser()
    for candidate in ([beside / given] if beside else []) + [given]:
        if candidate.suffix in {".yaml", ".yml"} and candidate.is_file():
            return candidate
    raise ConfigError(
        f"no recipe {name_or_path!r}{closest(name_or_path, names())}; "
        f"shipped: {', '.join(names())}; or give the path of a .yaml file, or PACKAGE:NAME"
    )


def _of_package(package: str, name: str) -> Path:
    try:
        folder = importlib.resources.files(package)
    except Exception as error:  # whatever the package does when it is imported
        raise ConfigError(
            f"no recipe '{package}:{name}': {package} cannot be imported ({error}); install it here"
        ) from error
    files = (Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    there = {file.stem: file for file in files}
    if name not in there:
        raise ConfigError(
            f"no recipe {name!r} in the package {package}{closest(name, there)}; "
            f"it has: {', '.join(sorted(there)) or 'none'}"
        )
    return there[name]


def header(path: Path) -> list[str]:
    """The comment lines at the top of a recipe, without their `#`."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return lines


def about(path: Path) -> dict[str, str]:
    """The header by its words, such as `{"Purpose": "the rehearsal: ..."}`; continued lines are joined."""
    fields: dict[str, str] = {}
    for line in header(path):
        if begin := re.fullmatch(r"([A-Z][a-z]+):\s+(.*)", line):
            fields[begin[1]] = begin[2]
        elif fields:
            fields[next(reversed(fields))] += f" {line}"
    return fields


def load(name_or_path: str) -> Settings:
    """The settings of a recipe with those it extends below them; interpolations are not resolved yet.

    Raises:
        ConfigError: unreadable, not YAML, not a mapping, or recipes that extend each other in a circle.
    """
    return _load(name_or_path, None, [])


def _load(name_or_path: str, beside: Path | None, chain: list[Path]) -> Settings:
    path = find(name_or_path, beside).resolve()
    if path in chain:
        circle = " -> ".join(p.stem for p in [*chain, path])
        raise ConfigError(f"recipes extend each other in a circle: {circle}; take one extends: line out")
    settings = _read(path)
    base = settings.pop("extends", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: {base!r} must be the name or the path of one recipe")
    return merge(_load(base, path.parent, [*chain, path]), settings)


def _read(path: Path) -> Settings:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"))
        settings = _plain(OmegaConf.load(path)) if isinstance(root, yaml.MappingNode) else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read recipe {path}: {' '.join(str(error).split())}") from error
    if settings is None:
        found = (
            "nothing"
            if root is None
            else "a list"
            if isinstance(root, yaml.SequenceNode)
            else "a single value"
        )
        raise ConfigError(
            f"recipe {path} holds {found}; it must be a mapping of settings, such as trainer: {{...}}"
        )
    return settings


def merge(below: Settings, above: Settings) -> Settings:
    """`above` laid over `below`: mappings are merged key by key, every other value is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def read_settings(argv: list[str]) -> Settings:
    """Recipe and overrides of a command line as one nested dict, interpolations resolved.

    Args:
        argv: `key=value` arguments, and `+recipe=NAME` at most once. Values are read as YAML.

    Raises:
        ConfigError: names every argument that cannot be read; or an unknown or unreadable recipe, or an
            interpolation without target.
    """
    recipe, overrides = _split(argv)
    settings = load(recipe) if recipe else {}
    for override in overrides:
        settings = merge(settings, override)
    return _resolved(settings)


def record(argv: list[str], root: Path) -> Path:
    """Keep the settings of a command line in the run's folder, as a recipe that starts the same run again.

    Raises:
        ConfigError: as `read_settings`.
        OSError: the folder cannot be written.
    """
    text = yaml.safe_dump(read_settings(argv), sort_keys=False, allow_unicode=True)
    about = "# What this run was started with the last time: recipe and command line in one.\n"
    write_whole(root / RECORD, lambda file: file.write((about + text).encode()))
    return root / RECORD


@contextlib.contextmanager
def well_formed(recipe: str, wanted: str, needs: str) -> Iterator[None]:
    """Turn what goes wrong while a recipe's settings are taken apart into one ConfigError.

    Args:
        wanted: what cannot be done without them, as in "cannot <wanted> recipe maze".
        needs: the settings that are read.
    """
    try:
        yield
    except SkyRLMazeError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot {wanted} recipe {recipe}: it needs {needs}, well formed ({error!r})"
        ) from error


def _resolved(settings: Settings) -> Settings:
    try:
        config = OmegaConf.create(settings)
        root = OmegaConf.select(config, "run.root")
        if isinstance(root, str) and root:  # first, since other folders are written as `${run.root}/...`
            OmegaConf.update(config, "run.root", _absolute(root))
        return _plain(config, resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"the settings do not fit together: {where}{str(error).splitlines()[0]}") from error


def _absolute(root: str) -> str:
    try:
        return str(Path(root).expanduser().absolute())
    except RuntimeError as error:  # ~NAME, where nobody is called that
        raise ConfigError(f"run.root={root}: {error} Write the folder out.") from error


def _split(argv: list[str]) -> tuple[str | None, list[Settings]]:
    """The recipe's name and each other argument as a nested dict."""
    values: dict[str, str] = {}
    overrides, problems = list[Settings](), list[str]()
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key == "trainer.override_entrypoint":
            continue  # how SkyRL's own entrypoint got here; its config knows no such key
        if equals and key.lstrip("+") == "recipe":
            key = "+recipe"
            if not value:
                problems.append(f"{argument!r} names no recipe; shipped: {', '.join(names())}")
        elif not equals or not all(key.split(".")) or key.startswith(("-", "+", "~")):
            problems.append(f"{argument!r} is not a setting; write key=value, or +recipe=NAME")
            continue
        else:
            try:
                overrides.append(_plain(OmegaConf.from_dotlist([argument])))
            except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
                reason = str(error).splitlines()[0]
                problems.append(f"{argument!r} is not readable as YAML ({reason}); quote it: {key}=\"'...'\"")
        if key in values:
            said = f"{key} is given twice, as {values[key]!r} and as {value!r}; keep one"
            problems.append(said + _from_the_job(key))
        values[key] = value
    if problems:
        raise ConfigError.from_problems(f"{len(problems)} argument(s) cannot be read:", problems)
    return values.get("+recipe"), overrides


def _from_the_job(key: str) -> str:
    """What to do about a setting that `train_job.sh` gives as well."""
    name = {"+recipe": "MAZE_RECIPE", "run.id": "MAZE_RUN_ID", "run.root": "MAZE_SHARED"}.get(key)
    if name is None:
        given = {setting.partition("=")[0] for setting in os.environ.get("MAZE_OVERRIDES", "").split()}
        name = "MAZE_OVERRIDES" if key in given else None
    if name is None or not os.environ.get("MAZE_RUN_ID"):
        return ""
    return f": train_job.sh takes it from {name}, so say that: env {name}=... train_job.sh"


def _plain(config: Any, resolve: bool = False) -> Settings:
    settings = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    if not isinstance(settings, dict):
        raise ConfigError(f"settings must be a mapping, not {type(settings).__name__}")
    return {str(key): value for key, value in settings.items()}
