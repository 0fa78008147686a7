"""The page in a real Chromium: what it shows, what the keyboard does, and that no text of a model can run.

Pictures go to the folder that SKYRL_MAZE_ARTIFACTS names, or else to pytest's own.
"""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
import report_folders as folders
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from skyrl_maze.dataset import load_set
from skyrl_maze.maze import generate_maze
from skyrl_maze.records import EpisodeRecord
from skyrl_maze.report import gather
from skyrl_maze.report_page import embedded_json, render_page
from skyrl_maze.results import Result, read_result, step_folder

pytestmark = pytest.mark.slow
COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAX_NODES = 4000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, COMMANDS)), None)
    if path is None:
        pytest.fail("no Chromium on PATH: `make browser` installs it (as root), or see that of your system")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Tab:
    """A page in a context of its own that remembers what it asked for and what it complained about."""

    def __init__(self, browser: Browser, path: Path, **context: Any) -> None:
        self.page = browser.new_context(**context).new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.address = path.as_uri()

    def open(self) -> Page:
        self.page.goto(self.address)
        return self.page


Opener = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens a file; at the end of the test no tab may have complained or asked for anything else."""
    tabs: list[Tab] = []

    def opener(path: Path, clock: bool = False, **context: Any) -> Page:
        tabs.append(Tab(browser, path, **{"viewport": {"width": 1280, "height": 900}, **context}))
        if clock:
            tabs[-1].page.clock.install()
        return tabs[-1].open()

    yield opener
    for tab in tabs:
        assert tab.complaints == []
        assert tab.requests == [tab.address]
        tab.page.context.close()


def page_of(target: Path, *sources: Path) -> Path:
    target.write_text(render_page(gather(sources)), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the same mazes, a short run, two baselines, and a page of each."""
    root = tmp_path_factory.mktemp("pages")
    mazes = load_set("visgym-easy-64")
    steps = range(0, 161, 40)
    folders.write_run(root / "simulated", mazes, {step: 0.72 + 0.0011 * step for step in steps})
    folders.write_run(root / "other", mazes[:60], {step: 0.7 + 0.0015 * step for step in steps}, seed=1000)
    folders.write_run(root / "maze-cpu", [generate_maze(5, seed) for seed in range(8)], {0: 0.3, 6: 0.5})
    mixed = [generate_maze(size, seed) for seed, size in enumerate((5, 7, 9, 7, 11, 5))]
    folders.write(root / "mixed", folders.play_all(mixed, folders.wanderer(0.5), 3, error_at=4), "wanderer")
    page_of(root / "one.html", root / "simulated")
    page_of(root / "two.html", root / "simulated", root / "other")
    page_of(root / "short.html", root / "maze-cpu")
    page_of(root / "mixed.html", root / "mixed")
    return root


@pytest.fixture
def last(place: Path) -> Result:
    """The last evaluation of the run on one.html."""
    return read_result(step_folder(place / "simulated", 160))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("SKYRL_MAZE_ARTIFACTS")
    path = Path(folder) if folder else tmp_path_factory.mktemp("pictures")
    path.mkdir(parents=True, exist_ok=True)
    return path


def tiles(page: Page) -> Locator:
    return page.locator("#grids .tile")


def percent(share: float) -> str:
    """Two digits, a half rounded up as JavaScript does."""
    return f"{Decimal(100 * share).quantize(Decimal('0.01'), ROUND_HALF_UP)} %"


def said(page: Page) -> str:
    """What a screen reader was told last."""
    return page.locator("#said").text_content() or ""


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.className"))


def open_tile(page: Page, number: int) -> None:
    tiles(page).nth(number).click()
    expect(page.locator("#replay")).to_be_visible()


# --- What it shows ---


def test_the_figures_are_those_of_the_files(opened: Opener, place: Path, last: Result) -> None:
    page = opened(place / "one.html")
    solved = sum(episode.success for episode in last.episodes)
    figures = page.locator("#runs .figures")
    expect(page.locator("#runs")).not_to_contain_text("independent")
    expect(figures).to_contain_text(percent(last.summary.solve_rate))
    expect(figures).to_contain_text(f"{solved} of 64, 95 %: {100 * last.summary.solve_rate_low:.1f} to")
    expect(figures).to_contain_text(f"{last.summary.spl:.3f}")
    expect(page.locator("#marks")).to_contain_text(f"solved {solved}")
    assert tiles(page).count() == 64


