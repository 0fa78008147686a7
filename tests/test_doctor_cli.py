"""`skyrl-maze doctor` as it is called: table, JSON, exit codes, and what it cannot check."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import HYPERPOD, built

from skyrl_maze import _compat

DOCTOR = [str(Path(sysconfig.get_path("scripts")) / "skyrl-maze"), "doctor"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("MAZE_", "RAY_"))}
PUBLISHED = str(HYPERPOD / "overlays/published")
STORAGE = str(HYPERPOD / "overlays/storage-new")


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """SkyRL and vLLM talk when they are imported, once in a process."""
    _compat.install()
    from skyrl_maze.config import build_config

    build_config(["+recipe=maze"])


def doctor(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOCTOR, *arguments],
        env={**CLEAN, "COLUMNS": "160"},
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_what_fits_is_a_table_and_nothing_else() -> None:
    done = doctor(PUBLISHED, STORAGE)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["check", "found", "what", "to", "do"]
    assert lines[1].split()[:3] == ["manifests", "pass", "RayCluster"]
    assert lines[-1] == "15 checks: 10 pass, 5 warn, 0 fail"


@pytest.mark.slow
def test_scripts_get_json_and_an_exit_code() -> None:
    things: list[Any] = [*built("published")]
    text = yaml.safe_dump_all(things).replace("rayVersion: 2.57.0", "rayVersion: 2.58.0")
    done = doctor("-", "--json", "--set=trainer.train_batch_size=32", given=text)
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads(done.stdout)
    assert said["status"] == "fail"
    assert {c["check"] for c in said["checks"] if c["status"] == "fail"} == {"batches", "ray"}


@pytest.mark.parametrize(
    "overlays", [("published", "storage-existing", "access", "serving-vllm"), ("published",)], ids=len
)
def test_what_the_page_asks_fails_nowhere(overlays: tuple[str, ...], run_skyrl_maze: Any) -> None:
    places = [str(HYPERPOD / "overlays" / overlay) for overlay in overlays]
    another_run = ["--set", "run.id=maze-b", "--set", "trainer.policy.optimizer_config.lr=3.0e-5"]
    code, out, err = run_skyrl_maze("doctor", *places, *(another_run if len(places) == 1 else []), "--json")
    assert (code, err) == (0, "")
    by_name = {check["check"]: check for check in json.loads(out)["checks"]}
    warned = {name for name, check in by_name.items() if check["status"] == "warn"}
    of_the_model = {"context", "adapter", "placeholders"}
    assert warned == (of_the_model if len(places) > 1 else of_the_model | {"serving", "disk", "access"})
    root = "/shared/runs/maze-b" if len(places) == 1 else "/shared/runs/maze"
    assert by_name["folders"]["found"] == [f"all below {root}; checkpoints and exports apart"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-cluster"], "error: nothing to check: give an overlay's folder"),
        (
            ["nowhere.yaml"],
            "error: 1 problem(s) in what was given:\n  - nowhere.yaml: cannot be read (No such",
        ),
        (
            [PUBLISHED, "--set", "trainer.sed=3"],
            "trainer.sed: there is no such setting; did you mean 'seed'?",
        ),
        ([PUBLISHED, "--recipe", "mze"], "no recipe 'mze'; did you mean 'maze'?"),
        ([STORAGE], "error: no recipe: give --recipe NAME"),
    ],
)
def test_what_cannot_be_checked_is_one_error(arguments: list[str], said: str, run_skyrl_maze: Any) -> None:
    code, out, err = run_skyrl_maze("doctor", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_options_that_are_wrong_are_usage_errors(run_skyrl_maze: Any) -> None:
    for arguments in (["--limit-s", "0"], ["--clutser"]):
        assert run_skyrl_maze("doctor", PUBLISHED, *arguments)[0] == 2


def test_a_cluster_that_does_not_answer_is_an_error(
    run_skyrl_maze: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for arguments in ([], ["--cluster"], ["--cluster", PUBLISHED]):
        code, _, err = run_skyrl_maze("doctor", *arguments)
        assert code == 2
        assert "RAY_ADDRESS=127.0.0.1:1 names a Ray cluster that does not answer" in err


def test_help_teaches_with_an_example(run_skyrl_maze: Any) -> None:
    code, out, _ = run_skyrl_maze("doctor", "--help")
    assert code == 0
    assert "Example: skyrl-maze doctor hyperpod/overlays/published" in " ".join(out.split())
