"""`skyrl-maze demos`: write solved episodes for supervised training."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from skyrl_maze import dataset, recipes
from skyrl_maze.actions import GoalRule, Grammar
from skyrl_maze.console import plain_console
from skyrl_maze.errors import ConfigError
from skyrl_maze.render import THEMES

if TYPE_CHECKING:
    from skyrl_maze.demo_files import Report
    from skyrl_maze.demonstrations import Demonstrations

_TURNS_PER_CELL = 2  # a budget of twice the size, where nothing else is said


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)


def demos(
    out: Annotated[
        Path,
        typer.Option(help="FILE.parquet (TRL); a folder to make, or FILE.jsonl (LLaMA-Factory, ms-swift)."),
    ],
    count: Annotated[int, typer.Option(help="Episodes, each in a maze of its own.")] = 1000,
    sizes: Annotated[
        str | None,
        typer.Option(help="Cells along each side, as in 9,11; by default the recipe's for training, else 9."),
    ] = None,
    braid: Annotated[float, typer.Option(help="Share of dead ends to open, 0 to 1; makes loops.")] = 0.0,
    grammar: Annotated[str | None, typer.Option(help=f"How actions are written: {_or(Grammar)}.")] = None,
    theme: Annotated[str | None, typer.Option(help=f"Colours: {_or(THEMES)}.")] = None,
    goal_rule: Annotated[str | None, typer.Option(help=f"What solves a maze: {_or(GoalRule)}.")] = None,
    max_turns: Annotated[
        int | None,
        typer.Option(help="Turn budget; by default the recipe's, else twice the largest size."),
    ] = None,
    detours: Annotated[
        float, typer.Option(help="Chance that a turn is a wrong one, which is then recovered from.")
    ] = 0.0,
    per_turn: Annotated[
        bool, typer.Option("--per-turn", help="A row for each answer to be learnt, instead of each episode.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed writes the same file.")] = 0,
    recipe: Annotated[
        str | None, typer.Option(help="Take the environment's settings from here; options say otherwise.")
    ] = None,
) -> None:
    """Write solved episodes, as chats with pictures, for supervised training with TRL or LLaMA-Factory.

    No maze is of an evaluation set that ships, nor of the recipe's.

    Example: skyrl-maze demos --out demos.parquet --recipe maze --count 500 --detours 0.2
    """
    # They import skyrl_gym, which takes longer than every other command.
    from skyrl_maze.demo_files import write_demonstrations

    chosen = {"grammar": grammar, "theme": theme, "goal_rule": goal_rule}
    episodes = _demonstrations(recipe, chosen, sizes, max_turns, count, seed, braid, detours)
    with _bar() as progress:
        report = write_demonstrations(out, episodes, per_turn, progress)
    _print(out, report, episodes.left_out)


def _demonstrations(
    recipe: str | None,
    chosen: dict[str, str | None],
    sizes: str | None,
    max_turns: int | None,
    count: int,
    seed: int,
    braid: float,
    detours: float,
) -> "Demonstrations":
    """What the options ask for, over what the recipe says."""
    from skyrl_maze.demonstrations import Demonstrations, DemoSettings
    from skyrl_maze.env import MazeConfig

    environment: dict[str, Any] = {}
    recipe_sizes, held_out = [9], set[str]()
    if recipe is not None:
        environment, recipe_sizes, recipe_turns, held_out = _of_recipe(recipe)
        max_turns = recipe_turns if max_turns is None else max_turns
    said = {name: value for name, value in chosen.items() if value is not None}
    if said.get("theme", environment.get("theme")) != environment.get("theme"):
        environment["cell_px"] = None  # the other theme's own
    spec = dataset.MazeSetSpec(
        sizes=_read_sizes(sizes) if sizes else recipe_sizes, count=count, seed=seed, braid=braid
    )
    settings = DemoSettings(
        MazeConfig.from_any({**environment, **said}),
        max_turns if max_turns is not None else _TURNS_PER_CELL * max(spec.sizes, default=1),
        detours,
        seed,
    )
    return Demonstrations(spec, settings, held_out)


def _read_sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"cannot read the sizes {text!r}: give whole numbers such as 9 or 9,11") from error


def _of_recipe(recipe: str) -> tuple[dict[str, Any], list[int], int, set[str]]:
    """A recipe's environment, training sizes and turn budget, and the keys of its evaluation set."""
    settings = recipes.read_settings([f"+recipe={recipe}"])
    needs = "data.mazes, environment.skyrl_gym.maze and generator.max_turns"
    with recipes.well_formed(recipe, "take settings from", needs):
        mazes = settings["data"]["mazes"]
        evaluation = dataset.mazes_of(dataset.MazeSetSpec(**mazes["eval"]))
        return (
            dict(settings["environment"]["skyrl_gym"]["maze"]),
            list(mazes["train"]["sizes"]),
            int(settings["generator"]["max_turns"]),
            {maze.key for maze in evaluation},
        )


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while it is a terminal, and nothing that stays there; yields what moves it."""
    console = plain_console(stderr=True)
    columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("episodes", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(out: Path, report: "Report", left_out: int) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    lines = {
        "written": str(out),
        "episodes": f"{report.episodes:,}",
        "rows": f"{report.rows:,}",
        "turns": f"{report.turns:,}, {report.wrong_turns:,} of them wrong and recovered from",
        "pictures": f"{report.pictures:,}",
        "bytes": f"{report.bytes:,}",
        "sha256": f"{report.sha256} (of the episodes)",
        "left out": f"{left_out:,} mazes that take more turns than there are",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    plain_console().print(table)
