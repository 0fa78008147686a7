"""Maze sets: kept apart by puzzle, the same every time, and files that are whole or absent."""

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze import dataset
from skyrl_maze.dataset import (
    MazeSetSpec,
    draw_set,
    evaluation_keys,
    load_file,
    load_set,
    mazes_of,
    prepare,
    rows,
    shipped_sets,
    solvable,
    turns_needed,
    write_rows,
)
from skyrl_maze.env import MazeEnv
from skyrl_maze.errors import DatasetError
from skyrl_maze.maze import Maze, generate_maze

EASY, HARD = "visgym-easy-64", "visgym-hard-64"
seeds = st.integers(0, 2**63)
# Sizes that hold many puzzles, and 7x7, which holds 768.
size_lists = st.lists(st.sampled_from([7, 9, 11]), min_size=1, max_size=3, unique=True)


def keys(mazes):
    return {maze.key for maze in mazes}


# --- shipped sets


def test_the_shipped_sets():
    assert shipped_sets() == [EASY, HARD]


@pytest.mark.parametrize(
    ("name", "size", "lengths"),
    [(EASY, 9, {12: 50, 16: 14}), (HARD, 11, {16: 35, 20: 20, 24: 7, 28: 1, 32: 1})],
)
def test_a_shipped_set_holds_64_mazes_of_known_difficulty(name, size, lengths):
    mazes = load_set(name)
    assert len(mazes) == len(keys(mazes)) == 64
    assert {maze.size for maze in mazes} == {size}
    assert Counter(len(maze.shortest_path()) for maze in mazes) == lengths


@pytest.mark.parametrize(
    ("name", "ceilings"),
    [
        (EASY, {12: 0, 13: 50, 15: 50, 16: 50, 17: 64, 100: 64}),
        (HARD, {16: 0, 17: 35, 21: 55, 25: 62, 29: 63, 32: 63, 33: 64}),
    ],
)
def test_how_many_mazes_a_budget_can_solve(name, ceilings):
    mazes = load_set(name)
    assert {turns: solvable(mazes, "stop", turns) for turns in ceilings} == ceilings
    assert {turns: solvable(mazes, "reach", turns - 1) for turns in ceilings} == ceilings


def test_turns_needed_are_what_an_optimal_episode_takes():
    maze = load_set(EASY)[0]
    for rule, extra in (("reach", []), ("stop", ["('stop', 'stop')"])):
        answers = [f"('move', {int(move)})" for move in maze.shortest_path()] + extra
        for budget in (len(answers), len(answers) - 1):
            env = MazeEnv({"goal_rule": rule}, {"maze": maze.to_text(), "max_turns": budget})
            env.init([])
            for answer in answers[:budget]:
                env.step(answer)
            assert env.get_metrics()["success"] == (budget >= turns_needed(maze, rule))


def test_an_unknown_set_is_refused_with_the_closest():
    with pytest.raises(
        DatasetError, match=r"no maze set 'visgym-easy'; did you mean 'visgym-easy-64'\?; shipped: "
    ):
        load_set("visgym-easy")


def test_evaluation_keys_are_those_of_all_shipped_sets():
    assert evaluation_keys() == keys(load_set(EASY)) | keys(load_set(HARD))
    assert len(evaluation_keys()) == 128


# --- drawn sets


@settings(max_examples=25, deadline=None)
@given(
    sizes=size_lists,
    seed=seeds,
    held_out_seed=seeds,
    count=st.integers(1, 30),
    braid=st.sampled_from([0.0, 0.5]),
)
def test_sets_are_disjoint_distinct_and_deterministic(sizes, seed, held_out_seed, count, braid):
    held_out = draw_set(MazeSetSpec(sizes=sizes, seed=held_out_seed, count=20, braid=braid))
    spec = MazeSetSpec(sizes=sizes, seed=seed, count=count, braid=braid)
    mazes = draw_set(spec, keys(held_out))
    assert len(mazes) == len(keys(mazes)) == count
    assert keys(mazes).isdisjoint(keys(held_out))
    assert {maze.size for maze in mazes} <= set(sizes)
    assert draw_set(spec, iter(keys(held_out))) == mazes


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_5x5_mazes_are_kept_apart_although_there_are_only_16(seed):
    held_out = draw_set(MazeSetSpec(sizes=[5], count=4, seed=seed))
    train = draw_set(MazeSetSpec(sizes=[5], count=12, seed=seed), keys(held_out))
    assert len(keys(train) | keys(held_out)) == 16


