"""Every command of the documentation is run: here, or by the test that is named for it."""

import re
import shlex
import subprocess
import sysconfig
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Command -> the test that runs it, or its like with a wheel that lies on disk.
MAIN = "skyrl.entrypoints.main_base +recipe=maze"
OVERRIDE = "trainer.override_entrypoint=skyrl_maze.entrypoints.main_base +recipe=maze"
WITH_WHEEL = ".venv/bin/uv run --with dist/skyrl_maze-0.1.0-py3-none-any.whl"
EXTRA = "uv pip install --override override.txt 'skyrl_maze[cpu]'"
EASY = "--mazes visgym-easy-64 --out results/qwen"
OVERLAYS = " ".join(f"hyperpod/overlays/{name}" for name in ("published", "storage-new", "serving", "access"))
# What `console` blocks begin with, which no test runs; and what may be in them.
NEEDS_AWS = "# needs AWS"
OF_CLUSTERS = {"aws", "docker", "helm", "kubectl", "pip", "ray", "skyrl-maze lora upload", "vllm"}
ELSEWHERE = {
    "make rehearse": "test_rehearsal.py",
    "make mini": "test_mini.py",
    "make test": "the run that this test is part of",
    "skyrl-maze report runs/maze-cpu --out report.html": "test_report_cli.py",
    "skyrl-maze report runs/maze-cpu runs/mine --out both.html": "test_report_cli.py",
    "python benchmarks/generator.py --turns 20": "test_benchmarks.py",
    "kubectl kustomize hyperpod/overlays/published": "test_hyperpod.py",
    f"skyrl-maze doctor {OVERLAYS}": "test_doctor_cli.py",
    "kubectl kustomize hyperpod/overlays/published | skyrl-maze doctor - --json": "test_doctor_cli.py",
    "python benchmarks/lora.py": "test_benchmarks.py",
    MAIN: "test_launch.py",
    f"uv run --with skyrl_maze {MAIN}": "test_packaging.py",
    f"python -m skyrl.train.entrypoints.main_base {OVERRIDE}": "test_launch.py",
    "pip install 'skyrl_maze[gpu]'": "test_packaging.py",
    f"echo 'torch==2.13.0' > override.txt && {EXTRA}": "test_packaging.py",
    "skyrl-maze evaluate runs/maze-cpu": "test_rehearsal.py",
    "skyrl-maze evaluate runs/maze-cpu/evaluations/step-00000000": "test_rehearsal.py",
    f"skyrl-maze play --endpoint http://host:8000/v1 --model qwen {EASY}": "test_play_cli.py",
    "skyrl-maze compare results/compass results/qwen": "test_play_cli.py",
    f"VIRTUAL_ENV=$PWD/.venv UV_COMPILE_BYTECODE=1 {WITH_WHEEL} {MAIN}_cpu": "test_packaging.py",
}


def _blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"^ *```{language}\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    return [
        (page.name, textwrap.dedent(block))
        for page in PAGES
        for block in pattern.findall(page.read_text(encoding="utf-8"))
    ]


COMMANDS = sorted({line for _, block in _blocks("sh") for line in block.splitlines() if line.strip()})


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_the_command_works(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    arguments = [str(ROOT / a) if (ROOT / a).is_file() else a for a in arguments]
    done = subprocess.run(
        [str(SCRIPTS / program), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_other_command_has_its_test() -> None:
    assert set(ELSEWHERE) <= set(COMMANDS), "a command that is no longer documented"
    for command, place in ELSEWHERE.items():
        assert place.startswith("the run") or (ROOT / "tests" / place).is_file(), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_one_that_is_run_or_marked(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
    # A block without a language is a drawing; on the page of the cluster there is none.
    drawings = set() if page.name == "hyperpod.md" else {"", "text"}
    assert set(fences[::2]) <= {"sh", "console", "python", "yaml"} | drawings
    assert set(fences[1::2]) <= {""}


@pytest.mark.parametrize(("page", "block"), _blocks("console"))
def test_what_no_test_runs_says_that_it_needs_aws(page: str, block: str) -> None:
    mark, *commands = block.replace("\\\n", " ").splitlines()
    assert (page, mark) == ("hyperpod.md", NEEDS_AWS)
    assert commands
    for command in commands:
        assert any(command.startswith(f"{program} ") for program in OF_CLUSTERS), command
        assert not command.startswith("kubectl kustomize"), "a test can run it: make it a block of sh"
        for overlay in re.findall(r"hyperpod/\S+", command.partition(" --tag ")[0]):
            assert (ROOT / overlay).exists(), overlay


def test_what_needs_aws_is_in_no_block_that_is_run() -> None:
    assert not [command for command in COMMANDS if command.startswith("#")]


@pytest.mark.parametrize(("page", "code"), _blocks("python"))
def test_the_example_runs(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {})


def test_the_example_recipe_can_be_run(tmp_path: Path) -> None:
    from skyrl_maze import _compat

    _compat.install()
    from skyrl_maze.config import build_config

    [(_, recipe)] = _blocks("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(recipe, encoding="utf-8")
    cfg = build_config([f"+recipe={path}"])
    assert cfg.data.mazes.train.sizes == [7, 9]
    assert cfg.trainer.policy.optimizer_config.lr == 3.0e-5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []
