"""`skyrl-maze`: look at recipes, mazes and maze sets, and check that a turn budget can solve them.

Nothing here trains, and nothing here imports a trainer: whatever only looks answers within a second.
"""

import io
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from skyrl_maze import (
    __version__,
    dataset,
    demos_cli,
    doctor_cli,
    lora_cli,
    play_cli,
    recipes,
    report_cli,
    resubmit_cli,
    scores,
    serve_cli,
)
from skyrl_maze.actions import GoalRule, checked_goal_rule
from skyrl_maze.console import plain_console
from skyrl_maze.errors import ConfigError, DatasetError, SkyRLMazeError, exit_code
from skyrl_maze.maze import Cell, Maze, generate_maze
from skyrl_maze.render import THEMES, encode_png

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
recipes_app = typer.Typer(invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(lora_cli.app, name="lora")
app.command()(demos_cli.demos)
app.registered_commands += play_cli.app.registered_commands
app.registered_commands += report_cli.app.registered_commands
app.registered_commands += resubmit_cli.app.registered_commands
app.registered_commands += doctor_cli.app.registered_commands
app.registered_commands += serve_cli.app.registered_commands


def main() -> None:
    """The console script; an error of this package is `error: ...` on stderr and exit code 2, or 75."""
    for stream in (sys.stdout, sys.stderr):  # what is shown, such as a job's log, may hold any character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="skyrl-maze")
    except SkyRLMazeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"skyrl-maze {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Look at recipes and mazes, play them, compare. To train: skyrl.entrypoints.main_base +recipe=NAME"""


@recipes_app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes; `recipes show NAME` prints one. Example: skyrl-maze recipes"""
    if context.invoked_subcommand is None:
        about = {name: recipes.about(recipes.find(name)) for name in recipes.names()}
        table = [(name, *(about[name].get(field, "") for field in ("Purpose", "Hardware"))) for name in about]
        _print_table(("recipe", "purpose", "hardware"), table)


@recipes_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A shipped recipe, or the path of a .yaml file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings over the recipe's: key=value.")
    ] = None,
) -> None:
    """Print a recipe's header and its settings, with those of the recipes it extends, as YAML.

    The output is itself a recipe. Example: skyrl-maze recipes show maze_cpu trainer.seed=3
    """
    settings = recipes.read_settings([f"+recipe={name}", *(overrides or [])])
    for line in recipes.header(recipes.find(name)):
        print(f"# {line}".rstrip())
    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")


@app.command()
def maze(
    size: Annotated[int, typer.Option(help="Cells along each side, walls included; odd, 5 to 199.")] = 9,
    seed: Annotated[int, typer.Option(help="The same seed draws the same maze.")] = 0,
    braid: Annotated[float, typer.Option(help="Share of dead ends to open, 0 to 1; makes loops.")] = 0.0,
    theme: Annotated[str, typer.Option(help=f"Colours: {' or '.join(THEMES)}.")] = "tokens",
    path: Annotated[bool, typer.Option("--path", help="Mark a shortest path in the drawing.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The PNG to write; by default maze-SIZE-SEED.png in this folder."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite another picture of that name.")] = False,
) -> None:
    """Draw one maze here and, as a model sees it, to a PNG; say how it is solved.

    S is the start, G the goal. Example: skyrl-maze maze --size 9 --seed 3 --path
    """
    drawn = generate_maze(size, seed, braid)
    png = encode_png(drawn, drawn.start, theme)
    variant = (f"-braid{braid:g}" if braid else "") + (f"-{theme}" if theme != "tokens" else "")
    target = out or Path(f"maze-{size}-{seed}{variant}.png")
    _write_png(target, png, force)
    console = plain_console()
    if not console.is_terminal:
        print("\n".join(line.rstrip() for line in _drawing(drawn, theme, path).plain.splitlines()))
    elif console.width >= 2 * size:
        console.print(_drawing(drawn, theme, path))
    else:
        print(f"(a drawing needs {2 * size} columns; see the picture instead)")
    moves = drawn.shortest_path()
    print(f"key       {drawn.key}")
    print(f"shortest  {len(moves)} moves")
    print(f"moves     {' '.join(move.word for move in moves)}")
    print(f"picture   {target}")


def _drawing(drawn: Maze, theme: str, path: bool) -> Text:
    """Two characters a cell: `##` wall, `S` start, `G` goal, `.` on the way; coloured as the theme is."""
    look = THEMES[theme]
    on_the_way = set(_cells_of_path(drawn)) if path else set[Cell]()
    text = Text()
    for cell in itertools.product(range(drawn.size), repeat=2):
        mark, ground, ink = "  ", look.floor, look.agent
        if drawn.walls[cell]:
            mark, ground, ink = "##", look.wall, look.wall
        elif cell == drawn.start:
            mark, ground, ink = "S ", look.agent, look.floor
        elif cell == drawn.goal:
            mark, ground, ink = "G ", look.goal, look.floor
        elif cell in on_the_way:
            mark = ". "
        text.append(mark, style=f"{_rgb(ink.colour)} on {_rgb(ground.colour)}")
        if cell[1] == drawn.size - 1:
            text.append("\n")
    text.right_crop(1)
    return text


def _cells_of_path(drawn: Maze) -> list[Cell]:
    return list(itertools.accumulate(drawn.shortest_path(), drawn.step, initial=drawn.start))


def _rgb(colour: tuple[int, int, int]) -> str:
    return f"rgb({colour[0]},{colour[1]},{colour[2]})"


def _write_png(path: Path, png: bytes, force: bool) -> None:
    if path.is_file() and path.read_bytes() == png:
        return
    if path.exists() and not force:
        raise ConfigError(
            f"cannot write the picture {path}: it exists; give another name, or --force to overwrite it"
        )
    try:
        dataset.write_whole(path, lambda file: file.write(png))
    except OSError as error:
        raise ConfigError(
            f"cannot write the picture {path}: {error.strerror or error}; give another place"
        ) from error


@app.command()
def sets() -> None:
    """List the shipped maze sets. Example: skyrl-maze sets"""
    table = []
    for name in dataset.shipped_sets():
        mazes = dataset.load_set(name)
        lengths = [len(maze.shortest_path()) for maze in mazes]
        sizes = ", ".join(f"{size}x{size}" for size in sorted({maze.size for maze in mazes}))
        table.append((name, str(len(mazes)), sizes, f"{min(lengths)} to {max(lengths)} moves"))
    _print_table(("set", "mazes", "sizes", "shortest paths"), table)


@app.command()
def audit(
    source: Annotated[
        str | None, typer.Argument(help="A shipped set, or a .parquet file of maze rows.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Its evaluation set, goal rule and turn budget.")] = None,
    rule: Annotated[
        str | None, typer.Option(help="Goal rule, stop or reach; stop unless the recipe says.")
    ] = None,
    max_turns: Annotated[
        list[int] | None, typer.Option(help="A turn budget to check; may be repeated.")
    ] = None,
) -> None:
    """Say how many mazes a turn budget lets anyone solve: a ceiling that no training can lift.

    Under rule `stop` the final stop takes a turn. Example: skyrl-maze audit visgym-easy-64 --max-turns 15
    """
    if (source is None) == (recipe is None):
        raise ConfigError("cannot tell what to audit: give either a set or file, or --recipe NAME")
    budgets = list(max_turns or [])
    if recipe is not None:
        mazes, recipe_rule, budget = _evaluation_of(recipe)
        rule = rule or recipe_rule
        budgets = budgets or [budget]
    else:
        mazes = dataset.load(str(source))
    if not mazes:
        raise DatasetError(f"cannot audit {source or recipe}: it holds no maze")
    goal_rule = checked_goal_rule(rule or GoalRule.STOP)
    needed = sorted({dataset.turns_needed(maze, goal_rule) for maze in mazes})
    if wrong := [budget for budget in budgets if budget < 1]:
        raise ConfigError(f"cannot audit a budget of {wrong[0]} turns: an episode has at least 1")
    rows = []
    for budget in sorted({*budgets, *needed}):
        count = dataset.solvable(mazes, goal_rule, budget)
        rows.append(
            (str(budget), f"{count} of {len(mazes)}", f"{count / len(mazes):.1%}", "*" * (budget in budgets))
        )
    _print_table(("turns", "solvable", "ceiling", "asked"), rows)
    print(
        f"Under goal rule {goal_rule}, {needed[-1]} turns are the fewest that allow all {len(mazes)} mazes."
    )


def _evaluation_of(recipe: str) -> tuple[list[Maze], str, int]:
    """A recipe's evaluation mazes, goal rule and turn budget."""
    settings = recipes.read_settings([f"+recipe={recipe}"])
    needs = "data.mazes.eval, environment.skyrl_gym.maze and generator.max_turns"
    with recipes.well_formed(recipe, "audit", needs):
        spec = dataset.MazeSetSpec(**settings["data"]["mazes"]["eval"])
        rule = settings["environment"]["skyrl_gym"]["maze"].get("goal_rule", GoalRule.STOP)
        return dataset.mazes_of(spec), rule, int(settings["generator"]["max_turns"])


def _print_table(columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> None:
    table = scores.plain_table(columns)
    for row in rows:
        table.add_row(*map(Text, row))
    plain_console().print(table)
