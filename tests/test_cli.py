"""The command line tool: what it prints, what it writes, and how it refuses."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from skyrl_maze import __version__, dataset, recipes
from skyrl_maze.maze import generate_maze
from skyrl_maze.render import render

EASY, HARD = "visgym-easy-64", "visgym-hard-64"


@pytest.fixture
def run(run_skyrl_maze, monkeypatch, tmp_path_factory):
    """`skyrl-maze ...` on a terminal of the usual width, in a folder that is not `tmp_path`."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    monkeypatch.setenv("COLUMNS", "100")
    return run_skyrl_maze


@pytest.fixture
def printed(run):
    """Runs a command that must succeed; gives its lines, runs of spaces as one."""

    def printed(*argv):
        code, out, err = run(*argv)
        assert (code, err) == (0, "")
        return [" ".join(line.split()) for line in out.splitlines()]

    return printed


@pytest.fixture
def refused(run):
    """Runs a command that must fail with an error of the package; gives the message."""

    def refused(*argv):
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "Traceback" not in err
        return err.removeprefix("error: ").rstrip("\n")

    return refused


# --- the tool as a whole


def test_version(printed):
    assert printed("--version") == [f"skyrl-maze {__version__}"]


@pytest.mark.parametrize("command", [[], ["recipes"], ["recipes", "show"], ["maze"], ["audit"], ["sets"]])
def test_help_teaches_with_an_example(run, command):
    code, out, _ = run(*command, "--help")
    text = " ".join(out.split())
    assert code == 0
    assert ("Example: skyrl-maze " if command else "skyrl.entrypoints.main_base +recipe=NAME") in text


@pytest.mark.parametrize(
    "command", [["bogus"], ["maze", "--size", "big"], ["recipes", "show"], ["sets", "--x"]]
)
def test_a_usage_error_is_code_2(run, command):
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert "Usage: skyrl-maze" in err


