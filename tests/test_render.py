"""Pictures: exact to the pixel, without memory, and the same whether drawn or decoded."""

import base64
import io
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from skyrl_maze.errors import MazeError
from skyrl_maze.maze import Cell, Maze, Move, generate_maze
from skyrl_maze.render import THEMES, encode_png, picture_side_px, png_data_uri, render

NINE = Maze.from_text(
    "#########/#.#.#.#G#/#.#.#.#.#/#.......#/###.#####/#.......#/###.###.#/#S..#...#/#########"
)
SEVEN = Maze.from_text("#######/#S....#/#.###.#/#.#.#.#/#.#.#.#/#....G#/#######")

# Drawn by `encode_png` and looked at.
GOLDEN = {
    "visgym_9x9_start": (NINE, NINE.start, "visgym", None),
    "visgym_9x9_goal": (NINE, NINE.goal, "visgym", None),
    "tokens_7x7_corridor": (SEVEN, (3, 3), "tokens", None),
    "tokens_9x9_goal_16px": (NINE, NINE.goal, "tokens", 16),
}

themes = st.one_of(st.just(("visgym", None)), st.tuples(st.just("tokens"), st.none() | st.integers(4, 128)))
mazes = st.builds(generate_maze, st.sampled_from([5, 7, 9]), st.integers(0, 2**32), st.floats(0, 1))
moves = st.lists(st.sampled_from(Move), max_size=12)