@pytest.mark.parametrize(("size", "puzzles"), [(5, 16), (7, 768)])
def test_all_puzzles_of_a_size_can_be_drawn(size, puzzles):
    assert len(draw_set(MazeSetSpec(sizes=[size], count=puzzles))) == puzzles


def test_more_puzzles_than_there_are_cannot_be_drawn():
    held_out = keys([generate_maze(5, 0)])
    message = (
        r"^cannot draw 17 distinct mazes of sizes \[5\]: found only 15 beside the 1 puzzles "
        r"kept out for evaluation \(5x5 has 16 puzzles, 7x7 768\); lower count or take larger sizes$"
    )
    with pytest.raises(DatasetError, match=message):
        draw_set(MazeSetSpec(sizes=[5], count=17), held_out)


def test_sizes_are_drawn_by_weight():
    spec = MazeSetSpec(sizes=[13, 9, 11], weights=[0.0, 3.0, 1.0], count=400)
    found = Counter(maze.size for maze in draw_set(spec))
    assert set(found) == {9, 11}
    assert 260 < found[9] < 340  # 300 expected, 4.6 standard deviations either way


def test_sizes_without_weights_are_drawn_equally():
    found = Counter(maze.size for maze in draw_set(MazeSetSpec(sizes=[9, 11], count=400)))
    assert 155 < found[9] < 245


def test_a_weight_of_zero_is_never_drawn_even_when_the_rest_is_exhausted():
    with pytest.raises(DatasetError, match="found only 16 beside"):
        draw_set(MazeSetSpec(sizes=[5, 9], weights=[1.0, 0.0], count=17))


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        (MazeSetSpec(), []),
        (MazeSetSpec(name=EASY, count=-1), []),
        (
            MazeSetSpec(name="visgym-hard"),
            [f"name='visgym-hard': no such maze set; did you mean '{HARD}'?; shipped: {EASY}, {HARD}"],
        ),
        (MazeSetSpec(count=0), ["count=0: must be at least 1"]),
        (MazeSetSpec(sizes=[]), ["sizes=[]: give at least one size, and each once"]),
        (MazeSetSpec(sizes=[9, 9]), ["sizes=[9, 9]: give at least one size, and each once"]),
        (
            MazeSetSpec(sizes=[8]),
            [
                "sizes=[8]: cannot make a maze of size 8 (int): the size must be an odd int from 5 to 199; "
                "use 7 or 9"
            ],
        ),
    ],
)
def test_problems_name_the_field_and_what_is_allowed(spec, lines):
    assert spec.problems() == lines


def test_weights_whose_sum_overflows_are_a_problem():
    (line,) = MazeSetSpec(sizes=[7, 9], weights=[1e308, 1e308]).problems()
    assert line.startswith("weights=[1e+308, 1e+308]: give one finite number")


@pytest.mark.parametrize("weights", [[], [1.0, 1.0], [-1.0], [0.0], [float("nan")], [float("inf")]])
def test_unusable_weights_are_a_problem(weights):
    (line,) = MazeSetSpec(weights=weights).problems()
    assert line == (
        f"weights={weights}: give one finite number of 0 or more for each of sizes=[9], at least one above 0"
    )


def test_every_problem_is_listed_and_nothing_is_drawn():
    spec = MazeSetSpec(sizes=[8, 3], weights=[1.0], count=0, seed=-1, braid=2.0)
    starts = [line.split("=")[0].split(":")[0] for line in spec.problems()]
    assert starts == ["count", "weights", "sizes", "sizes", "seed", "braid"]
    with pytest.raises(DatasetError, match=r"^cannot draw a maze set: count=0: must be at least 1; weights="):
        draw_set(spec)


# --- files


@pytest.fixture
def two_rows():
    return rows(load_set(EASY)[:2], "some")