@pytest.mark.parametrize("arguments", [["--help"], ["recipes", "show", "maze"]])
def test_looking_loads_neither_trainer_nor_data_formats(arguments):
    heavy = ("torch", "ray", "vllm", "skyrl", "transformers", "skyrl_gym")
    heavy += ("pandas", "pyarrow", "jinja2", "aiohttp")
    code = (
        f"import sys; from skyrl_maze import cli; sys.argv = {['skyrl-maze', *arguments]!r}\n"
        "try: cli.main()\n"
        f"except SystemExit: print('loaded:', *[name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("loaded:")


# --- recipes


def test_recipes_are_listed_with_purpose_and_hardware(run):
    code, out, _ = run("recipes")
    text = " ".join(out.split())
    assert code == 0
    assert text.startswith("recipe purpose hardware")
    for name in recipes.names():
        assert f"\n{name} " in out
    assert "the published run on one machine. 1 node with 8 GPUs of 80 GB or more." in text


def test_a_recipe_is_shown_with_what_it_extends(run):
    code, out, err = run("recipes", "show", "maze_1node", "trainer.seed=3", "run.root=/r")
    assert (code, err) == (0, "")
    assert out.startswith("# Purpose:  the published run on one machine.\n# Hardware: ")
    settings = yaml.safe_load(out)
    assert settings == recipes.read_settings(["+recipe=maze_1node", "trainer.seed=3", "run.root=/r"])
    assert settings["trainer"]["seed"] == 3
    assert settings["trainer"]["ckpt_path"] == "/r/checkpoints"
    assert settings["generator"]["max_turns"] == 18  # from the recipe it extends


@pytest.mark.parametrize("name", recipes.names())
def test_what_is_shown_is_itself_that_recipe(run, tmp_path, name):
    path = tmp_path / "shown.yaml"
    path.write_text(run("recipes", "show", name)[1], encoding="utf-8")
    assert recipes.read_settings([f"+recipe={path}"]) == recipes.read_settings([f"+recipe={name}"])
    assert recipes.about(path) == recipes.about(recipes.find(name))


def test_show_refuses_like_training_does(refused):
    assert refused("recipes", "show", "maz").startswith("no recipe 'maz'; did you mean 'maze'?; shipped: ")
    assert "'trainer.seed' is not a setting" in refused("recipes", "show", "maze", "trainer.seed")
    assert "given twice" in refused("recipes", "show", "maze", "trainer.seed=1", "trainer.seed=2")


# --- maze


def test_a_maze_is_drawn_in_plain_text(run):
    _, out, _ = run("maze", "--size", "9", "--seed", "3", "--path")
    maze = generate_maze(9, 3)
    lines = out.splitlines()
    drawn = [line.ljust(18)[::2] for line in lines[:9]]
    assert [row.translate(str.maketrans(". SG", "....")).replace(" ", ".") for row in drawn] == maze.to_rows()
    text = "".join(drawn)
    assert text.index("S") == maze.start[0] * 9 + maze.start[1]
    assert text.index("G") == maze.goal[0] * 9 + maze.goal[1]
    assert text.count(".") == len(maze.shortest_path()) - 1
    assert not any(line.endswith(" ") for line in lines)
    assert lines[9:] == [
        f"key       {maze.key}",
        f"shortest  {len(maze.shortest_path())} moves",
        f"moves     {' '.join(move.word for move in maze.shortest_path())}",
        "picture   maze-9-3.png",
    ]
    run("maze", "--seed", 3)  # the same picture once more is no conflict
    assert [path.name for path in Path.cwd().iterdir()] == ["maze-9-3.png"]


def test_a_picture_is_named_after_all_that_it_shows(run):
    run("maze")
    run("maze", "--braid", "0.25")
    run("maze", "--theme", "visgym")
    run("maze", "--braid", "1", "--theme", "visgym", "--size", "7", "--path")
    assert sorted(path.name for path in Path.cwd().iterdir()) == [
        "maze-7-0-braid1-visgym.png",
        "maze-9-0-braid0.25.png",
        "maze-9-0-visgym.png",
        "maze-9-0.png",
    ]


def test_the_path_is_drawn_only_if_asked_for(run):
    assert "." not in "".join(run("maze", "--seed", "3")[1].splitlines()[:9])


def test_a_terminal_gets_the_themes_colours(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, out, _ = run("maze", "--theme", "visgym")
    assert "48;2;169;169;169m" in out  # a wall's ground
    assert "48;2;255;0;0mG" in out
    assert "48;2;0;0;255mS" in out
    assert generate_maze(9, 0).key in out


def test_a_terminal_too_narrow_is_told(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "(a drawing needs 102 columns; see the picture instead)" in run("maze", "--size", "51")[1]
    monkeypatch.setenv("COLUMNS", "98")
    assert "(a drawing" not in run("maze", "--size", "49")[1]


@pytest.mark.parametrize("theme", ["tokens", "visgym"])
def test_the_picture_is_what_a_model_sees(printed, tmp_path, theme):
    path = tmp_path / "maze.png"
    lines = printed("maze", "--size", 7, "--seed", 5, "--braid", 0.5, "--theme", theme, "--out", path)
    maze = generate_maze(7, 5, 0.5)
    assert f"picture {path}" in lines
    assert f"key {maze.key}" in lines
    picture = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))
    assert np.array_equal(picture, render(maze, maze.start, theme))
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_picture_is_kept_unless_forced(printed, refused, tmp_path):
    path = tmp_path / "maze.png"
    path.write_bytes(b"mine")
    assert refused("maze", "--out", path) == (
        f"cannot write the picture {path}: it exists; give another name, or --force to overwrite it"
    )
    assert path.read_bytes() == b"mine"
    printed("maze", "--out", path, "--force")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_failed_write_keeps_the_old_picture_and_leaves_nothing_else(refused, monkeypatch, tmp_path):
    path = tmp_path / "maze.png"
    path.write_bytes(b"mine")

    def full(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert refused("maze", "--out", path, "--force") == (
            f"cannot write the picture {path}: No space left on device; give another place"
        )
    assert path.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing_is_told(refused, tmp_path):
    path = tmp_path / "none" / "maze.png"
    assert refused("maze", "--out", path).startswith(
        f"cannot write the picture {path}: No such file or directory"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--size", 8],
            "cannot make a maze of size 8 (int): the size must be an odd int from 5 to 199; use 7 or 9",
        ),
        (["--seed", -1], "cannot draw a maze from seed -1 (int): the seed must be an int of 0 or more"),
        (["--braid", 2], "cannot draw a maze with braid 2.0 (float)"),
        (
            ["--theme", "tokns"],
            "cannot draw a maze in theme 'tokns': choose 'tokens' or 'visgym'; did you mean 'tok",
        ),
    ],
)
def test_an_impossible_maze_is_refused_and_nothing_is_written(refused, tmp_path, argv, message):
    assert refused("maze", *argv, "--out", tmp_path / "maze.png").startswith(message)
    assert list(tmp_path.iterdir()) == []


