"""Mazes: what is one, how it is walked, and that every maze is equally likely."""

import copy
import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze.errors import MazeError
from skyrl_maze.maze import MAX_SIZE, MIN_SIZE, Cell, Maze, Move, check_size, generate_maze

# A ring with a spur: two equally short ways from start to goal.
RING = ["#######", "#.....#", "#.###.#", "#.#.#.#", "#.#.#.#", "#.....#", "#######"]
sizes = st.integers(2, 10).map(lambda half: 2 * half + 1)
seeds = st.integers(0, 2**64)
mazes = st.builds(generate_maze, sizes, seeds, st.floats(0, 1))


def floyd_warshall(maze: Maze) -> dict[tuple[Cell, Cell], float]:
    """Moves between every two open cells, by another method than the package's."""
    cells = [(int(row), int(col)) for row, col in np.argwhere(~maze.walls)]
    apart = np.full((len(cells), len(cells)), np.inf)
    for i, a in enumerate(cells):
        for j, b in enumerate(cells):
            if abs(a[0] - b[0]) + abs(a[1] - b[1]) <= 1:
                apart[i, j] = float(i != j)
    for k in range(len(cells)):
        apart = np.minimum(apart, apart[:, k : k + 1] + apart[k : k + 1, :])
    return {(a, b): float(apart[i, j]) for i, a in enumerate(cells) for j, b in enumerate(cells)}


def dead_ends(maze: Maze) -> int:
    rooms = [(r, c) for r in range(1, maze.size, 2) for c in range(1, maze.size, 2)]
    return sum(sum(maze.step(room, move) != room for move in Move) == 1 for room in rooms)


