"""docs/troubleshooting.md: every text that it quotes is in the source, every error of the source on it."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/troubleshooting.md"
SOURCES = [
    path
    for folder in ("skyrl_maze", "entrypoints", "recipes", "hyperpod")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), *sorted((ROOT / "hyperpod").glob("*.sh"))]
FIRST_CELL = "it says"  # heads the tables of quotes
GAP = "…"  # stands for whatever a message fills in
PLACEHOLDER = "\0"
SHORTEST = 16  # literal characters that make a line of problems one that a user can look for


def quotes(markdown: str) -> list[str]:
    """The code spans in the first cells of the tables that quote."""
    found, cell, quoting = [], -1, False
    for token in MarkdownIt().enable("table").parse(markdown):
        if token.type == "tr_open":
            cell = -1
        elif token.type in ("td_open", "th_open"):
            cell += 1
        elif token.type == "table_close":
            quoting = False
        elif token.type == "inline" and cell == 0:
            quoting = quoting or token.content == FIRST_CELL
            found += [c.content for c in token.children or [] if quoting and c.type == "code_inline"]
    return found


@functools.cache
def pattern(quote: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, quote.split(GAP))), re.DOTALL)


def template(node: ast.AST) -> str | None:
    """The literal text of a string or an f-string, with a mark for each thing that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or PLACEHOLDER for part in node.values)
    return None


def templates(node: ast.AST) -> Iterator[str]:
    """The whole strings below a node, docstrings and the parts of an f-string aside."""
    if (text := template(node)) is not None:
        yield text
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        for child in ast.iter_child_nodes(node):
            yield from templates(child)


def shell_text(path: Path) -> str:
    """A script with its continued strings as one, and a mark for each variable."""
    joined = re.sub(r'"\s*\\\n\s*"', " ", path.read_text(encoding="utf-8"))
    return re.sub(r"\$(?:\w+|\{[^}]*\})", PLACEHOLDER, joined)


@dataclass(frozen=True)
class Said:
    """What one place in the source may say."""

    place: str
    texts: tuple[str, ...]


def error_classes(trees: list[ast.Module]) -> set[str]:
    """Names of the base error and of every class below it."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known = {"SkyRLMazeError"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return known


def raised(tree: ast.Module, place: str, classes: set[str]) -> Iterator[Said]:
    """What is raised with an error of this package; a name is looked up in the function around it."""
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
        names = {
            ast.unparse(target): node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
        }
        for node in ast.walk(function):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            kind = ast.unparse(node.exc.func).removesuffix(".from_problems")
            if kind not in classes and not kind.endswith(("cls", "kind", "_refused", "_refusal", "_exists")):
                continue
            used = {n.id for n in ast.walk(node.exc) if isinstance(n, ast.Name)} & names.keys()
            texts = [*templates(node.exc), *(text for name in used for text in templates(names[name]))]
            if any(len(text.replace(PLACEHOLDER, "")) >= SHORTEST for text in texts):
                yield Said(f"{place}:{node.lineno}", tuple(texts))


def listed(tree: ast.Module, place: str) -> Iterator[Said]:
    """The lines of functions that collect problems."""
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        if function.name.rstrip("s").endswith(("problem", "impossible")):
            for statement in function.body[ast.get_docstring(function) is not None :]:
                for text in templates(statement):
                    if len(text.replace(PLACEHOLDER, "")) >= SHORTEST and " " in text:
                        yield Said(f"{place}:{statement.lineno}", (text,))


TREES = {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
CLASSES = error_classes(list(TREES.values()))
TEXTS = [text for tree in TREES.values() for text in templates(tree)] + [shell_text(path) for path in SCRIPTS]
SAID = [
    said
    for path, tree in TREES.items()
    for said in (
        *raised(tree, str(path), CLASSES),
        # The doctor shows what a manifest lacks with its fix beside it.
        *([] if path.name.startswith("manifest_") else listed(tree, str(path))),
    )
]
QUOTES = quotes(PAGE.read_text(encoding="utf-8"))


def quoted(said: Said, known: list[str]) -> bool:
    return any(pattern(quote).search(text) for quote in known for text in said.texts)


def test_what_is_quoted_is_said() -> None:
    assert QUOTES
    unknown = [quote for quote in QUOTES if not any(pattern(quote).search(text) for text in TEXTS)]
    assert not unknown, f"no message of the source reads so: {unknown}"


def test_what_is_said_is_quoted() -> None:
    missing = [f"{said.place}: {' / '.join(said.texts)}" for said in SAID if not quoted(said, QUOTES)]
    shown = "\n".join(missing).replace(PLACEHOLDER, GAP)
    assert not missing, f"give each a row in docs/troubleshooting.md:\n{shown}"


@pytest.mark.parametrize("name", sorted(name for name in CLASSES if not name.startswith("_")))
def test_every_error_class_is_explained(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_no_quote_is_there_twice_or_too_short_to_look_for() -> None:
    assert sorted(QUOTES) == sorted(set(QUOTES))
    assert [quote for quote in QUOTES if len(quote.replace(GAP, "").strip()) < 8] == []


def test_messages_and_quotes_are_found() -> None:
    code = """
class MazeError(SkyRLMazeError): ...
def f(x):
    '''Docstring of some length.'''
    title = f"{x} cannot be walked by anyone"
    raise MazeError(f"{title}: {x}")
def size_problems(x):
    return [f"size={x}: must be an odd number"]
"""
    tree = ast.parse(code)
    classes = error_classes([tree])
    assert classes == {"SkyRLMazeError", "MazeError"}
    found = [*raised(tree, "m.py", classes), *listed(tree, "m.py")]
    assert [said.place for said in found] == ["m.py:6", "m.py:8"]
    cells = ("| it says | do |", "|---|---|", "| `… cannot be walked` | walk |", "", "| `an odd` | |")
    page = "\n".join(cells)
    assert quotes(page) == ["… cannot be walked"]
    assert [quoted(said, quotes(page)) for said in found] == [True, False]
    assert not quoted(found[1], ["size=3: must be"])
