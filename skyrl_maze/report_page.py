"""The page itself: one HTML file that asks for nothing from anywhere and runs no script but its own.

The files of `page/` are put together by jinja2, which escapes all but style, script and data. The data are
JSON that holds no `<`, `>` or `&`; the script writes what it reads there as text. The page's policy allows
exactly the script and the style whose hashes it names, and no way from text to markup or script.
"""

import base64
import hashlib
import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import jinja2

from skyrl_maze.dataset import write_whole
from skyrl_maze.errors import ReportError

# In the order in which they are read; together they are one script.
SCRIPTS = ("dom.js", "model.js", "maze.js", "curve.js", "grid.js", "replay.js", "main.js")
GENERATOR = "skyrl-maze report"
_FILES = importlib.resources.files("skyrl_maze") / "page"
_HEAD_BYTES = 4096
# The end of a script element, of a comment or of a line in a script; and halves of pairs, which UTF-8 lacks.
_UNSAFE = re.compile("[<>&\\u2028\\u2029\\ud800-\\udfff]")


def render_page(data: dict[str, Any]) -> str:
    """The page of `report.gather`'s data; the same data give the same page.

    Raises:
        ValueError: the data hold a number that is not finite.
    """
    style = _file("report.css")
    script = '(() => {\n"use strict";\n' + "\n".join(map(_file, SCRIPTS)) + "})();\n"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_file("report.html")).render(
        title=" and ".join(run["name"] for run in data["runs"]),
        generator=GENERATOR,
        policy=_policy(script, style),
        style=style,
        script=script,
        data=embedded_json(data),
    )


def embedded_json(data: Any) -> str:
    """JSON for a script element: no text in it can end the element or be taken for markup.

    See "Restrictions for contents of script elements" in the HTML standard.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_page(path: Path, page: str, force: bool = False) -> None:
    """Write the page whole or not at all; an older page is replaced.

    Raises:
        ReportError: something else lies there and `force` is not given, or it cannot be written.
    """
    if path.exists() and not (force and path.is_file()) and not _is_page(path):
        hint = "or --force to overwrite it" if path.is_file() else "such as report.html"
        raise ReportError(f"cannot write the page {path}: another file lies there; give another name, {hint}")
    try:
        write_whole(path, lambda file: file.write(page.encode()))
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(f"cannot write the page {path}: {reason}; give another place") from error


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(_HEAD_BYTES)


def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """The Content-Security-Policy, https://www.w3.org/TR/CSP3/."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "require-trusted-types-for 'script'; trusted-types 'none'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
