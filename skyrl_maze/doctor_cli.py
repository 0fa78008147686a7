"""`skyrl-maze doctor`: what would stop a run, told before it starts, on a laptop or inside the cluster."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from skyrl_maze import findings
from skyrl_maze.console import plain_console, quiet_while
from skyrl_maze.errors import ConfigError
from skyrl_maze.findings import Finding
from skyrl_maze.manifests import Object, read_manifests

app = typer.Typer()


@app.command()
def doctor(
    manifests: Annotated[
        list[str] | None,
        typer.Argument(help="Overlay folders, files of `kubectl kustomize` output, or - for stdin."),
    ] = None,
    cluster: Annotated[
        bool | None,
        typer.Option(
            "--cluster/--no-cluster",
            help="Look at the Ray cluster here; by default if no manifest is given and one answers.",
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe; by default the manifest's, or MAZE_RECIPE here.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting over the recipe's, key=value; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of the model, where the recipe's is not here.")
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds that nodes may take for an answer.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for scripts instead of a table.")] = False,
) -> None:
    """Check recipe and manifests against each other, or the cluster from inside, before a run.

    Exit code: 0 all passed or warned, 1 something failed, 2 nothing could be checked.

    Example: skyrl-maze doctor hyperpod/overlays/published hyperpod/overlays/storage-new
    """
    things = read_manifests(manifests or [])
    with quiet_while("checking"):  # what is printed meanwhile is no finding
        found = _checked(things, bool(manifests), cluster, recipe, settings or [], model, limit_s)
    if as_json:
        print(findings.as_json(found))
    else:
        console = plain_console()
        console.print(findings.as_table(found))
        console.print(findings.last_line(found))
    raise typer.Exit(findings.exit_code(found))


def _checked(
    things: Sequence[Object],
    given: bool,
    cluster: bool | None,
    recipe: str | None,
    settings: Sequence[str],
    model: str | None,
    limit_s: float,
) -> list[Finding]:
    from skyrl_maze import _compat

    _compat.install()
    from skyrl_maze import cluster_checks, fit, nodes
    from skyrl_maze.config import build_config, parse_config

    argv, found = fit.settings_of(things, recipe, settings, os.environ), list[Finding]()
    if given:
        found += fit.check_plan(fit.Plan(parse_config(argv), things, model))
    if cluster is False or (cluster is None and given):
        return found or _nothing()
    # Before a cluster is joined: SkyRL's registries would then ask its nodes, and one may hang.
    cfg = build_config(argv)
    with nodes.joined() as there:
        return [*found, *cluster_checks.check_cluster(cfg, limit_s)] if there else _nothing()


def _nothing() -> list[Finding]:
    raise ConfigError(
        "nothing to check: give an overlay's folder, such as hyperpod/overlays/published; or run this inside "
        "a Ray cluster (RAY_ADDRESS names one): ray job submit ... -- skyrl-maze doctor --cluster"
    )
