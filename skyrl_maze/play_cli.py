"""`skyrl-maze play`, `evaluate` and `compare`: how well a policy walks, and whether that is luck."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from skyrl_maze import scores
from skyrl_maze.address import Address
from skyrl_maze.compare import compare as compare_episodes
from skyrl_maze.console import plain_console
from skyrl_maze.errors import ConfigError
from skyrl_maze.policies import BASELINES, Baseline, Policy

if TYPE_CHECKING:
    from skyrl_maze.plan import Plan
    from skyrl_maze.records import EpisodeRecord
    from skyrl_maze.results import EpisodeLog

# Environment, client and records are imported where they are used: --help would wait for them.
app = typer.Typer()
KEY_VARIABLE = "OPENAI_API_KEY"
GIFS = "gifs"


@app.command()
def play(
    out: Annotated[Path, typer.Option(help="The result folder; one that is not finished goes on.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings over the recipe's: key=value.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Address of an OpenAI-compatible server, such as http://host:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.")] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"A baseline instead of a model: {', '.join(BASELINES)}.")
    ] = None,
    mazes: Annotated[str | None, typer.Option(help="A shipped set, or a .parquet file of maze rows.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Its mazes (unless --mazes), rules, looks and sampling; maze if only --mazes is given."
        ),
    ] = None,
    max_turns: Annotated[int | None, typer.Option(help="Turn budget, over the recipe's.")] = None,
    samples: Annotated[int | None, typer.Option(help="Episodes of each maze, over the recipe's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer, over the recipe's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling, over the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling or of the random policy.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Episodes at once.")] = 8,
    retries: Annotated[int, typer.Option(min=0, max=100, help="How often a request is tried again.")] = 5,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for one answer.")] = 600.0,
    api_key_env: Annotated[
        str | None, typer.Option(help=f"Variable that holds the API key; {KEY_VARIABLE} if it is set.")
    ] = None,
    gif: Annotated[bool, typer.Option("--gif", help=f"Also write each episode as OUT/{GIFS}/*.gif.")] = False,
) -> None:
    """Play mazes with a model behind an endpoint, or with a baseline; print how many it solved.

    The model sees what it sees in training: the whole conversation with a picture each turn. Every episode is
    kept as it ends; the same command goes on where the last one was stopped.

    Example: skyrl-maze play --policy oracle --mazes visgym-easy-64 --out results/oracle
    """
    from skyrl_maze.plan import plan_of

    if mazes is None and recipe is None:
        raise ConfigError("cannot tell what to play: give --mazes SET, --recipe NAME, or both")
    over = {"max_turns": max_turns, "samples": samples, "max_tokens": max_tokens, "seed": seed}
    plan = plan_of(recipe, mazes, overrides or [], **over, temperature=temperature)
    if policy is None:
        address = _address(endpoint, model, api_key_env, retries, timeout_s)
    elif endpoint or model or api_key_env:
        raise ConfigError(f"--policy {policy} needs no endpoint, model or key: leave either out")
    else:
        address = None
        Baseline(policy, plan.sampling.seed)
    _play(plan, policy or str(model), address, out, concurrency, gif)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A result folder, or a run's: its newest evaluation.")],
) -> None:
    """Print the table of a finished evaluation, after a check that its episodes bear it out.

    Example: skyrl-maze evaluate runs/maze-cpu
    """
    from skyrl_maze.results import read_result

    result = read_result(folder)
    _print(scores.result_tables(result.summary))
    _print_errors(result.episodes, plain_console(stderr=True))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A result folder, or a run's folder.")],
    b: Annotated[Path, typer.Argument(help="Another one, of the same mazes by the same rules.")],
) -> None:
    """Say whether one of two evaluations is really better, and which mazes only one of them solved.

    Example: skyrl-maze compare runs/maze/evaluations/step-00000000 runs/maze
    """
    from skyrl_maze.results import read_result

    first, second = read_result(a), read_result(b)
    comparison = compare_episodes(first.episodes, second.episodes)
    _print(scores.comparison_tables(first, second, comparison))
    for difference in scores.differences(first.summary, second.summary):
        print(f"note: {difference}")
    print(scores.verdict(comparison))


def _address(
    endpoint: str | None, model: str | None, api_key_env: str | None, retries: int, timeout_s: float
) -> Address:
    if not endpoint or not model:
        baselines = ", ".join(BASELINES)
        raise ConfigError(
            f"cannot tell who plays: give --endpoint URL and --model NAME, or --policy, one of {baselines}"
        )
    api_key = os.environ.get(api_key_env or KEY_VARIABLE)
    if api_key_env is not None and not api_key:
        raise ConfigError(
            f"--api-key-env {api_key_env}: that variable is not set; export it, or leave the option out"
        )
    return Address(endpoint, model, api_key or None, retries, timeout_s)


def _play(plan: "Plan", name: str, address: Address | None, out: Path, concurrency: int, gif: bool) -> None:
    from skyrl_maze.evaluate import figures
    from skyrl_maze.records import Summary
    from skyrl_maze.replay import write_gif
    from skyrl_maze.results import EpisodeLog, write_summary

    say = plain_console(stderr=True)
    if plan.solvable < len(plan.mazes):
        say.print(
            f"note: within {plan.max_turns} turns only {plan.solvable} of the {len(plan.mazes)} mazes can be "
            "solved at all",
        )
    url = None if address is None else address.url
    with EpisodeLog(out, plan.settings(name, url)) as log:
        records = _played(plan, name, address, log, concurrency, say, out)
        summary = Summary.of(plan.conditions(name, url), figures(records))
        write_summary(out, summary)
        if gif:
            for record in records:
                write_gif(out / GIFS, record, plan.env.theme, plan.env.cell_px)
    _print(scores.result_tables(summary))
    _print_errors(records, say)


def _played(
    plan: "Plan",
    name: str,
    address: Address | None,
    log: "EpisodeLog",
    concurrency: int,
    say: Console,
    out: Path,
) -> list["EpisodeRecord"]:
    """All episodes; on Ctrl-C those that ended are kept, and the command ends with 130."""
    from skyrl_maze.play import play as play_all

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("solved {task.fields[solved]}"),
        TimeRemainingColumn(),
        console=say,
        transient=True,
        disable=not say.is_terminal,
    )
    solved = sum(record.success for record in log.done)
    ended = len(log.done)
    task = bar.add_task(name[:40], total=len(plan.mazes) * plan.samples, completed=ended, solved=solved)

    def count(record: "EpisodeRecord") -> None:
        nonlocal solved, ended
        solved, ended = solved + record.success, ended + 1
        bar.update(task, completed=ended, solved=solved)

    async def run() -> list["EpisodeRecord"]:
        notify = _Notes(say)
        async with _policy(plan, name, address, notify) as policy:
            return await play_all(plan, policy, log, concurrency, count)

    try:
        with bar:
            return asyncio.run(run())
    except KeyboardInterrupt:
        say.print(f"stopped: {ended} episodes are kept in {out}; the same command goes on from there")
        raise typer.Exit(130) from None


class _Notes:
    """Says each reason once; a busy server gives the same one again and again."""

    def __init__(self, say: Console) -> None:
        self._say, self._said = say, set[str]()

    def __call__(self, text: str) -> None:
        reason = text.partition(";")[0]
        if reason not in self._said:
            self._said.add(reason)
            self._say.print(f"note: {text}")


@contextlib.asynccontextmanager
async def _policy(plan: "Plan", name: str, address: Address | None, notify: _Notes) -> AsyncIterator[Policy]:
    if address is None:
        yield Baseline(name, plan.sampling.seed)
        return
    from skyrl_maze.endpoint import Endpoint

    async with Endpoint(address, plan.sampling, notify) as endpoint:
        yield endpoint


def _print_errors(records: Iterable["EpisodeRecord"], say: Console) -> None:
    failed = [record for record in records if record.error is not None]
    if failed:
        say.print(
            f"note: {len(failed)} episodes ended with an error and count as unsolved; the first, maze "
            f"{failed[0].index + 1}: {failed[0].error}",
        )


def _print(tables: Iterable[Table]) -> None:
    console = plain_console()
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)
    sys.stdout.flush()
