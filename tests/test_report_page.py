"""The page as text: what is escaped, what its policy allows, and when a file is replaced by it.

What it does in a browser is in test_report_browser.py.
"""

import base64
import hashlib
import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import report_folders as folders
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze import report_page
from skyrl_maze.errors import ReportError
from skyrl_maze.maze import generate_maze
from skyrl_maze.report import gather
from skyrl_maze.report_page import embedded_json, render_page, write_page

PAGE_FILES = Path(report_page.__file__).parent / "page"
MAZES = [generate_maze(5, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results") / "oracle"
    folders.write(folder, folders.play_all(MAZES, folders.oracle, 0), "oracle")
    return gather([folder])


class Elements(html.parser.HTMLParser):
    """Every element with its attributes and its own text, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found[-1][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.found if name == tag]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


# An HTML parser itself changes carriage returns and NUL.
fragments = st.sampled_from(
    ["</script>", "<script>", "</title>", "</style>", "<!--", "-->", "<", ">", "&lt;", '"', "'", "\u2028"]
) | st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]))


@given(json_values)
def test_embedded_json_is_the_same_data_without_markup(value: Any) -> None:
    text = embedded_json(value)
    assert json.loads(text) == value
    assert re.search("[<>&\u2028\u2029]", text) is None


@given(st.text(st.characters(codec=None)))
def test_halves_of_surrogate_pairs_are_escaped(text: str) -> None:
    embedded_json(text).encode("utf-8")
    assert json.loads(embedded_json([text, "\ud800"])) == [text, "\ud800"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_json_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded_json([value])


@settings(max_examples=50, deadline=None)
@given(st.lists(fragments, max_size=6).map("".join))
def test_no_text_changes_the_elements_of_the_page(data: dict[str, Any], text: str) -> None:
    (run,) = data["runs"]
    other = {**data, "texts": [text] * len(data["texts"]), "runs": [{**run, "name": text, "notes": [text]}]}
    plain, odd = Elements(render_page(data)), Elements(render_page(other))
    assert [tag for tag, _, _ in odd.found] == [tag for tag, _, _ in plain.found]
    assert odd.texts("title")[0].strip() == text.strip()
    assert json.loads(odd.texts("script")[0]) == json.loads(json.dumps(other))


def test_the_policy_allows_the_one_script_and_the_one_style(data: dict[str, Any]) -> None:
    found = Elements(render_page(data))
    (policy,) = [
        str(attributes["content"])
        for tag, attributes, _ in found.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {
        *("default-src", "script-src", "style-src", "require-trusted-types-for", "trusted-types"),
        *("base-uri", "form-action"),
    }
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    stored, script = found.texts("script")
    assert json.loads(stored)["runs"][0]["name"] == "oracle"
    assert rules["script-src"] == hashed(script)
    assert rules["style-src"] == hashed(found.texts("style")[0])


def test_the_page_names_no_address(data: dict[str, Any]) -> None:
    page = render_page(data)
    assert set(re.findall(r"\w+://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    attributes = {name for _, attrs, _ in Elements(page).found for name in attrs}
    assert attributes.isdisjoint({"src", "srcset", "action", "style"})
    assert not [name for name in attributes if name.startswith("on")]


def test_the_script_makes_no_markup_of_text() -> None:
    for name in report_page.SCRIPTS:
        script = (PAGE_FILES / name).read_text(encoding="utf-8")
        ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|\.href|\.src\b"
        assert re.findall(ways, script) == [], name


def test_every_file_of_the_page_is_in_it(data: dict[str, Any]) -> None:
    used = {"report.html", "report.css", *report_page.SCRIPTS}
    assert {path.name for path in PAGE_FILES.iterdir()} == used
    page = render_page(data)
    for name in used - {"report.html"}:
        assert (PAGE_FILES / name).read_text(encoding="utf-8") in page


def test_the_same_data_make_the_same_page(data: dict[str, Any]) -> None:
    assert render_page(data) == render_page(json.loads(json.dumps(data)))


# --- Writing it ---


def test_an_older_page_is_replaced_and_nothing_else(data: dict[str, Any], tmp_path: Path) -> None:
    page, path = render_page(data), tmp_path / "report.html"
    write_page(path, page)
    write_page(path, page + "<!-- newer -->")
    assert path.read_text(encoding="utf-8").endswith("<!-- newer -->")
    path.write_text("notes of mine")
    with pytest.raises(ReportError, match=r"another file lies there; give another name, or --force"):
        write_page(path, page)
    assert path.read_text() == "notes of mine"
    write_page(path, page, force=True)
    assert path.read_text(encoding="utf-8") == page
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_is_never_replaced(tmp_path: Path, force: bool) -> None:
    with pytest.raises(ReportError, match=r"give another name, such as report\.html"):
        write_page(tmp_path, "page", force)


def test_a_page_that_cannot_be_written_leaves_the_older_one(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_page(path, render_page(data))
    older = path.read_bytes()
    monkeypatch.setattr(report_page, "write_whole", _full_disk)
    with pytest.raises(ReportError, match="No space left on device; give another place"):
        write_page(path, "newer")
    assert path.read_bytes() == older
    monkeypatch.undo()
    with pytest.raises(ReportError, match="No such file or directory; give another place"):
        write_page(tmp_path / "none" / "report.html", "page")


def _full_disk(_path: Path, _write: Any) -> None:
    raise OSError(28, "No space left on device")


# --- Colours ---

# What is written on what: text and the marks that tell outcomes apart, on each ground they lie on.
OUTCOMES = ("goal", "stopped_early", "out_of_turns", "error", "running")
WORDS = ("ink", "quiet", "accent", "run-A", "run-B", *OUTCOMES)
PAIRS = [
    *[(word, ground) for word in WORDS for ground in ("ground", "surface")],
    *[("on-accent", "accent"), ("ink", "notes"), ("published", "ground"), ("edge", "surface")],
]


def palette(dark: bool) -> dict[str, str]:
    css = (PAGE_FILES / "report.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", css)
    return {name: (night if dark else day) for name, day, night in found}


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("word", "ground"), PAIRS)
def test_words_stand_out_from_their_ground(word: str, ground: str, dark: bool) -> None:
    colours = palette(dark)
    # 4.5 for text, 3 for the outline of a control: WCAG 2.2, 1.4.3 and 1.4.11.
    assert contrast(colours[word], colours[ground]) >= (3 if word == "edge" else 4.5)