def test_prepare_writes_both_sets_apart(tmp_path):
    train, evaluation = prepare(MazeSetSpec(count=30), MazeSetSpec(name=EASY), tmp_path / "a" / "b")
    assert load_file(evaluation) == load_set(EASY)
    assert len(load_file(train)) == 30
    assert keys(load_file(train)).isdisjoint(evaluation_keys())
    assert evaluation.name.startswith(f"{EASY}-")
    assert sorted((tmp_path / "a" / "b").iterdir()) == sorted([train, evaluation])
    assert {path.stat().st_mode & 0o777 for path in (train, evaluation)} == {0o644}


@settings(max_examples=10, deadline=None)
@given(train_seed=seeds, eval_seed=seeds)
def test_a_drawn_evaluation_set_is_never_trained_on(tmp_path_factory, train_seed, eval_seed):
    folder = tmp_path_factory.mktemp("mazes")
    train, evaluation = prepare(
        MazeSetSpec(sizes=[5, 7], count=40, seed=train_seed),
        MazeSetSpec(sizes=[5], count=8, seed=eval_seed),
        folder,
    )
    assert keys(load_file(train)).isdisjoint(keys(load_file(evaluation)))
    assert load_file(evaluation) == mazes_of(MazeSetSpec(sizes=[5], count=8, seed=eval_seed))


def test_puzzles_of_every_shipped_set_are_kept_out(tmp_path, monkeypatch):
    """All 16 puzzles of 5x5, 10 of them in a shipped set that this run does not evaluate on."""
    shipped = keys(draw_set(MazeSetSpec(sizes=[5], count=10)))
    monkeypatch.setattr(dataset, "evaluation_keys", lambda: shipped)
    train, _ = prepare(MazeSetSpec(sizes=[5], count=6, seed=1), MazeSetSpec(count=3), tmp_path)
    assert len(shipped | keys(load_file(train))) == 16


def test_prepare_finds_its_files_again_and_leaves_them_alone(tmp_path):
    specs = MazeSetSpec(count=5), MazeSetSpec(name=EASY)
    first = prepare(*specs, tmp_path)
    before = [path.stat() for path in first]
    assert prepare(*specs, tmp_path) == first
    assert [path.stat().st_mtime_ns for path in first] == [stat.st_mtime_ns for stat in before]
    assert [path.stat().st_ino for path in first] == [stat.st_ino for stat in before]


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        (MazeSetSpec(count=6), MazeSetSpec(name=EASY)),
        (MazeSetSpec(count=5, seed=1), MazeSetSpec(name=EASY)),
        (MazeSetSpec(count=5, sizes=[11]), MazeSetSpec(name=EASY)),
        (MazeSetSpec(count=5, weights=[2.0]), MazeSetSpec(name=EASY)),
        (MazeSetSpec(count=5, braid=0.5), MazeSetSpec(name=EASY)),
        (MazeSetSpec(count=5), MazeSetSpec(count=3)),  # other puzzles are held out
    ],
)
def test_other_settings_are_another_file(tmp_path, train, evaluation):
    first, _ = prepare(MazeSetSpec(count=5), MazeSetSpec(name=EASY), tmp_path)
    assert prepare(train, evaluation, tmp_path)[0] != first


