"""Evaluations and comparisons as tables for the terminal."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from skyrl_maze.compare import SIGNIFICANCE, Comparison, MazeOfBoth

if TYPE_CHECKING:
    from skyrl_maze.records import SolveRate, Summary
    from skyrl_maze.results import Result

_SHOWN_MAZES = 20


def result_tables(summary: "Summary") -> list[Table]:
    """What was played, how it went, and the solve rate by size and by shortest path."""
    whole = plain_table(("", ""), f"{summary.policy} on {summary.mazes or 'drawn mazes'}", header=False)
    for name, value in (*_conditions(summary), *_outcome(summary)):
        whole.add_row(Text(name), Text(value))
    columns = ("mazes with", "episodes", "solved", "95 % interval")
    groups = plain_table(columns, "By size and by shortest path")
    for size in summary.by_size:
        groups.add_row(f"size {size.size}", *_cells(size))
    for path in summary.by_shortest_path:
        groups.add_row(f"{path.shortest_path} moves", *_cells(path))
    return [whole, groups]


def _conditions(summary: "Summary") -> list[tuple[str, str]]:
    rows = [
        ("rule", f"{summary.goal_rule}, {summary.max_turns} turns"),
        ("looks and grammar", f"{summary.theme}, {summary.grammar}"),
        ("endpoint", summary.endpoint),
        (
            "temperature",
            None if summary.endpoint is None and summary.step is None else f"{summary.temperature:g}",
        ),
        ("training step", None if summary.step is None else str(summary.step)),
        ("adapter", summary.adapter),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _outcome(summary: "Summary") -> list[tuple[str, str]]:
    solved = round(summary.solve_rate * summary.episodes)
    excess = summary.mean_excess_steps
    reasons = sorted(summary.stop_reasons.items(), key=lambda item: -item[1])
    return [
        ("solved", f"{solved} of {summary.episodes}, {summary.solve_rate:.2%}"),
        ("95 % interval", _interval(summary.solve_rate_low, summary.solve_rate_high)),
        ("SPL", f"{summary.spl:.3f}"),
        ("excess steps", "none was solved" if excess is None else f"{excess:.2f} a solved maze"),
        ("turns", str(summary.turns)),
        ("not understood", str(summary.parse_failures)),
        ("into a wall", str(summary.wall_bumps)),
        ("ended by", ", ".join(f"{reason} {count}" for reason, count in reasons)),
        ("errors", str(summary.errors)),
    ]


def comparison_tables(a: "Result", b: "Result", comparison: Comparison) -> list[Table]:
    """Both evaluations side by side, and the mazes that only one of them solved."""
    sides = plain_table(("", "solved", "95 % interval", "SPL"))
    for name, result in (("A", a), ("B", b)):
        s = result.summary
        sides.add_row(
            Text(f"{name} {s.policy}" + ("" if s.step is None else f", step {s.step}")),
            f"{round(s.solve_rate * s.episodes)} of {s.episodes}, {s.solve_rate:.2%}",
            _interval(s.solve_rate_low, s.solve_rate_high),
            f"{s.spl:.3f}",
        )
    mazes = plain_table(("", "mazes", "their numbers"))
    mazes.add_row("only A solved", str(len(comparison.better_a)), _numbers(comparison.better_a))
    mazes.add_row("only B solved", str(len(comparison.better_b)), _numbers(comparison.better_b))
    return [sides, mazes]


def verdict(comparison: Comparison) -> str:
    """One sentence on whether the difference is real."""
    a, b, p = len(comparison.better_a), len(comparison.better_b), comparison.p_value
    if a == b == 0:
        return "Both solved the same mazes: there is no difference."
    better = "A" if a > b else "B"
    if comparison.is_real:
        return (
            f"{better} is better, and the difference is real: chance alone is this lopsided in {p:.2g} of "
            f"comparisons (McNemar's exact test over mazes, limit {SIGNIFICANCE:g})."
        )
    return (
        f"The difference may be chance: as lopsided as this by chance alone in {p:.2g} of comparisons "
        f"(McNemar's exact test over mazes, limit {SIGNIFICANCE:g})."
    )


def differences(a: "Summary", b: "Summary") -> list[str]:
    """Conditions that may differ between two evaluations that can be compared, and do."""
    names = ("mazes", "theme", "grammar", "temperature")
    return [
        f"{name} is {getattr(a, name)} for A and {getattr(b, name)} for B"
        for name in names
        if getattr(a, name) != getattr(b, name)
    ]


def _cells(rate: "SolveRate") -> tuple[str, str, str]:
    return (
        str(rate.episodes),
        f"{round(rate.solve_rate * rate.episodes)}, {rate.solve_rate:.2%}",
        _interval(rate.solve_rate_low, rate.solve_rate_high),
    )


def _interval(low: float, high: float) -> str:
    return f"{low:.2%} to {high:.2%}"


def _numbers(mazes: Sequence[MazeOfBoth]) -> str:
    shown = ", ".join(str(maze.index + 1) for maze in mazes[:_SHOWN_MAZES])  # as on the report page
    more = len(mazes) - _SHOWN_MAZES
    return f"{shown} and {more} more" if more > 0 else shown or "none"


def plain_table(columns: Iterable[str], title: str = "", header: bool = True) -> Table:
    """A table without lines, whose first column stays whole."""
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=header,
        header_style="bold",
    )
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table