def test_the_curve_is_there_as_a_picture_and_as_a_table(opened: Opener, place: Path) -> None:
    page = opened(place / "one.html")
    assert page.locator("#chart .run-A .dot").count() == 5
    assert page.locator("#chart .run-A .band").count() == 1
    assert page.locator("#chart .published .dot").count() == 3
    page.get_by_text("The same as a table").click()
    rows = page.locator("#curve-table tbody tr").all_text_contents()
    assert len(rows) == 5 + 3
    for step in range(0, 161, 40):
        summary = read_result(step_folder(place / "simulated", step)).summary
        low, high = 100 * summary.solve_rate_low, 100 * summary.solve_rate_high
        assert f"simulated{step}{percent(summary.solve_rate)}{low:.1f} to {high:.1f} %64" in rows
    assert [
        re.sub(r"^published run: another model and other mazes.*?step 100", "", row) for row in rows[5:]
    ] == [*("043.75 %none given64", "10075.00 %none given64", "16096.88 %none given64")]


def test_another_evaluation_is_chosen_in_the_list_or_on_the_curve(opened: Opener, place: Path) -> None:
    page = opened(place / "one.html")
    first = read_result(step_folder(place / "simulated", 0))
    page.get_by_role("combobox", name="shown").select_option(
        label=f"step 0, {percent(first.summary.solve_rate)}"
    )
    expect(page.locator("#runs .conditions")).to_contain_text("adapter 0.0")
    expect(page.locator("#marks")).to_contain_text(f"solved {sum(e.success for e in first.episodes)}")
    expect(page.locator("#marks")).to_contain_text("error 1")
    page.locator("#chart .run-A .dot").nth(3).click()
    expect(page.locator("#runs .conditions")).to_contain_text("adapter 120.0")


def test_a_short_run_fills_its_curve_until_one_asks_for_the_published_one(
    opened: Opener, place: Path
) -> None:
    page = opened(place / "short.html")
    ticks = page.locator("#chart .axes")
    expect(ticks).not_to_contain_text("160")
    page.get_by_label("whole published run").check()
    expect(ticks).to_contain_text("160")
    expect(page.locator("#curve-legend")).to_contain_text("another model and other mazes")


def test_samples_of_one_maze_are_told_apart(opened: Opener, tmp_path: Path) -> None:
    maze, rng = generate_maze(5, 1), folders.random.Random(0)
    episodes = [folders.play(maze, folders.wanderer(0.5), rng, 0, sample) for sample in range(3)]
    folders.write(tmp_path / "thrice", episodes, "wanderer")
    page = opened(page_of(tmp_path / "thrice.html", tmp_path / "thrice"))
    expect(page.locator("#runs")).to_contain_text("The interval takes all episodes as independent")
    names = [str(tile.get_attribute("aria-label")) for tile in tiles(page).all()]
    assert [name.split(", 5 by 5")[0] for name in names] == ["Maze 1", "Maze 1, sample 2", "Maze 1, sample 3"]
    open_tile(page, 2)
    expect(page.locator("#replay-title")).to_contain_text("sample 3")
    page.keyboard.press("End")
    assert page.locator(".reply").text_content() == episodes[2].turns[-1].text


def test_rates_by_size_and_length_are_listed(opened: Opener, place: Path) -> None:
    page = opened(place / "mixed.html")
    page.get_by_text("By size and by shortest path").click()
    summary = read_result(place / "mixed").summary
    rows = page.locator("#groups tbody tr").all_text_contents()
    assert len(rows) == len(summary.by_size) + len(summary.by_shortest_path)
    for group in summary.by_size:
        shown = f"mixed{group.size}\u00d7{group.size}{group.episodes}{percent(group.solve_rate)}"
        assert any(row.startswith(shown) for row in rows), shown


# --- Filters ---

FITS: dict[str, Callable[[EpisodeRecord], bool]] = {
    "all": lambda episode: True,
    "failed": lambda episode: not episode.success,
    "solved": lambda episode: episode.success,
    "failures": lambda episode: episode.parse_failures > 0,
    "bumps": lambda episode: episode.wall_bumps > 0,
}


