"""The documentation as a site: built without a network, and whole without one."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# What a browser loads by itself, by element and attribute; `a href` is only followed by people.
LOADED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
}
# Any attempt to reach another machine ends the build.
OFFLINE = """
import sys

def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise ConnectionError(f"the build asked for {args[1:]}")

sys.addaudithook(refuse)
from mkdocs.__main__ import cli

cli()
"""


class Addresses(HTMLParser):
    """What a page loads, and where its links lead."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in LOADED and value:
                self.loads.add(value)
            if (tag, name) == ("a", "href") and value:
                self.links.add(value)
            if name == "id" and value:
                self.ids.add(value)
            if name in ("srcset", "poster") and value:
                self.loads.add(value)


def built(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", OFFLINE, "build", "--strict", *arguments]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built("--site-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def html(site: Path) -> dict[Path, Addresses]:
    return {path: Addresses(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def strangers(addresses: set[str]) -> list[str]:
    """Those that are not on this site."""
    return sorted(a for a in addresses if urlsplit(a).netloc or urlsplit(a).scheme not in ("", "data"))


@pytest.mark.slow
def test_every_page_is_built(html: dict[Path, Addresses]) -> None:
    assert {path.stem for path in html} == {"404", *(page.stem for page in PAGES)}


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path, html: dict[Path, Addresses]) -> None:
    assert {path.name: found for path, page in html.items() if (found := strangers(page.loads))} == {}
    # The theme's script would fetch Mermaid from a CDN for such a figure.
    assert [path.name for path in html if 'class="mermaid"' in path.read_text(encoding="utf-8")] == []
    sheets = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}
    assert sheets
    loads = {
        path.name: set(re.findall(r"""(?:url\(|@import)\s*["']?([^"')]+)""", s)) for path, s in sheets.items()
    }
    assert {name: found for name, addresses in loads.items() if (found := strangers(addresses))} == {}


@pytest.mark.slow
def test_what_pages_load_is_there(site: Path, html: dict[Path, Addresses]) -> None:
    for path, page in html.items():
        base = site if path.name == "404.html" else path.parent
        for address in page.loads:
            if not address.startswith("data:"):
                assert (base / unquote(urlsplit(address).path).lstrip("/")).is_file(), (path.name, address)


@pytest.mark.slow
def test_links_lead_to_pages_of_this_site_or_to_https(site: Path, html: dict[Path, Addresses]) -> None:
    wrong = []
    for path, page in html.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme == "https" and "." in parts.netloc:
                continue
            base = site if path.name == "404.html" else path.parent
            target = (base / unquote(parts.path).lstrip("/")) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = parts.scheme == parts.netloc == "" and target.is_file()
            if not known or (parts.fragment and unquote(parts.fragment) not in html[target.resolve()].ids):
                wrong.append(f"{path.name}: {link}")
    assert wrong == []


def test_the_parser_finds_what_a_page_loads() -> None:
    page = Addresses('<script src="https://a.example/x.js"></script><img src="m.gif"><a href="//b.example">')
    assert strangers(page.loads) == ["https://a.example/x.js"]
    assert strangers(page.links) == ["//b.example"]


@pytest.mark.slow
def test_the_build_refuses_a_page_with_a_dead_link_and_a_network(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](nowhere.md)\n")
    hook = "import socket\n\n\ndef on_config(config):\n    socket.create_connection(('203.0.113.1', 443))\n"
    (tmp_path / "hook.py").write_text(hook)
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    dead = built("--config-file", str(tmp_path / "mkdocs.yml"))
    assert dead.returncode != 0
    assert "nowhere.md" in dead.stderr
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nhooks: [hook.py]\n")
    (tmp_path / "docs/index.md").write_text("# X\n")
    asked = built("--config-file", str(tmp_path / "mkdocs.yml"))
    assert asked.returncode != 0
    assert "the build asked for" in asked.stderr


def test_every_page_stands_in_the_navigation_once() -> None:
    def pages(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        inside = nav.values() if isinstance(nav, dict) else nav
        return [page for entry in inside for page in pages(entry)]  # type: ignore[attr-defined]

    nav = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(nav) == [page.name for page in PAGES]
