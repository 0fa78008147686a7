"""The terminal shows the run, and the log file gets everything else."""

import ast
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from skyrl_maze.console import LOG_FILE, Progress, quiet_output, step_done, summary
from skyrl_maze.runlog import RunLog


def _shown(events: list[dict[str, object]]) -> str:
    stream = io.StringIO()
    with Progress(Console(file=stream, soft_wrap=True)) as progress:
        for event in events:
            progress.show(event)
        progress.done()
    return stream.getvalue()


def test_one_line_for_each_thing_done() -> None:
    text = _shown(
        [
            {"event": "starting_engines", "engines": 1},
            {"event": "loading_policy", "ranks": 2},
            {"event": "evaluating", "step": 0},
            {"event": "measured", "step": 0, "steps": 6, "eval/solve_rate": 0.125},
            {"event": "training", "step": 1, "steps": 6},
            {
                "event": "measured",
                "step": 1,
                "steps": 6,
                "train/solve_rate": 0.25,
                "reward/avg_raw_reward": 0.5,
            },
            {"event": "saved", "step": 1, "path": "x"},
        ]
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert [line.split(" 0.0 s")[0] for line in lines] == [
        "starting 1 vLLM engine(s)",
        "loading the policy on 2 rank(s)",
        "evaluating after step 0",
        "training step 1 of 6",
        "saved step 1",
    ]
    assert lines[2].endswith("evaluated 0.125")
    assert lines[3].endswith("solve rate 0.250 reward 0.500")
    assert [step_done(line) for line in text.splitlines()] == [None, None, None, (1, 6), None]


def test_an_unknown_event_is_no_fault() -> None:
    assert _shown([{"event": "something new"}]) == ""


_NOISY = """
import os, sys
from pathlib import Path
from skyrl_maze.console import quiet_output
with quiet_output(Path(sys.argv[1])) as terminal:
    print("python noise")
    os.system("echo child noise; echo child error >&2")
    os.write(2, b"raw noise\\n")
    terminal.print("shown")
print("after")
"""


def test_noise_of_every_kind_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / LOG_FILE
    done = subprocess.run(
        [sys.executable, "-c", _NOISY, str(log)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["shown", "after"]
    assert done.stderr == ""
    text = log.read_text(encoding="utf-8")
    for noise in ("python noise", "child noise", "child error", "raw noise"):
        assert noise in text


def test_output_comes_back_after_an_error(tmp_path: Path, capfd: object) -> None:
    before = os.fstat(1).st_ino
    try:
        with quiet_output(tmp_path / "log"):
            raise RuntimeError("boom")
    except RuntimeError:
        assert os.fstat(1).st_ino == before


_IMPORTING = """
import sys
from skyrl_maze.console import quiet_while
from skyrl_maze.errors import ConfigError
with quiet_while("loading"):
    print("noise of a library")
    raise {error}
"""


@pytest.mark.parametrize(("error", "shown"), [("ConfigError('bad')", False), ("ImportError('gone')", True)])
def test_what_libraries_print_is_shown_only_where_they_fail(error: str, shown: bool) -> None:
    command = [sys.executable, "-c", _IMPORTING.format(error=error)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert ("noise of a library" in done.stderr) is shown


def test_the_table_names_rates_steps_and_places(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.metrics(0, {"eval/solve_rate": 0.125})
    log.metrics(1, {"timing/step": 4.0})
    log.metrics(2, {"timing/step": 6.0, "eval/solve_rate": 0.5})
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "global_step_2").mkdir(parents=True)
    (checkpoints / "latest_ckpt_global_step.txt").write_text("2\n", encoding="utf-8")
    lora = SimpleNamespace(lora_sync_path=str(tmp_path / "missing"))
    cfg = SimpleNamespace(
        run=SimpleNamespace(root=str(tmp_path), id="maze"),
        trainer=SimpleNamespace(
            ckpt_path=str(checkpoints),
            log_path=str(tmp_path),
            policy=SimpleNamespace(model=SimpleNamespace(lora=lora)),
        ),
    )
    stream = io.StringIO()
    Console(file=stream, width=200).print(summary(cfg))
    again = io.StringIO()
    Console(file=again, width=200).print(summary(cfg, earlier_records=3))
    assert "solve rate" not in again.getvalue(), "what an earlier launch wrote is not this one's"
    later = io.StringIO()
    Console(file=later, width=200).print(summary(cfg, earlier_records=2))
    assert re.search(r"solve rate at step 2 +│ 0.500", later.getvalue()), "a run that went on began there"
    assert re.search(r"seconds per step +│ 6.0 \(of 1\)", later.getvalue())
    rows = {
        cells[0].strip(): cells[1].strip()
        for line in stream.getvalue().splitlines()
        if len(cells := line.strip("│ ").split("│")) == 2
    }
    assert rows["solve rate before"] == "0.125"
    assert rows["solve rate after"] == "0.500"
    assert rows["steps"] == "2"
    assert rows["seconds per step"] == "5.0"
    assert rows["checkpoint"] == str(checkpoints / "global_step_2")
    assert rows["adapter"] == "none"


def test_no_console_reads_markup_in_what_it_is_given():
    """Paths and messages of others have brackets too."""
    calls = [
        (path.stem, node)
        for path in (Path(__file__).parents[1] / "skyrl_maze").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
    ]
    ((module, call),) = calls
    assert module == "console", "all others call plain_console"
    assert [ast.literal_eval(k.value) for k in call.keywords if k.arg == "markup"] == [False]
