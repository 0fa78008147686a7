"""What a check found: pass, warn or fail, in words, with what mends it; shown as a table or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.table import Table
from rich.text import Text

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


class Status(StrEnum):
    """How a check came out; a warning never makes an exit code."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    """Its name, which scripts may rely on."""
    status: Status
    found: tuple[str, ...]
    """What was seen; one line a problem if it did not pass."""
    fix: str = ""
    """What to do about it."""


def passed(check: str, found: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Status.PASS, (found,))


def warned(check: str, found: str, fix: str) -> Finding:
    """It may work, or it could not be checked."""
    return Finding(check, Status.WARN, (found,), fix)


def judged(check: str, problems: Sequence[str], fix: str, fine: str) -> Finding:
    """A failure that lists these problems, or `fine` if there are none."""
    return Finding(check, Status.FAIL, tuple(problems), fix) if problems else passed(check, fine)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything failed, else 0."""
    return int(any(finding.status is Status.FAIL for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """`{"status": worst, "checks": [{"check", "status", "found", "fix"}, ...]}`, indented."""
    statuses = {finding.status for finding in findings}
    worst = next((s for s in (Status.FAIL, Status.WARN) if s in statuses), Status.PASS)
    return json.dumps({"status": worst, "checks": [asdict(finding) for finding in findings]}, indent=2)


def as_table(findings: Sequence[Finding]) -> Table:
    """A row a check: its name, how it came out, what was seen, and what mends it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=3)
    table.add_column("what to do", overflow="fold", ratio=2)
    for finding in findings:
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(Text(finding.check), status, Text("\n".join(finding.found)), Text(finding.fix))
    return table


def last_line(findings: Sequence[Finding]) -> str:
    """How many passed, warned and failed."""
    counts = {status: sum(f.status is status for f in findings) for status in Status}
    return f"{len(findings)} checks: " + ", ".join(f"{counts[status]} {status}" for status in Status)