def test_evaluation_sets_are_not_trained_on(tmp_path):
    with pytest.raises(
        DatasetError, match=f"cannot train on '{EASY}': it is an evaluation set; give sizes and count"
    ):
        prepare(MazeSetSpec(name=EASY), MazeSetSpec(name=HARD), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_left_as_it_is(tmp_path, two_rows):
    path = tmp_path / "mazes.parquet"
    path.write_bytes(b"mine")
    write_rows(path, two_rows)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "target",
    ["os.replace", "os.fsync", "os.chmod", "pyarrow.parquet.write_table", "pathlib.Path.mkdir"],
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_failed_write_leaves_nothing_and_says_where(tmp_path, monkeypatch, two_rows, target, code):
    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(target, fail)
        with pytest.raises(DatasetError) as caught:
            write_rows(tmp_path / "mazes.parquet", two_rows)
    assert str(caught.value) == (
        f"cannot write the data set {tmp_path / 'mazes.parquet'}: {os.strerror(code)}; "
        "free space, or give another folder in the recipe's section data"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_scratch_file_lies_in_the_same_folder(tmp_path, monkeypatch, two_rows):
    """A file is replaced in one go only within one file system."""
    folders, replace = [], os.replace

    def spy(scratch, path):
        folders.append(Path(scratch).parent)
        replace(scratch, path)

    monkeypatch.setattr(os, "replace", spy)
    write_rows(tmp_path / "mazes.parquet", two_rows)
    assert folders == [tmp_path]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch, two_rows):
    def half(_table, file):
        file.write(b"PAR1 half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.write_table", half)
        with pytest.raises(KeyboardInterrupt):
            write_rows(tmp_path / "mazes.parquet", two_rows)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_file_of_that_name(tmp_path, two_rows):
    script = (
        "import json, os, sys; from pathlib import Path; from skyrl_maze import dataset\n"
        "os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "dataset.write_rows(Path(sys.argv[1]), json.loads(sys.argv[2]))"
    )
    path = tmp_path / "mazes.parquet"
    assert subprocess.run([sys.executable, "-c", script, path, json.dumps(two_rows)]).returncode == -9
    assert not path.exists()
    write_rows(path, two_rows)
    assert len(load_file(path)) == 2


def test_a_folder_that_cannot_be_is_refused(tmp_path, two_rows):
    (tmp_path / "file").touch()
    with pytest.raises(
        DatasetError, match=r"cannot write the data set .*mazes.parquet: (File exists|Not a directory); "
    ):
        write_rows(tmp_path / "file" / "mazes.parquet", two_rows)


def test_concurrent_writers_end_with_one_good_file_each(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from skyrl_maze.dataset import MazeSetSpec, prepare\n"
        "folder = Path(sys.argv[1]); (folder / sys.argv[2]).touch()\n"
        "while not ((folder / 'a').exists() and (folder / 'b').exists()): time.sleep(0.001)\n"
        "print(*prepare(MazeSetSpec(count=200), MazeSetSpec(name='visgym-easy-64'), folder / 'mazes'))"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path, name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    printed = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert printed[0] == printed[1]
    assert sorted(map(str, (tmp_path / "mazes").iterdir())) == sorted(printed[0])
    assert [len(load_file(Path(path))) for path in printed[0]] == [200, 64]


def test_files_are_read_by_datasets_offline_and_make_environments(tmp_path):
    """In the very call that SkyRL makes, in a process that has no hub."""
    files = prepare(MazeSetSpec(sizes=[5, 9], count=12), MazeSetSpec(name=HARD), tmp_path / "mazes")
    script = (
        "import datasets, json, sys\n"
        "table = datasets.load_dataset('parquet', data_files=sys.argv[1], keep_in_memory=True)['train']\n"
        "print(json.dumps([table[i] for i in range(len(table))]))"
    )
    offline = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    for path, count, source in zip(files, (12, 64), ("train", HARD), strict=True):
        done = subprocess.run(
            [sys.executable, "-c", script, path], env=offline, capture_output=True, text=True, check=True
        )
        table = json.loads(done.stdout)
        assert len(table) == count
        for row, maze in zip(table, load_file(path), strict=True):
            assert row.pop("prompt") == [{"role": "user", "content": "maze"}]
            assert row.pop("env_class") == "maze"
            env = MazeEnv({}, {**row, "max_turns": 3})
            assert env.maze == maze
            assert row == {
                "data_source": source,
                "maze": maze.to_text(),
                "size": maze.size,
                "shortest_path": len(maze.shortest_path()),
            }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not parquet at all", "Parquet magic bytes not found"),
        (b"", "Parquet file size is 0 bytes"),
        (
            pa.table({"text": ["a"], "n": [1]}),
            "it has no column 'maze', only text, n; give a parquet file of maze rows",
        ),
        (pa.table({"maze": ["###"]}), "cannot read a maze from '###'"),
        (pa.table({"maze": [7]}), "cannot read a maze from 7"),
    ],
)
def test_a_file_without_mazes_is_refused(tmp_path, content, reason):
    path = tmp_path / "mazes.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path)
    with pytest.raises(DatasetError) as caught:
        load_file(path)
    assert str(caught.value).startswith(f"cannot read mazes from {path}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.parquet", tmp_path):
        with pytest.raises(DatasetError, match=f"cannot read mazes from {path}: "):
            load_file(path)


def test_rows_hold_the_whole_puzzle():
    mazes = [generate_maze(size, 3, braid=0.5) for size in (5, 9, 21)]
    assert [Maze.from_text(row["maze"]) for row in rows(mazes, "some")] == mazes
    assert dataset.rows([], "some") == []