@pytest.mark.parametrize("show", FITS)
def test_a_filter_leaves_the_episodes_that_fit(opened: Opener, place: Path, last: Result, show: str) -> None:
    page = opened(place / "one.html")
    page.locator("[name=show]").select_option(show)
    wanted = [episode for episode in last.episodes if FITS[show](episode)]
    assert wanted
    expect(page.locator("#count")).to_have_text(f"{len(wanted)} of 64 episodes")
    names = [str(tile.get_attribute("aria-label")) for tile in tiles(page).all()]
    assert [int(re.findall(r"\d+", name)[0]) for name in names] == [episode.index + 1 for episode in wanted]


@pytest.mark.parametrize(
    ("order", "amount"),
    [
        ("longest", lambda episode: len(episode.turns)),
        ("failures", lambda episode: episode.parse_failures),
        ("bumps", lambda episode: episode.wall_bumps),
    ],
)
def test_an_order_puts_the_most_first(opened: Opener, place: Path, order: str, amount: Any) -> None:
    page = opened(place / "mixed.html")
    page.locator("[name=order]").select_option(order)
    episodes = sorted(read_result(place / "mixed").episodes, key=amount, reverse=True)
    names = [str(tile.get_attribute("aria-label")) for tile in tiles(page).all()]
    assert [int(re.findall(r"\d+", name)[0]) for name in names] == [episode.index + 1 for episode in episodes]


def test_mazes_are_found_by_size_and_by_key(opened: Opener, place: Path) -> None:
    page = opened(place / "mixed.html")
    page.locator("[name=size]").select_option(label="7\u00d77")
    expect(page.locator("#count")).to_have_text("2 of 6 episodes")
    page.locator("[name=size]").select_option(label="any")
    key = read_result(place / "mixed").episodes[2].maze_key
    page.get_by_label("Maze key").fill(f" {key[:9].upper()}")
    expect(page.locator("#count")).to_have_text("1 of 6 episodes")
    open_tile(page, 0)
    expect(page.locator("#replay-title")).to_contain_text(key)
    page.keyboard.press("Escape")
    page.get_by_label("Maze key").fill("zz")
    expect(page.locator("#grids")).to_have_text(re.compile("No episode fits"))


# --- The replay ---


def test_every_turn_of_every_episode_is_replayed(opened: Opener, place: Path) -> None:
    page = opened(place / "mixed.html")
    for number, episode in enumerate(read_result(place / "mixed").episodes):
        open_tile(page, number)
        expect(page.locator(".reply")).to_have_text("No turn was taken yet.")
        for turn in episode.turns:
            page.keyboard.press("ArrowRight")
            assert page.locator(".reply").text_content() == turn.text
            told = page.locator(".facts").text_content() or ""
            assert f"row {turn.position[0]}, column {turn.position[1]}" in told
            assert ("bumped into a wall" in told) == turn.bumped
            assert ("not understood: no action" in told) == (turn.parse_failure is not None)
            assert turn.action is None or turn.action in told
            agent = page.locator(".stage .agent")
            assert (agent.get_attribute("cy"), agent.get_attribute("cx")) == (
                *(str(turn.position[0] + 0.5), str(turn.position[1] + 0.5)),
            )
        stop_reason = episode.stop_reason.replace("_", " ")
        assert f"end: {stop_reason}" in (page.locator(".facts").text_content() or "")
        ending = page.locator(".ending-words").text_content() or ""
        assert f"{episode.moves} move" in ending
        assert f"shortest {episode.shortest_path}" in ending
        assert (episode.error or "") in ending
        page.keyboard.press("Escape")
        page.wait_for_function(f"document.activeElement.dataset.place === '{number}'")


def test_the_ways_and_signs_of_an_episode_are_drawn(opened: Opener, place: Path) -> None:
    page = opened(place / "mixed.html")
    episodes = read_result(place / "mixed").episodes
    number = max(range(6), key=lambda i: (episodes[i].wall_bumps > 0, episodes[i].parse_failures))
    episode = episodes[number]
    assert episode.wall_bumps
    assert episode.parse_failures
    open_tile(page, number)
    assert page.locator(".stage .bump, .stage .failure").count() == 0
    page.keyboard.press("End")
    hits = {(turn.position, turn.action) for turn in episode.turns if turn.bumped}
    puzzled = {turn.position for turn in episode.turns if turn.parse_failure}
    assert page.locator(".stage .bump").count() == len(hits)
    assert page.locator(".stage .failure").count() == len(puzzled)
    shortest = page.locator(".stage .shortest").get_attribute("d") or ""
    assert len(re.findall("[ML]", shortest)) == episode.shortest_path + 1
    way = page.locator(".stage .way").get_attribute("d") or ""
    assert len(re.findall("[ML]", way)) == len(episode.turns) + 1