# --- sets and audit


def test_sets_are_listed(printed):
    assert printed("sets") == [
        "set mazes sizes shortest paths",
        f"{EASY} 64 9x9 12 to 16 moves",
        f"{HARD} 64 11x11 16 to 32 moves",
    ]


def test_audit_of_a_shipped_set(printed):
    assert printed("audit", EASY, "--max-turns", "15", "--max-turns", "20") == [
        "turns solvable ceiling asked",
        "13 50 of 64 78.1%",
        "15 50 of 64 78.1% *",
        "17 64 of 64 100.0%",
        "20 64 of 64 100.0% *",
        "Under goal rule stop, 17 turns are the fewest that allow all 64 mazes.",
    ]


def test_audit_under_the_other_rule(printed):
    assert printed("audit", EASY, "--rule", "reach", "--max-turns", "12") == [
        "turns solvable ceiling asked",
        "12 50 of 64 78.1% *",
        "16 64 of 64 100.0%",
        "Under goal rule reach, 16 turns are the fewest that allow all 64 mazes.",
    ]


def test_audit_of_a_file(printed, tmp_path):
    path = tmp_path / "mine.parquet"
    dataset.write_rows(path, dataset.rows(dataset.load_set(HARD), "mine"))
    assert printed("audit", path) == printed("audit", HARD)
    assert printed("audit", path)[-1].startswith(
        "Under goal rule stop, 33 turns are the fewest that allow all 64"
    )


def test_audit_of_a_recipe_takes_its_rule_and_budget(printed):
    lines = printed("audit", "--recipe", "maze")
    assert "18 64 of 64 100.0% *" in lines
    assert lines[-1] == "Under goal rule stop, 17 turns are the fewest that allow all 64 mazes."
    assert "Under goal rule reach" in printed("audit", "--recipe", "maze_cpu")[-1]
    assert "13 50 of 64 78.1%" in printed("audit", "--recipe", "maze", "--max-turns", "15")
    assert "Under goal rule reach" in printed("audit", "--recipe", "maze", "--rule", "reach")[-1]


def test_audit_of_ones_own_recipe(printed, refused, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: maze\ngenerator: {max_turns: 15}")
    assert "15 50 of 64 78.1% *" in printed("audit", "--recipe", path)
    for broken in (
        "data: {mazes: {eval: {sise: [9]}}}",
        "data: 3",
        "data: {mazes: {eval: {name: null, sizes: 9}}}",
    ):
        path.write_text(f"extends: maze\n{broken}")
        assert refused("audit", "--recipe", path).startswith(
            f"cannot audit recipe {path}: it needs data.mazes.eval, "
        )
    path.write_text("extends: maze\ndata: {mazes: {eval: {name: visgym-easy}}}")
    assert "no maze set 'visgym-easy'; did you mean" in refused("audit", "--recipe", path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "cannot tell what to audit: give either a set or file, or --recipe NAME"),
        ([EASY, "--recipe", "maze"], "cannot tell what to audit: "),
        (
            ["visgym-easy"],
            f"no maze set or file 'visgym-easy'; did you mean '{EASY}'?; shipped: {EASY}, {HARD}; or give",
        ),
        (["--recipe", "maz"], "no recipe 'maz'; did you mean 'maze'?"),
        ([EASY, "--rule", "arrive"], "unknown goal_rule 'arrive'; choose one of stop, reach"),
        ([EASY, "--max-turns", "0"], "cannot audit a budget of 0 turns: an episode has at least 1"),
    ],
)
def test_audit_refuses(refused, argv, message):
    assert refused("audit", *argv).startswith(message)


def test_audit_refuses_files_without_mazes(refused, tmp_path):
    path = tmp_path / "mine.parquet"
    path.write_text("not parquet")
    assert "Parquet magic bytes not found" in refused("audit", path)
    pq.write_table(pa.table({"text": ["a"]}), path)
    message = refused("audit", path)
    assert message == (
        f"cannot read mazes from {path}: it has no column 'maze', only text; give a parquet file of maze rows"
    )
    pq.write_table(pa.table({"maze": pa.array([], pa.string())}), path)
    assert refused("audit", path) == f"cannot audit {path}: it holds no maze"
    assert refused("audit", tmp_path).startswith(f"cannot read mazes from {tmp_path}: ")
