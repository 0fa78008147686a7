"""`skyrl-maze play`, `evaluate` and `compare` as a user calls them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_endpoint import endpoint, says

from skyrl_maze import dataset
from skyrl_maze.results import EPISODES_FILE, SUMMARY_FILE, read_episodes, read_result

EASY = "visgym-easy-64"
SECRET = "sk-not-to-be-seen"


@pytest.fixture
def run(run_skyrl_maze, monkeypatch):
    """Runs `skyrl-maze ...`; gives exit code, stdout in one line, and stderr."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*argv):
        code, out, err = run_skyrl_maze(*argv)
        assert "Traceback" not in out + err
        return code, " ".join(out.split()), err

    return run


@pytest.fixture
def few(tmp_path):
    """A file of the first four mazes."""
    path = tmp_path / "few.parquet"
    dataset.write_rows(path, dataset.rows(dataset.load_set(EASY)[:4], "few"))
    return path


def stops(_asked, _number):
    return says("<think>no idea</think>('stop', 'stop')")


@pytest.mark.parametrize("command", ["play", "evaluate", "compare"])
def test_help_teaches_with_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Example: skyrl-maze " in out


def test_the_oracle_solves_a_whole_set(run):
    code, out, err = run("play", "--policy", "oracle", "--mazes", EASY, "--out", "x")
    assert (code, err) == (0, "")
    assert "oracle on visgym-easy-64 rule stop, 18 turns" in out
    assert "looks and grammar visgym, tuple solved 64 of 64" in out
    assert "SPL 1.000" in out
    assert "16 moves 14 14, 100.00% 78.47% to 100.00%" in out
    summary = json.loads(Path("x", SUMMARY_FILE).read_text())
    assert (summary["policy"], summary["endpoint"], summary["mazes"]) == ("oracle", None, EASY)
    assert run("evaluate", "x") == (0, out, "")


def test_a_budget_that_is_too_small_is_said(run):
    code, out, err = run("play", "--policy", "oracle", "--mazes", EASY, "--out", "x", "--max-turns", 15)
    assert (code, err) == (0, "note: within 15 turns only 50 of the 64 mazes can be solved at all\n")
    assert "solved 50 of 64, 78.12%" in out