def test_it_plays_and_pauses_and_ends(opened: Opener, place: Path, last: Result) -> None:
    page = opened(place / "one.html", clock=True)
    number = next(e.index for e in last.episodes if len(e.turns) > 8)
    turns = len(last.episodes[number].turns)
    open_tile(page, number)
    play, name = page.locator("#play"), page.locator("#turn-name")
    page.keyboard.press("Space")
    expect(play).to_have_text("Pause")
    silence = said(page)
    page.clock.run_for(1600)
    expect(name).to_have_text(f"turn 3 of {turns}")
    assert said(page) == silence, "nothing is read out while it plays"
    page.keyboard.press("Space")
    expect(play).to_have_text("Play")
    assert said(page).startswith(f"Turn 3 of {turns}: ")
    page.clock.run_for(5000)
    expect(name).to_have_text(f"turn 3 of {turns}")
    page.get_by_label("Speed").select_option("6 turns/s")
    play.click()
    page.clock.run_for(20000)
    expect(name).to_have_text(f"turn {turns} of {turns}")
    expect(play).to_have_text("Play")
    assert said(page).startswith(f"Turn {turns} of {turns}: ")
    play.click()
    expect(name).to_have_text("start")


def test_the_slider_chooses_a_turn(opened: Opener, place: Path) -> None:
    page = opened(place / "one.html")
    open_tile(page, 0)
    page.get_by_role("slider", name="Turn").fill("4")
    expect(page.locator("#turn-name")).to_have_text(re.compile("turn 4 of "))
    assert page.locator("#turn").get_attribute("aria-valuetext") == page.locator("#turn-name").text_content()
    page.locator("#turn").press("Home")
    expect(page.locator("#turn-name")).to_have_text("start")


# --- The keyboard alone, and what a screen reader finds ---


def press_until(page: Page, key: str, there: Callable[[], bool], most: int = 40) -> None:
    for _ in range(most):
        if there():
            return
        page.keyboard.press(key)
    raise AssertionError(f"{most} times {key} did not lead there; focus is on {focused(page)}")