def pixels(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> int:
    return int((picture == colour).all(axis=-1).sum())


def decoded(png: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


def cell_of(picture: NDArray[np.uint8], cell: Cell, px: int) -> NDArray[np.uint8]:
    row, col = cell
    return picture[row * px : (row + 1) * px, col * px : (col + 1) * px]


@pytest.mark.parametrize("name", GOLDEN)
def test_pictures_equal_the_golden_ones(name: str) -> None:
    maze, position, theme, cell_px = GOLDEN[name]
    golden = decoded((Path(__file__).parent / "golden" / f"{name}.png").read_bytes())
    np.testing.assert_array_equal(render(maze, position, theme, cell_px), golden)


def test_every_golden_picture_is_compared() -> None:
    assert {path.stem for path in (Path(__file__).parent / "golden").glob("*.png")} == set(GOLDEN)


def test_visgym_colours_by_pixel_count() -> None:
    picture = render(NINE, NINE.start, "visgym")
    walls = int(NINE.walls.sum())
    assert picture.shape == (225, 225, 3)
    assert picture.dtype == np.uint8
    assert pixels(picture, (0, 0, 255)) == 104
    assert pixels(picture, (255, 0, 0)) == 625
    assert pixels(picture, (169, 169, 169)) == 625 * walls
    assert pixels(picture, (255, 255, 255)) == 625 * (81 - walls - 1) - 104


def test_visgym_disc_lies_over_the_goal_and_leaves_no_hole() -> None:
    assert pixels(render(NINE, (2, 7), "visgym"), (255, 0, 0)) == 625
    on_goal = render(NINE, (1, 7), "visgym")
    assert pixels(on_goal, (255, 0, 0)) == 625 - 104
    assert pixels(on_goal, (0, 0, 255)) == 104
    assert pixels(render(NINE, (2, 7), "visgym"), (255, 0, 0)) == 625


def test_visgym_disc_has_its_exact_outline() -> None:
    disc = (cell_of(render(NINE, (7, 1), "visgym"), (7, 1), 25) == (0, 0, 255)).all(axis=-1)
    rows = ["".join(".#"[pixel] for pixel in row) for row in disc[6:18, 6:18].astype(int)]
    assert rows == [
        "....####....",
        "...######...",
        "..########..",
        ".##########.",
        "############",
        "############",
        "############",
        "############",
        ".##########.",
        "..########..",
        "...######...",
        "....####....",
    ]
    assert disc.sum() == disc[6:18, 6:18].sum()


def test_tokens_gives_every_cell_whole_vision_tokens() -> None:
    picture = render(NINE, NINE.start)
    assert picture.shape == (9 * 32, 9 * 32, 3)
    theme = THEMES["tokens"]
    for row, col in np.ndindex(9, 9):
        mark = theme.wall if NINE.walls[row, col] else theme.goal if (row, col) == NINE.goal else theme.floor
        flat = pixels(cell_of(picture, (row, col), 32), mark.colour)
        assert flat == 1024 or ((row, col) == NINE.start and 500 < flat < 700)


@pytest.mark.parametrize("px", [4, 5, 6, 7, 8, 16, 28, 31, 32, 33, 127, 128])
def test_tokens_disc_is_centred_and_shows_the_goal_around_it(px: int) -> None:
    theme = THEMES["tokens"]
    cell = cell_of(render(SEVEN, SEVEN.goal, "tokens", px), SEVEN.goal, px)
    disc = (cell == theme.agent.colour).all(axis=-1)
    assert (disc == disc[::-1]).all()
    assert (disc == disc.T).all()
    assert 0.2 < disc.mean() <= 0.5
    assert pixels(cell, theme.goal.colour) == px * px - disc.sum()
    assert not disc[0].any()


def test_tokens_colours_differ_in_lightness_alone() -> None:
    def luminance(colour: tuple[int, int, int]) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    theme = THEMES["tokens"]
    levels = [luminance(mark.colour) for mark in (theme.floor, theme.wall, theme.goal, theme.agent)]
    for a, b in combinations(levels, 2):
        assert (max(a, b) + 0.05) / (min(a, b) + 0.05) > 1.8  # the contrast ratio of WCAG 2


def test_themes_are_named_like_their_keys() -> None:
    assert set(THEMES) == {"tokens", "visgym"}
    assert all(theme.name == name for name, theme in THEMES.items())


@given(mazes, moves, themes)
@settings(max_examples=30, deadline=None)
def test_a_picture_has_no_memory(maze: Maze, walk: list[Move], look: tuple[str, int | None]) -> None:
    position = maze.start
    picture = render(maze, position, *look)
    for move in walk:
        position = maze.step(position, move)
        picture = render(maze, position, *look)
    np.testing.assert_array_equal(picture, render(Maze.from_text(maze.to_text()), position, *look))


def test_drawing_on_a_picture_does_not_change_the_next() -> None:
    before = render(NINE, NINE.start)
    expected = before.copy()
    before[:] = 7
    np.testing.assert_array_equal(render(NINE, NINE.start), expected)


@given(mazes, moves, themes)
@settings(max_examples=60, deadline=None)
def test_png_and_data_uri_decode_to_the_picture(
    maze: Maze, walk: list[Move], look: tuple[str, int | None]
) -> None:
    position = maze.start
    for move in walk:
        position = maze.step(position, move)
    picture = render(maze, position, *look)
    png = encode_png(maze, position, *look)
    np.testing.assert_array_equal(decoded(png), picture)
    assert len(picture) == picture_side_px(maze.size, *look)
    head, _, body = png_data_uri(maze, position, *look).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body, validate=True) == png


def test_a_9x9_png_is_small() -> None:
    assert len(encode_png(NINE, NINE.start, "visgym")) < 844  # the size of VisGym's own
    assert len(encode_png(NINE, NINE.start, "tokens")) < 844


@pytest.mark.parametrize("draw", [render, encode_png, png_data_uri])
@pytest.mark.parametrize("position", [(0, 0), (2, 2), (9, 1), (-2, 1), (1.0, 1), (True, 1), (1,), None, "11"])
def test_a_position_off_the_floor_is_refused(draw: Any, position: Any) -> None:
    with pytest.raises(MazeError, match="cannot put the position at "):
        draw(NINE, position)


@pytest.mark.parametrize("theme", ["Tokens", "token", "visgim", "", None, 3, ["tokens"]])
def test_an_unknown_theme_is_refused(theme: Any) -> None:
    with pytest.raises(MazeError, match=r"in theme .*: choose 'tokens' or 'visgym'"):
        render(NINE, NINE.start, theme)


def test_a_mistyped_theme_gets_the_closest_suggested() -> None:
    with pytest.raises(MazeError, match=r"did you mean 'visgym'\?"):
        encode_png(NINE, NINE.start, "vizgym")


@pytest.mark.parametrize("cell_px", [3, 129, 0, -32, 32.0, "32", True])
def test_a_bad_cell_size_is_refused(cell_px: Any) -> None:
    with pytest.raises(MazeError, match=r"theme 'tokens' with cell_px .*: it must be an int from 4 to 128"):
        render(NINE, NINE.start, "tokens", cell_px)


def test_visgym_has_one_cell_size() -> None:
    np.testing.assert_array_equal(render(NINE, NINE.start, "visgym", 25), render(NINE, NINE.start, "visgym"))
    with pytest.raises(
        MazeError, match="theme 'visgym' with cell_px 32: it must be 25; 'tokens' has other sizes"
    ):
        render(NINE, NINE.start, "visgym", 32)


def test_a_picture_too_large_is_refused() -> None:
    assert picture_side_px(199, "tokens") == 6368
    assert picture_side_px(199, "visgym") == 4975
    with pytest.raises(MazeError, match="has 25472 px a side, more than 8192; use a cell_px of at most 41"):
        picture_side_px(199, "tokens", 128)
