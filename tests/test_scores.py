"""Tables and verdicts: the figures of the files, in words that do not promise too much."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console
from walks import solved, walked

from skyrl_maze.actions import GoalRule
from skyrl_maze.compare import compare
from skyrl_maze.evaluate import figures
from skyrl_maze.records import Conditions, Summary
from skyrl_maze.results import Result
from skyrl_maze.scores import comparison_tables, differences, result_tables, verdict

CONDITIONS = Conditions(
    policy="qwen [/b]",
    goal_rule=GoalRule.STOP,
    max_turns=8,
    grammar="keyword",
    theme="tokens",
    temperature=0.5,
)


def played(wins):
    return [
        solved(seed=i, index=i, max_turns=8) if won else walked(["hm"], seed=i, index=i, max_turns=8)
        for i, won in enumerate(wins)
    ]


def result(wins, **conditions):
    episodes = played(wins)
    told = dataclasses.replace(CONDITIONS, **conditions)
    return Result(Path("x"), Summary.of(told, figures(episodes)), tuple(episodes))


def shown(tables):
    console = Console(file=io.StringIO(), width=200, highlight=False)
    for table in tables:
        console.print(table)
    return " ".join(console.file.getvalue().split())


def test_a_table_says_who_and_what():
    text = shown(result_tables(result([True, False, False], step=5, adapter="5.0").summary))
    assert "qwen [/b] on drawn mazes" in text
    assert "temperature 0.5 training step 5 adapter 5.0 solved 1 of 3, 33.33%" in text
    assert "excess steps 0.00 a solved maze" in text
    assert "not understood 2 into a wall 0 ended by running 2, goal 1 errors 0" in text
    assert "size 5 3 1, 33.33% 6.15% to 79.23%" in text


def test_a_baseline_has_no_temperature_and_nothing_solved_no_excess():
    text = shown(result_tables(result([False], policy="random").summary))
    assert "temperature" not in text
    assert "excess steps none was solved" in text


def test_two_sides_stand_beside_each_other():
    a, b = result([True] * 30, step=0), result([False] * 29 + [True], policy="[red]other")
    text = shown(comparison_tables(a, b, compare(a.episodes, b.episodes)))
    assert "A qwen [/b], step 0 30 of 30, 100.00%" in text
    assert "B [red]other 1 of 30, 3.33%" in text
    assert (
        "only A solved 29 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20 and 9 more"
        in text
    )
    assert "only B solved 0 none" in text


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([True, False], [True, False], "there is no difference"),
        (
            [True] * 5,
            [False] * 5,
            "The difference may be chance: as lopsided as this by chance alone in 0.062 of",
        ),
        (
            [True] * 6,
            [False] * 6,
            "A is better, and the difference is real: chance alone is this lopsided in 0.031",
        ),
        ([False] * 6, [True] * 6, "B is better, and the difference is real"),
    ],
)
def test_the_verdict_follows_the_test(a, b, words):
    assert words in verdict(compare(played(a), played(b)))


def test_other_conditions_are_told():
    a, b = result([True]).summary, result([True], grammar="tuple", mazes="x").summary
    assert differences(a, b) == [
        "mazes is None for A and x for B",
        "grammar is keyword for A and tuple for B",
    ]
    assert differences(a, a) == []
