"""`skyrl-maze serve`: how a run's adapter is put behind an endpoint, from what its folder says."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from skyrl_maze import deploy, recipes
from skyrl_maze.console import plain_console
from skyrl_maze.errors import ConfigError, SetupError

app = typer.Typer()

_BREAK = " \\\n    "


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(help="A run's folder, such as /shared/runs/maze.")],
    more: Annotated[list[str] | None, typer.Argument(help="Other options of vLLM, after --.")] = None,
    step: Annotated[int | None, typer.Option(help="Of the adapter; by default the newest.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Write Ray Serve's config; adapters lie below s3://bucket/prefix."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines of Ray Serve, each with a GPU.")] = 2,
    base: Annotated[
        str | None, typer.Option(help="Folder or id of the base, if it is elsewhere now.")
    ] = None,
    base_name: Annotated[str | None, typer.Option(help="What requests call the base; its folder's.")] = None,
    name: Annotated[str | None, typer.Option(help="What they call the adapter; RUN-stepN.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Of a run whose folder has no recipe.yaml.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    start: Annotated[bool, typer.Option("--run", help="Become that server, instead of printing it.")] = False,
) -> None:
    """Print the vLLM command that serves a run's base and adapter, or Ray Serve's config for the same.

    The adapter is the newest that is whole: every file is read and compared with its checksum. Length and
    pictures of a conversation are those of the run, `max_lora_rank` holds the adapter's rank.

    Example: skyrl-maze serve runs/maze-cpu --port 8001
    Example: skyrl-maze serve /shared/runs/maze --ray s3://bucket/adapters > application.yaml
    """
    if ray is not None and (start or more):
        raise ConfigError("--ray writes a config: leave out --run and options of vLLM")
    if ray is not None and not ray.startswith(deploy.STORES):
        raise ConfigError(
            f"--ray {ray}: Ray Serve fetches adapters from {', '.join(deploy.STORES)} only; for a folder "
            "leave --ray out: vLLM's own server reads it"
        )
    settings = deploy.recorded(run, recipe)
    adapter, passed_over = deploy.newest(run, settings, step)
    plan = deploy.plan(settings, adapter, base, base_name, name)
    say = plain_console(stderr=True, soft_wrap=True)
    for problem in passed_over:
        say.print(f"note: not served: {problem}")
    if not adapter.exported and not start:
        say.print("note: a version is removed when the run has shared newer ones; an export stays")
    known = recipe or str(run / recipes.RECORD)
    if ray is None:
        _vllm(plan, host, port, more or [], start, known, say)
    else:
        _ray(plan, ray, replicas, settings["run"].get("device") == "cpu", known, say)


def _vllm(
    plan: deploy.Deployment, host: str, port: int, more: list[str], start: bool, recipe: str, say: Console
) -> None:
    engine = deploy.engine_here()
    command = [*deploy.vllm_command(plan, host, port, engine), *more]
    environment = deploy.CPU_ENVIRONMENT if engine == "vllm-cpu" else {}
    if not start:
        _print_command(environment, command)
    _say_how_to_play(plan.adapter_name, f"http://127.0.0.1:{port}/v1", plan, recipe, say)
    if start:
        if engine is None:
            raise SetupError(
                f"vLLM is not installed for {sys.executable}; run this where it is, or leave --run out"
            )
        sys.stdout.flush()
        os.execvpe(command[0], command, {**environment, **os.environ})


def _ray(plan: deploy.Deployment, address: str, replicas: int, cpu: bool, recipe: str, say: Console) -> None:
    config = deploy.ray_config(plan, address.rstrip("/"), replicas, cpu)
    print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")
    upload = ["skyrl-maze", "lora", "upload", str(plan.adapter.path), "--to", address]
    say.print(f"first  {shlex.join([*upload, '--name', plan.adapter_name])}")
    model = f"{plan.base_name}:{plan.adapter_name}"
    _say_how_to_play(model, "http://127.0.0.1:8000/v1", plan, recipe, say)


def _print_command(environment: dict[str, str], command: list[str]) -> None:
    """One option a line, as a shell takes it."""
    words = [*(f"{name}={value}" for name, value in environment.items()), *map(shlex.quote, command)]
    # A break only between words: within one it would be part of it.
    print("".join(f"{_BREAK if word.startswith('--') else ' '}{word}" for word in words).lstrip())


def _say_how_to_play(model: str, endpoint: str, plan: deploy.Deployment, recipe: str, say: Console) -> None:
    out = f"results/{plan.adapter_name}"
    play = ["skyrl-maze", "play", "--endpoint", endpoint, "--model", model, "--recipe", recipe, "--out", out]
    say.print(f"then   {shlex.join(play)}")