def test_the_keyboard_leads_to_the_last_turn_of_a_failed_episode(
    opened: Opener, place: Path, last: Result
) -> None:
    page = opened(place / "one.html")
    failed = [episode for episode in last.episodes if not episode.success]
    press_until(page, "Tab", lambda: page.evaluate("document.activeElement.name") == "show")
    page.keyboard.type("failed")
    expect(page.locator("#count")).to_have_text(f"{len(failed)} of 64 episodes")
    press_until(page, "Tab", lambda: focused(page).startswith("tile"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert focused(page) == "play"
    page.keyboard.press("End")
    wanted = failed[1]
    assert said(page).startswith(f"Turn {len(wanted.turns)} of {len(wanted.turns)}: ")
    assert f"end: {wanted.stop_reason.replace('_', ' ')}" in said(page)
    assert page.locator(".reply").text_content() == wanted.turns[-1].text
    page.keyboard.press("PageDown")
    expect(page.locator("#replay-title")).to_contain_text(failed[2].maze_key)
    page.keyboard.press("Escape")
    expect(page.locator("#replay")).not_to_be_visible()
    page.wait_for_function("document.activeElement.dataset.place === '2'")


def test_arrows_walk_through_the_grid_and_tab_leaves_it(opened: Opener, place: Path) -> None:
    page = opened(place / "one.html")
    tiles(page).first.focus()
    columns = page.evaluate(
        "(tops => tops.filter(top => top === tops[0]).length)"
        "([...document.querySelectorAll('.tile')].map(tile => tile.offsetTop))"
    )
    assert columns > 1
    for key, place_there in [
        ("ArrowDown", columns),
        ("ArrowRight", columns + 1),
        ("ArrowUp", 1),
        ("End", 63),
        ("Home", 0),
    ]:
        page.keyboard.press(key)
        assert page.evaluate("Number(document.activeElement.dataset.place)") == place_there, key
    page.keyboard.press("Tab")
    assert not focused(page).startswith("tile")


NAMELESS = """
(() => {
  const labelled = (node) => node.getAttribute("aria-label")
    || document.getElementById(node.getAttribute("aria-labelledby"))?.textContent.trim()
    || [...(node.labels ?? [])].some((label) => label.textContent.trim())
    || (/BUTTON|SUMMARY/.test(node.tagName) && node.textContent.trim());
  const kinds = "button, select, input, summary, svg[role=img], dialog, section, nav, form";
  return [...document.querySelectorAll(kinds)].filter((node) => !labelled(node))
    .map((node) => node.outerHTML.slice(0, 120));
})()
"""


@pytest.mark.parametrize("name", ["one.html", "two.html"])
def test_everything_has_a_name_and_a_place(opened: Opener, place: Path, name: str) -> None:
    page = opened(place / name)
    assert page.evaluate(NAMELESS) == []
    open_tile(page, 0)
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate("document.documentElement.lang") == "en"
    for landmark in ("header", "main", "[role=search]", "[role=status]"):
        assert page.locator(landmark).count() >= 1, landmark
    assert page.locator("h1").count() == 1
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), levels
    identifiers = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(identifiers) == len(set(identifiers))


def test_a_nameless_button_would_be_found(opened: Opener, place: Path) -> None:
    page = opened(place / "one.html")
    page.evaluate("document.body.append(document.createElement('button'))")
    assert page.evaluate(NAMELESS) == ["<button></button>"]


def test_outcomes_differ_by_mark_and_word_as_well(opened: Opener, place: Path) -> None:
    page = opened(place / "mixed.html")
    looks = """(tile) => [
        tile.className, tile.querySelector(".mark path").getAttribute("d"), tile.ariaLabel.split(", ")[2]
    ].join("|")"""
    kinds = page.evaluate(f"[...document.querySelectorAll('.tile')].map({looks})")
    assert len(set(kinds)) > 2
    for part in range(3):
        assert len({kind.split("|")[part] for kind in kinds}) == len(set(kinds))


# --- Two runs ---


def test_two_runs_are_paired_by_maze(opened: Opener, place: Path, last: Result) -> None:
    page = opened(place / "two.html")
    other = read_result(step_folder(place / "other", 160))
    assert page.locator("#chart .run-A .dot").count() == page.locator("#chart .run-B .dot").count() == 5
    assert page.locator(".tiles").nth(0).locator(".tile").count() == 64
    assert page.locator(".tiles").nth(1).locator(".tile").count() == 60
    assert page.locator(".tiles").nth(1).locator(".missing").count() == 4
    page.locator("[name=show]").select_option("differ")
    differ = [
        (one, two)
        for one, two in zip(last.episodes, other.episodes, strict=False)
        if one.success != two.success
    ]
    assert differ
    expect(page.locator("#count")).to_have_text(f"{len(differ)} of 64 pairs")
    page.locator(".tiles").nth(1).locator(".tile").first.click()
    page.keyboard.press("End")
    replies = page.locator(".reply").all_text_contents()
    assert replies == [episode.turns[-1].text for episode in differ[0]]
    expect(page.locator("#replay-title")).to_contain_text(differ[0][0].maze_key)
    assert page.locator(".pane h3").all_text_contents() == ["A · simulated, step 160", "B · other, step 160"]


def test_a_maze_that_one_run_lacks_is_said_to_be_missing(opened: Opener, place: Path) -> None:
    page = opened(place / "two.html")
    page.locator(".tiles").nth(0).locator(".tile").nth(62).click()
    expect(page.locator(".pane").nth(1)).to_contain_text("This maze was not played here.")
    page.keyboard.press("End")
    assert said(page).startswith("Turn ")


def test_the_tile_of_the_same_maze_shows_itself(opened: Opener, place: Path) -> None:
    page = opened(place / "two.html")
    page.locator(".tiles").nth(0).locator(".tile").nth(7).focus()
    assert page.locator(".tile.partner").count() == 2
    assert page.evaluate("[...document.querySelectorAll('.tile.partner')].map(t => t.dataset.place)") == [
        "7",
        "7",
    ]


# --- Colours, motion, narrow windows ---


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_until_one_asks(opened: Opener, place: Path, scheme: Any) -> None:
    page = opened(place / "one.html", color_scheme=scheme)
    grounds = {"light": "rgb(247, 246, 243)", "dark": "rgb(20, 23, 26)"}
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == grounds[scheme]
    button = page.get_by_role("button", name="Dark colours")
    assert button.get_attribute("aria-pressed") == str(scheme == "dark").lower()
    button.click()
    assert page.evaluate(ground) == grounds["dark" if scheme == "light" else "light"]


@pytest.mark.parametrize(("motion", "moves"), [("no-preference", True), ("reduce", False)])
def test_nothing_moves_for_those_who_ask(opened: Opener, place: Path, motion: Any, moves: bool) -> None:
    page = opened(place / "one.html", reduced_motion=motion)
    open_tile(page, 0)
    page.keyboard.press("ArrowRight")
    duration = "agent => parseFloat(getComputedStyle(agent).transitionDuration)"
    agent = page.locator(".stage .agent")
    assert (agent.evaluate(duration) > 0) == moves
    page.keyboard.press("End")
    assert agent.evaluate(duration) == 0, "it would run through walls"


@pytest.mark.parametrize("name", ["one.html", "two.html"])
@pytest.mark.parametrize("width", [400, 768, 1280])
def test_no_window_is_too_narrow(opened: Opener, place: Path, name: str, width: int) -> None:
    page = opened(place / name, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    open_tile(page, 1)
    assert page.evaluate("document.getElementById('replay').scrollWidth") <= width
    expect(page.locator("#play")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize(
    ("picture", "name", "width", "scheme"),
    [
        ("light", "one.html", 1280, "light"),
        ("dark", "one.html", 1280, "dark"),
        ("two-runs", "two.html", 1280, "light"),
        ("narrow", "one.html", 400, "light"),
    ],
)
def test_pictures_are_kept(
    opened: Opener, place: Path, pictures: Path, picture: str, name: str, width: int, scheme: Any
) -> None:
    page = opened(place / name, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.screenshot(path=pictures / f"{picture}.png", full_page=True)
    page.locator("[name=show]").select_option("failed")
    open_tile(page, 0)
    page.keyboard.press("End")
    page.screenshot(path=pictures / f"{picture}-replay.png")
    for path in (pictures / f"{picture}.png", pictures / f"{picture}-replay.png"):
        assert path.stat().st_size > 10_000, "an empty window makes a smaller picture"


# --- Many episodes ---


def nodes(page: Page) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def test_a_thousand_episodes_make_no_more_of_a_page(opened: Opener, tmp_path: Path) -> None:
    mazes = [generate_maze(9, seed) for seed in range(1000)]
    folders.write(tmp_path / "many", folders.play_all(mazes, folders.wanderer(0.9), 1), "wanderer")
    page = opened(page_of(tmp_path / "many.html", tmp_path / "many"))
    assert tiles(page).count() == 200
    assert nodes(page) < MAX_NODES
    for _ in range(4):
        page.get_by_role("button", name="Later mazes").click()
        assert nodes(page) < MAX_NODES
    expect(page.locator("#page-range")).to_have_text("801 to 1000 of 1,000")
    expect(page.get_by_role("button", name="Later mazes")).to_be_disabled()
    open_tile(page, 0)
    page.keyboard.press("PageUp")
    page.keyboard.press("End")
    assert nodes(page) < MAX_NODES
    page.keyboard.press("Escape")
    expect(page.locator("#page-range")).to_have_text("601 to 800 of 1,000")
    page.wait_for_function("document.activeElement.dataset.place === '799'")
    page.locator("[name=order]").select_option("longest")
    expect(page.locator("#page-range")).to_have_text("1 to 200 of 1,000")


def test_forty_evaluations_make_no_more_of_a_page(opened: Opener, tmp_path: Path) -> None:
    folders.write_run(tmp_path / "long", load_set("visgym-easy-64"), dict.fromkeys(range(0, 400, 10), 0.9))
    page = opened(page_of(tmp_path / "long.html", tmp_path / "long"))
    assert page.locator("#chart .run-A .dot").count() == 40
    for step in (390, 0, 200):
        page.locator("#evaluation-0").select_option(str(step // 10))
        expect(page.locator("#runs .conditions")).to_contain_text(f"adapter {step}.0")
        assert tiles(page).count() == 64
        assert nodes(page) < MAX_NODES


# --- Text that wants to be more than text ---

RUN = "window.ran = (window.ran || 0) + 1"
ATTACKS = [
    f"</script><script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f"\"><svg onload='{RUN}'>",
    f"javascript:{RUN}",
    f"<!--<script>{RUN}</script>-->",
    f"</title><script>{RUN}</script>",
    f"</textarea></style><iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    "{{ 7 * 7 }}${7 * 7}<% 7 * 7 %>\u2028\u2029\x00\u202e &lt;b&gt; &amp;",
    f"' onfocus='{RUN}' autofocus x='",
]


@pytest.fixture
def attacked(tmp_path: Path) -> Path:
    """A run that is named, configured, played and broken by texts of ATTACKS."""
    everything = " ".join(ATTACKS)
    mazes = [generate_maze(7, seed) for seed in range(len(ATTACKS))]

    def attack(text: str) -> folders.Policy:
        return lambda episode, rng: (text, None)

    episodes = [
        folders.play(maze, attack(text), folders.random.Random(0), index, error=text if index % 2 else None)
        for index, (maze, text) in enumerate(zip(mazes, ATTACKS, strict=True))
    ]
    root = tmp_path / ATTACKS[1]
    more = {"endpoint": everything, "adapter": everything, "mazes": everything}
    folders.write(step_folder(root, 5), episodes, everything, 5, **more, grammar=everything, theme=everything)
    step_folder(root, 7).mkdir()  # is noted as unfinished, by its name
    (root / "metrics.jsonl").write_text(f'{{"step": 5, "eval/solve_rate": 0, "{RUN}": 1}}\n{everything!r}\n')
    return root


def look_everywhere(page: Page) -> None:
    """Everything that shows text is brought to show it."""
    for summary in page.locator("summary").all():
        summary.click()
    for number in range(tiles(page).count()):
        tiles(page).nth(number).click()
        page.keyboard.press("End")
        page.locator(".reply").first.click()
        page.keyboard.press("Escape")


def test_text_stays_text_wherever_it_comes_from(opened: Opener, attacked: Path, tmp_path: Path) -> None:
    page = opened(page_of(tmp_path / "attacked.html", attacked, attacked))
    look_everywhere(page)
    assert page.evaluate("window.ran") is None
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    assert page.locator("img, iframe, a:not(.skip), svg[onload], [onfocus], [onerror]").count() == 0
    assert ATTACKS[1] in page.title()
    for number, text in enumerate(ATTACKS):
        tiles(page).nth(number).click()
        page.keyboard.press("End")
        assert page.locator(".reply").first.text_content() == text
        page.keyboard.press("Escape")
    for text in ATTACKS[:7]:
        expect(page.locator("#runs .conditions").first).to_contain_text(text)
    expect(page.locator("#notes")).to_contain_text(ATTACKS[1])


def test_texts_that_the_reader_would_refuse_stay_text_as_well(
    opened: Opener, place: Path, tmp_path: Path
) -> None:
    data = gather([place / "mixed"])
    for maze in data["mazes"]:
        maze["key"] = ATTACKS[1]
    for number, episode in enumerate(data["runs"][0]["curve"][0]["evaluation"]["episodes"]):
        episode.update(success=False, stop_reason=ATTACKS[number % len(ATTACKS)])
        for turn in episode["turns"]:
            turn[1:4] = [ATTACKS[2], ATTACKS[0], 0]
    path = tmp_path / "forged.html"
    path.write_text(render_page(data), encoding="utf-8")
    page = opened(path)
    look_everywhere(page)
    assert page.evaluate("window.ran") is None
    tiles(page).first.click()
    page.keyboard.press("End")
    assert page.locator("#replay-title code").text_content() == ATTACKS[1]
    expect(page.locator(".facts")).to_contain_text(ATTACKS[0])


def test_without_escaping_and_policy_the_texts_would_run(
    browser: Browser, attacked: Path, tmp_path: Path
) -> None:
    """The attacks are real: the same page made without care runs them."""
    data = gather([attacked])
    page = render_page(data).replace(embedded_json(data), "".join(ATTACKS))
    path = tmp_path / "careless.html"
    path.write_text(re.sub("<meta http-equiv[^>]*>", "", page), encoding="utf-8")
    tab = Tab(browser, path)
    assert tab.open().evaluate("window.ran") >= 3
    tab.page.context.close()


def test_the_policy_alone_stops_them_too(browser: Browser, place: Path, tmp_path: Path) -> None:
    page = (place / "one.html").read_text(encoding="utf-8")
    path = tmp_path / "injected.html"
    path.write_text(page.replace("<main>", "<main>" + "".join(ATTACKS)), encoding="utf-8")
    tab = Tab(browser, path)
    opened = tab.open()
    assert opened.evaluate("window.ran") is None
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)
    with pytest.raises(Exception, match="TrustedHTML"):
        opened.evaluate("document.body.innerHTML = '<b>markup</b>'")
    tab.page.context.close()
