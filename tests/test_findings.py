"""Findings as a table, as JSON and as an exit code."""

import io
import json

import pytest
from rich.console import Console

from skyrl_maze.findings import (
    Finding,
    Status,
    as_json,
    as_table,
    exit_code,
    judged,
    last_line,
    passed,
    warned,
)

FINE, DOUBTFUL = passed("gpus", "6 of 6"), warned("disk", "no claim", "give one")
WRONG = judged("ray", ["2.57 here", "2.58 there"], "take one", "2.57")


def test_problems_decide_between_fail_and_pass() -> None:
    assert Finding("ray", Status.FAIL, ("2.57 here", "2.58 there"), "take one") == WRONG
    assert judged("ray", [], "take one", "2.57") == passed("ray", "2.57")


@pytest.mark.parametrize(
    ("findings", "code", "worst"),
    [
        ([], 0, "pass"),
        ([FINE], 0, "pass"),
        ([FINE, DOUBTFUL], 0, "warn"),
        ([FINE, DOUBTFUL, WRONG], 1, "fail"),
    ],
)
def test_only_a_failure_makes_an_exit_code(findings: list[Finding], code: int, worst: str) -> None:
    assert exit_code(findings) == code
    said = json.loads(as_json(findings))
    assert said["status"] == worst
    assert [found["check"] for found in said["checks"]] == [finding.check for finding in findings]


def test_json_has_all_of_a_finding() -> None:
    [said] = json.loads(as_json([WRONG]))["checks"]
    assert said == {
        "check": "ray",
        "status": "fail",
        "found": ["2.57 here", "2.58 there"],
        "fix": "take one",
    }


def test_the_table_has_a_line_for_each_problem_and_takes_text_as_it_is() -> None:
    stream = io.StringIO()
    markup = warned("name", "[red]not markup[/red]", "")
    Console(file=stream, width=100).print(as_table([FINE, WRONG, markup]))
    lines = stream.getvalue().splitlines()
    assert [line.split() for line in lines if "2.57 here" in line] == [
        ["ray", "fail", "2.57", "here", "take", "one"]
    ]
    assert any("2.58 there" in line for line in lines)
    assert "[red]not markup[/red]" in stream.getvalue()
    assert last_line([FINE, WRONG, markup]) == "3 checks: 1 pass, 1 warn, 1 fail"