def openings(maze: Maze) -> int:
    return int((~maze.walls).sum()) - (maze.size // 2) ** 2


def test_moves_are_numbered_and_worded() -> None:
    assert [(m.value, m.word, m.delta) for m in Move] == [
        (0, "right", (0, 1)),
        (1, "up", (-1, 0)),
        (2, "left", (0, -1)),
        (3, "down", (1, 0)),
    ]


def test_step_walks_floors_and_stops_at_walls() -> None:
    maze = Maze.from_rows(RING, (1, 1), (5, 5))
    assert maze.step((1, 1), Move.RIGHT) == (1, 2)
    assert maze.step((1, 1), Move.DOWN) == (2, 1)
    assert maze.step((1, 1), Move.UP) == (1, 1)
    assert maze.step((1, 1), Move.LEFT) == (1, 1)
    assert maze.step((5, 3), Move.UP) == (4, 3)
    assert maze.step((4, 3), Move.LEFT) == (4, 3)


def test_distances_and_shortest_path_by_hand() -> None:
    maze = Maze.from_rows(RING, (1, 1), (5, 5))
    assert maze.distance_to_goal.tolist() == [
        [-1, -1, -1, -1, -1, -1, -1],
        [-1, 8, 7, 6, 5, 4, -1],
        [-1, 7, -1, -1, -1, 3, -1],
        [-1, 6, -1, 4, -1, 2, -1],
        [-1, 5, -1, 3, -1, 1, -1],
        [-1, 4, 3, 2, 1, 0, -1],
        [-1, -1, -1, -1, -1, -1, -1],
    ]
    assert maze.distance_to_goal.dtype == np.int32
    assert maze.shortest_path() == [Move.RIGHT] * 4 + [Move.DOWN] * 4


def test_cells_cut_off_from_the_goal_have_no_distance() -> None:
    rows = ["#######", "#...#.#", "#.#.###", "#...#.#", "#######", "#.....#", "#######"]
    maze = Maze.from_rows(rows, (1, 1), (3, 3))
    assert maze.distance_to_goal[1, 5] == -1
    assert maze.distance_to_goal[5, 5] == -1
    assert maze.distance_to_goal[1, 1] == 4


@given(st.sampled_from([5, 7, 9]), seeds, st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_distances_agree_with_floyd_warshall(size: int, seed: int, braid: float) -> None:
    maze = generate_maze(size, seed, braid)
    apart = floyd_warshall(maze)
    for row, col in np.ndindex(size, size):
        expected = -1 if maze.walls[row, col] else apart[(row, col), maze.goal]
        assert maze.distance_to_goal[row, col] == expected


@given(mazes)
@settings(max_examples=50, deadline=None)
def test_shortest_path_leads_to_the_goal(maze: Maze) -> None:
    path = maze.shortest_path()
    assert len(path) == maze.distance_to_goal[maze.start]
    position = maze.start
    for move in path:
        after = maze.step(position, move)
        assert after != position
        position = after
    assert position == maze.goal


@given(mazes)
@settings(max_examples=50, deadline=None)
def test_text_rows_pickle_and_deepcopy_give_the_same_maze(maze: Maze) -> None:
    copies = [
        Maze.from_text(maze.to_text()),
        Maze.from_rows(maze.to_rows(), maze.start, maze.goal),
        Maze.from_rows(tuple(maze.to_rows()), list(maze.start), [np.int64(x) for x in maze.goal]),  # type: ignore[arg-type]
        pickle.loads(pickle.dumps(maze)),
        copy.deepcopy(maze),
        eval(repr(maze)),
    ]
    for other in copies:
        assert other == maze
        assert hash(other) == hash(maze)
        assert other.key == maze.key
        assert (other.start, other.goal) == (maze.start, maze.goal)
        assert (other.walls == maze.walls).all()
        assert not other.walls.flags.writeable
    assert len(set(copies)) == 1


def test_text_is_one_line_with_start_and_goal() -> None:
    text = Maze.from_rows(RING, (1, 1), (5, 5)).to_text()
    assert text == "#######/#S....#/#.###.#/#.#.#.#/#.#.#.#/#....G#/#######"


def test_walls_start_and_goal_each_make_another_puzzle() -> None:
    maze = Maze.from_rows(RING, (1, 1), (5, 5))
    others = [
        Maze.from_rows(RING, (5, 5), (1, 1)),
        Maze.from_rows(RING, (1, 2), (5, 5)),
        Maze.from_rows(RING, (1, 1), (5, 4)),
        Maze.from_rows([*RING[:4], "#.###.#", *RING[5:]], (1, 1), (5, 5)),
    ]
    assert len({maze, *others}) == 5
    assert len({m.key for m in [maze, *others]}) == 5
    assert maze != maze.to_text()


def test_key_is_the_same_in_every_process() -> None:
    assert Maze.from_rows(RING, (1, 1), (5, 5)).key == "20cd89e8fe1e62a8de8889de927edb1e"


def test_a_maze_cannot_be_changed() -> None:
    walls = generate_maze(7, 0).walls.copy()
    maze = Maze(walls, (1, 1), (5, 5))
    before = maze.to_text()
    walls[:] = True
    assert maze.to_text() == before
    with pytest.raises(ValueError, match="read-only"):
        maze.walls[1, 1] = True
    with pytest.raises(ValueError, match="read-only"):
        maze.distance_to_goal[1, 1] = 7
    with pytest.raises(AttributeError):
        maze.goal = (1, 1)  # type: ignore[misc]


def test_is_open() -> None:
    maze = Maze.from_rows(RING, (1, 1), (5, 5))
    inside = [(r, c) for r in range(7) for c in range(7) if maze.is_open((r, c))]
    assert inside == [(r, c) for r in range(7) for c in range(7) if RING[r][c] == "."]
    assert not any(maze.is_open(cell) for cell in [(-2, -2), (1, -2), (7, 1), (1, 7), (-6, 1)])


@given(sizes, seeds)
@settings(max_examples=50, deadline=None)
def test_a_generated_maze_is_perfect_with_opposite_corners(size: int, seed: int) -> None:
    maze = generate_maze(size, seed)
    rooms = (size // 2) ** 2
    assert maze.size == size
    assert openings(maze) == rooms - 1  # with everything reachable: a tree
    assert ((maze.distance_to_goal >= 0) == ~maze.walls).all()
    assert maze.walls[2:-1:2, 2:-1:2].all()
    assert {*maze.start, *maze.goal} == {1, size - 2}
    assert [a + b for a, b in zip(maze.start, maze.goal, strict=True)] == [size - 1, size - 1]


@given(sizes, seeds, st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_braid_opens_the_share_of_dead_ends(size: int, seed: int, braid: float) -> None:
    perfect, braided = generate_maze(size, seed), generate_maze(size, seed, braid)
    assert (braided.start, braided.goal) == (perfect.start, perfect.goal)
    assert not (braided.walls & ~perfect.walls).any()
    chosen, added = round(braid * dead_ends(perfect)), openings(braided) - openings(perfect)
    # An opening may serve two dead ends at once.
    assert chosen / 2 <= added <= chosen
    assert dead_ends(braided) <= dead_ends(perfect) - chosen


def test_braid_one_leaves_no_dead_end() -> None:
    assert all(dead_ends(generate_maze(11, seed, 1)) == 0 for seed in range(50))
    assert all(dead_ends(generate_maze(11, seed)) > 0 for seed in range(50))


def test_generation_is_deterministic_and_leaves_global_generators_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    first = [generate_maze(9, seed, 0.5) for seed in range(20)]
    assert (random.random(), np.random.random()) == expected
    assert [generate_maze(9, seed, 0.5) for seed in range(20)] == first
    assert generate_maze(np.int64(9), np.uint8(3), np.float32(0.5)) == first[3]  # type: ignore[arg-type]


def test_generation_does_not_change_between_releases() -> None:
    assert (
        generate_maze(9, 7).to_text()
        == "#########/#S#...#.#/#.#.###.#/#.......#/###.#####/#...#.#.#/###.#.#.#/#......G#/#########"
    )


def test_every_5x5_puzzle_is_equally_likely() -> None:
    draws = 4800
    counts = Counter(generate_maze(5, seed).key for seed in range(draws))
    assert len(counts) == 16
    expected = draws / 16
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 37.7  # exceeded with probability 0.001 at 15 degrees of freedom


def test_every_7x7_puzzle_is_found_and_equally_likely() -> None:
    draws = 12_000
    counts = Counter(generate_maze(7, seed).key for seed in range(draws))
    assert len(counts) == 768
    expected = draws / 768
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    # 767 degrees of freedom: mean 767, standard deviation 39; draws with a bias are 100 deviations off.
    assert 600 < chi_square < 900


@pytest.mark.parametrize(
    "size", [8, 3, 1, 0, -9, MAX_SIZE + 2, 10**9 + 1, True, np.True_, 9.0, "9", None, [9]]
)
def test_a_bad_size_is_refused(size: Any) -> None:
    with pytest.raises(MazeError, match=r"maze of size .*must be an odd int from 5 to 199"):
        generate_maze(size, 0)
    with pytest.raises(MazeError, match="must be an odd int"):
        check_size(size)


def test_an_even_size_gets_its_neighbours_suggested() -> None:
    with pytest.raises(MazeError, match="use 7 or 9"):
        generate_maze(8, 0)


def test_the_smallest_and_the_largest_maze() -> None:
    assert generate_maze(MIN_SIZE, 0).size == 5
    assert generate_maze(MAX_SIZE, 0).distance_to_goal.max() >= 2 * (MAX_SIZE - 3)


@pytest.mark.parametrize("seed", [-1, True, 1.0, "1", None, float("nan"), np.int64(-3)])
def test_a_bad_seed_is_refused(seed: Any) -> None:
    with pytest.raises(MazeError, match="the seed must be an int of 0 or more"):
        generate_maze(9, seed)


@pytest.mark.parametrize("braid", [-0.1, 1.01, float("nan"), float("inf"), True, "0.5", None, 2])
def test_a_bad_braid_is_refused(braid: Any) -> None:
    with pytest.raises(MazeError, match=r"with braid .*: give a number from 0 .* to 1"):
        generate_maze(9, 0, braid)


BAD_CELLS = [
    (0, 0),
    (2, 2),
    (7, 1),
    (1, 7),
    (-6, 1),
    (1,),
    (1, 1, 1),
    (1.0, 1),
    (True, 1),
    "11",
    None,
    11,
    {1, 2},
]


@pytest.mark.parametrize("cell", BAD_CELLS)
def test_a_bad_cell_is_refused(cell: Any) -> None:
    maze = Maze.from_rows(RING, (1, 1), (5, 5))
    with pytest.raises(MazeError, match="cannot put the start at "):
        Maze.from_rows(RING, cell, (5, 5))
    with pytest.raises(MazeError, match="cannot put the goal at "):
        Maze.from_rows(RING, (1, 1), cell)
    with pytest.raises(MazeError, match="cannot put the position at "):
        maze.step(cell, Move.UP)


def test_the_error_says_what_is_wrong_with_a_cell() -> None:
    maze = Maze.from_rows(RING, (1, 1), (5, 5))
    with pytest.raises(MazeError, match=r"at \(2, 2\): it is a wall; choose a floor cell"):
        maze.check_open((2, 2))
    with pytest.raises(MazeError, match=r"the agent at \(7, 1\): it is outside the 7x7 grid"):
        maze.check_open((7, 1), "the agent")
    with pytest.raises(MazeError, match=r"at '11' \(str\): give a pair of ints \(row, col\)"):
        maze.check_open("11")


@pytest.mark.parametrize("move", [0, 3, True, "up", None])
def test_a_bad_move_is_refused(move: Any) -> None:
    with pytest.raises(MazeError, match=r"give one of Move\.RIGHT, Move\.UP, Move\.LEFT, Move\.DOWN"):
        Maze.from_rows(RING, (1, 1), (5, 5)).step((1, 1), move)


def test_start_and_goal_must_differ_and_be_connected() -> None:
    with pytest.raises(MazeError, match=r"both at \(1, 1\): choose two different cells"):
        Maze.from_rows(RING, (1, 1), (1, 1))
    cut = ["#####", "#.#.#", "#.#.#", "#.#.#", "#####"]
    with pytest.raises(MazeError, match=r"goal \(3, 3\) is walled off from its start \(1, 1\)"):
        Maze.from_rows(cut, (1, 1), (3, 3))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "maze of size 0"),
        (["#"], "maze of size 1"),
        (["#" * 6] * 6, "maze of size 6 .*use 5 or 7"),
        ([*RING[:6], "######"], "row 6, '######', of 6 characters, in a maze of 7 rows"),
        ([*RING[:6], "########"], "of 8 characters"),
        ([row + "#" for row in RING], "make every row as long as there are rows"),
        ([*RING[:5], "#..x..#", RING[6]], r"'x' in row 5, .*use only '#' \(wall\) and '.' \(floor\)"),
        ([*RING[:5], "#.. ..#", RING[6]], "' ' in row 5"),
        ([*RING[:5], "#..S..#", RING[6]], "'S' in row 5"),
        (["###.###", *RING[1:]], r"gap in its border at \(0, 3\): close it with wall"),
        ([*RING[:3], "..#.#.#", *RING[4:]], r"gap in its border at \(3, 0\)"),
        ("/".join(RING), "give a list of strings"),
        ([list(row) for row in RING], "give a list of strings"),
        (None, "give a list of strings"),
        (7, "give a list of strings"),
    ],
)
def test_bad_rows_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(MazeError, match=message):
        Maze.from_rows(rows, (1, 1), (5, 5))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has 0 starts S and 0 goals G"),
        ("/".join(RING), "mark exactly one of each"),
        ("#####/#S.S#/#.#.#/#..G#/#####", "2 starts S and 1 goals G"),
        ("#####/#S..#/#.#.#/#..G#/####", "row 4, '####', of 4 characters"),
        ("#####/#S..#/#.#.#/#..G#/#####/", "maze of size 6"),
        ("#####/#S..#/#.#.#/#..G#/#####\n", "'\\\\n' in row 4"),
        ("S####/#...#/#.#.#/#..G#/#####", r"gap in its border at \(0, 0\)"),
        (b"#####/#S..#/#.#.#/#..G#/#####", r"\(bytes\): give the text of Maze.to_text\(\)"),
        (None, r"give the text of Maze.to_text\(\)"),
    ],
)
def test_bad_text_is_refused(text: Any, message: str) -> None:
    with pytest.raises(MazeError, match=message):
        Maze.from_text(text)


@given(st.text(alphabet="#.SG/\n x", max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_maze_or_refused(text: str) -> None:
    try:
        maze = Maze.from_text(text)
    except MazeError:
        return
    assert maze.to_text() == text


@pytest.mark.parametrize(
    "walls",
    [
        generate_maze(5, 0).walls.astype(np.uint8),
        generate_maze(5, 0).walls.tolist(),
        generate_maze(5, 0).walls[:, :3],
        generate_maze(5, 0).walls[None],
        generate_maze(5, 0).walls.ravel(),
        None,
    ],
)
def test_walls_of_another_type_or_shape_are_refused(walls: Any) -> None:
    with pytest.raises(MazeError, match=r"cannot take walls from .*: give a numpy bool array \[size, size\]"):
        Maze(walls, (1, 1), (3, 3))


def test_empty_walls_are_refused() -> None:
    with pytest.raises(MazeError, match="maze of size 0"):
        Maze(np.ones((0, 0), dtype=np.bool_), (1, 1), (3, 3))