def test_a_model_is_asked_over_http(run, few, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    with endpoint(stops) as server:
        arguments = ("--endpoint", server.url, "--model", "qwen", "--mazes", few, "--out", "x")
        code, out, err = run("play", *arguments, "--api-key-env", "MY_KEY", "--max-tokens", 99, "--seed", 3)
    assert (code, err) == (0, "")
    assert "qwen on few.parquet rule stop, 18 turns" in out
    assert f"looks and grammar visgym, tuple endpoint {server.url} temperature 0" in out
    assert "ended by stopped_early 4" in out
    assert len(server.asked) == 4
    body = server.asked[0].body
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("qwen", 99, 0.0, 3)
    assert body["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert server.asked[0].headers["Authorization"] == f"Bearer {SECRET}"
    for path in Path("x").rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text()
    assert read_result(Path("x")).episodes[0].turns[0].text == "<think>no idea</think>('stop', 'stop')"


def test_the_usual_variable_holds_the_key(run, few, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with endpoint(stops) as server:
        run("play", "--endpoint", server.url, "--model", "qwen", "--mazes", few, "--out", "x")
    assert server.asked[0].headers["Authorization"] == f"Bearer {SECRET}"


def test_a_recipe_gives_the_mazes(run):
    code, out, _ = run("play", "--policy", "random", "--recipe", "maze_cpu", "--out", "x", "--seed", 1)
    assert code == 0
    assert "random on drawn mazes rule reach, 12 turns looks and grammar tokens, keyword" in out
    assert len(read_result(Path("x")).episodes) == 4 * 8


def test_gifs_are_written(run, few):
    assert run("play", "--policy", "oracle", "--mazes", few, "--out", "x", "--gif")[0] == 0
    assert sorted(os.listdir("x/gifs")) == [f"maze-00{i}.gif" for i in range(4)]


def test_an_episode_with_an_error_is_told(run, few):
    def answer(asked, number):
        return says(None) if number == 2 else says("('stop', 'stop')")

    with endpoint(answer) as server:
        arguments = ("--endpoint", server.url, "--model", "m", "--mazes", few, "--out", "x")
        code, out, err = run("play", *arguments, "--concurrency", 1)
    assert code == 0
    assert "errors 1" in out
    assert err == (
        "note: 1 episodes ended with an error and count as unsolved; the first, maze 3: "
        "reply: the reply holds no text but NoneType\n"
    )


def test_a_call_after_a_failure_goes_on(run, few):
    def answer(_asked, number):
        return says("('stop', 'stop')") if number < 2 else (401, {"error": {"message": "expired"}}, {})

    arguments = ("--model", "m", "--mazes", few, "--out", "x", "--concurrency", 1)
    with endpoint(answer) as server:
        code, out, err = run("play", "--endpoint", server.url, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: cannot play with 'm' at {server.url}: HTTP 401: expired; set the key")
        assert len(read_episodes(Path("x"))[0]) == 2
        code, _, err = run("evaluate", "x")
        assert (code, "is not finished: it holds 2 episodes" in err) == (2, True)
        other = (*arguments, "--temperature", 1.0, "--max-turns", 20)
        code, _, err = run("play", "--endpoint", server.url, *other)
        assert code == 2
        assert "max_turns is 18 there and 20 now; temperature is 0.0 there and 1.0 now" in err
        server.answer = stops
        assert run("play", "--endpoint", server.url, *arguments)[0] == 0
    assert len(read_result(Path("x")).episodes) == 4
    assert len(server.asked) == 3 + 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--out", "x"], "give --mazes SET, --recipe NAME, or both"),
        (["--out", "x", "--mazes", EASY], "give --endpoint URL and --model NAME, or --policy, one of oracle"),
        (
            ["--out", "x", "--mazes", EASY, "--endpoint", "http://h/v1"],
            "give --endpoint URL and --model NAME",
        ),
        (["--out", "x", "--mazes", EASY, "--policy", "oracel"], "did you mean 'oracle'"),
        (["--out", "x", "--mazes", EASY, "--policy", "oracle", "--model", "m"], "leave either out"),
        (["--out", "x", "--mazes", "visgym-easy", "--policy", "oracle"], "did you mean 'visgym-easy-64'"),
        (["--out", "x", "--recipe", "maz", "--policy", "oracle"], "no recipe 'maz'"),
        (["--out", "x", "--mazes", EASY, "--policy", "oracle", "--samples", "0"], "samples = 0: must be"),
        (
            ["--out", "x", "--mazes", EASY, "--endpoint", f"http://a:{SECRET}@h/v1", "--model", "m"],
            "the endpoint holds a name or password",
        ),
        (
            [
                "--out",
                "x",
                "--mazes",
                EASY,
                "--endpoint",
                "http://h/v1",
                "--model",
                "m",
                "--api-key-env",
                "NO",
            ],
            "--api-key-env NO: that variable is not set",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_before_anything_is_written(run, arguments, reason):
    code, out, err = run("play", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert reason in err
    assert SECRET not in err
    assert not Path("x").exists()


def test_two_evaluations_are_compared(run):
    for policy in ("oracle", "greedy-compass"):
        run("play", "--policy", policy, "--mazes", EASY, "--out", policy)
    code, out, err = run("compare", "greedy-compass", "oracle")
    assert (code, err) == (0, "")
    assert "A greedy-compass 20 of 64, 31.25% 21.23% to 43.39%" in out
    assert "only A solved 0 none only B solved 44" in out
    assert "B is better, and the difference is real: chance alone is this lopsided in 1.1e-13 of" in out
    assert "there is no difference" in run("compare", "oracle", "oracle")[1]


def test_other_rules_are_refused_and_other_looks_are_told(run, few):
    changes = {"a": [], "b": ["--max-turns", 17], "c": ["environment.skyrl_gym.maze.theme=tokens"]}
    for name, over in changes.items():
        run("play", *over, "--policy", "oracle", "--mazes", few, "--out", name)
    code, _, err = run("compare", "a", "b")
    assert code == 2
    assert err.startswith("error: cannot compare: max_turns is 18 in one and 17 in the other; ")
    assert "note: theme is visgym for A and tokens for B" in run("compare", "a", "c")[1]


def test_a_damaged_result_is_refused_by_its_line(run, few):
    run("play", "--policy", "oracle", "--mazes", few, "--out", "x")
    path = Path("x", EPISODES_FILE)
    path.write_bytes(path.read_bytes().replace(b'"bumped": false', b'"bumped": true', 1))
    code, _, err = run("evaluate", "x")
    assert code == 2
    assert err.startswith(f"error: {path}:1: turn 1 bumps into a wall, or does not, and the record says")


def test_ctrl_c_keeps_what_has_ended(few, tmp_path):
    def answer(_asked, number):
        if number == 2:
            process.send_signal(signal.SIGINT)
        return says("('stop', 'stop')") if number < 2 else (503, "busy", {"Retry-After": "60"})

    command = [sys.executable, "-c", "from skyrl_maze.cli import main; main()", "play", "--mazes", str(few)]
    with endpoint(answer) as server:
        process = subprocess.Popen(
            [*command, "--endpoint", server.url, "--model", "m", "--out", "x", "--concurrency", "1"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Whoever runs the tests in the background ignores it, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "stopped: 2 episodes are kept in x; the same command goes on from there" in err
    assert "Traceback" not in err
    assert len(read_episodes(tmp_path / "x")[0]) == 2
