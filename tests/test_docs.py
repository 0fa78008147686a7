"""Every command of the documentation is run: here, or by the test that is named for it."""

import re
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / folder / "README.md" for folder in ("hyperpod", "examples/sliding_puzzle")),
    *sorted((ROOT / "docs").glob("*.md")),
]

CI = ".ci/run"
# Command -> the test that runs it, or its like with a wheel that lies on disk.
MAIN = "skyrl.entrypoints.main_base +recipe=maze"
OVERRIDE = "trainer.override_entrypoint=skyrl_maze.entrypoints.main_base +recipe=maze"
WITH_WHEEL = ".venv/bin/uv run --with dist/skyrl_maze-0.1.0-py3-none-any.whl"
EXTRA = "uv pip install --override override.txt 'skyrl_maze[cpu]'"
EASY = "--mazes visgym-easy-64 --out results/qwen"
NAMED = ("published", "storage-existing", "access", "serving-vllm")
OVERLAYS = " ".join(f"hyperpod/overlays/{name}" for name in NAMED)
ANOTHER_RUN = "--set run.id=maze-b --set trainer.policy.optimizer_config.lr=3.0e-5"
# What `console` blocks begin with, which no test runs; and what may be in them.
NEEDS_AWS = "# needs AWS"
OF_CLUSTERS = {"aws", "docker", "export", "helm", "kubectl", "pip", "ray", "skyrl-maze", "vllm"}
ELSEWHERE = {
    "make rehearse": "test_rehearsal.py",
    "make mini": "test_mini.py",
    "make": "test_bootstrap.py",
    "make setup": "test_bootstrap.py",
    "make lint": CI,
    "make test": CI,
    "make test-fast": "test_bootstrap.py",
    "make docs": "test_site.py",
    ".venv/bin/pre-commit install": "test_docs.py",
    "skyrl-maze report runs/maze-cpu --out report.html": "test_report_cli.py",
    "skyrl-maze report runs/maze-cpu runs/mine --out both.html": "test_report_cli.py",
    "skyrl-maze report runs/maze-mini --out runs/maze-mini/report.html --force": "test_mini.py",
    "skyrl-maze compare results/compass-mini runs/maze-mini/evaluations/step-00000040": "test_play_cli.py",
    "python benchmarks/generator.py --turns 20": "test_benchmarks.py",
    "kubectl kustomize hyperpod/overlays/published": "test_hyperpod.py",
    ".venv/bin/uv pip install --no-deps --editable examples/sliding_puzzle": "test_sliding_puzzle.py",
    ".venv/bin/skyrl.entrypoints.main_base +recipe=sliding_puzzle:cpu": "test_sliding_puzzle.py",
    f"skyrl-maze doctor {OVERLAYS}": "test_doctor_cli.py",
    f"skyrl-maze doctor hyperpod/overlays/published {ANOTHER_RUN}": "test_doctor_cli.py",
    "kubectl kustomize hyperpod/overlays/published | skyrl-maze doctor - --json": "test_doctor_cli.py",
    "python benchmarks/lora.py": "test_benchmarks.py",
    "python benchmarks/startup.py": "test_benchmarks.py",
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


# Fence -> what becomes of it. Whatever else would hold code is refused.
RUN, NOT_RUN, PLAIN = {"sh", "python", "yaml"}, {"console", "py", "dockerfile"}, {"text", ""}
NEEDS = "# needs "
CODE = re.compile(r"(?:\$ |import \w|from [\w.]+ import )")


@dataclass(frozen=True)
class Block:
    """A block of code on a page; an indented one has no language."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def _blocks_of(page: Path) -> list[Block]:
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    code = [token for token in tokens if token.type in ("fence", "code_block") and token.map]
    return [Block(page, token.map[0] + 1, token.info.strip(), token.content) for token in code if token.map]


BLOCKS = [block for page in PAGES for block in _blocks_of(page)]


def _quoted_file(block: Block) -> Path | None:
    """The file of the checkout that a block's first line names, as what it shows a part of."""
    named = re.match(r"# ([\w./-]+)\n", block.text)
    return ROOT / named[1] if named and (ROOT / named[1]).is_file() else None


QUOTING = [block for block in BLOCKS if _quoted_file(block)]


def _blocks(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and not _quoted_file(block)]


def _commands(block: Block) -> list[str]:
    """Its lines without comments, continued ones as one."""
    text = block.text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


COMMANDS = sorted({command for block in _blocks("sh") for command in _commands(block)})
PROGRAMS = {command.split()[0] for block in _blocks("console") for command in _commands(block)}
PROGRAMS |= {command.split()[0] for command in COMMANDS} | {
    "curl",
    "docker",
    "git",
    "hf",
    "ray",
    "sbatch",
    "uv",
}


def misplaced(block: Block) -> str | None:
    """What is wrong with a block: code that nobody runs and that does not say what it needs."""
    first = (block.text.splitlines() or [""])[0]
    if block.language in NOT_RUN:
        said = first.startswith(NEEDS) and len(first) > len(NEEDS)
        return None if said else f"its first line must say {NEEDS!r}"
    if block.language in PLAIN:
        code = [line for line in block.text.splitlines() if CODE.match(line) or line.split()[:1] == ["make"]]
        code += [line for line in _commands(block) if line.split()[0] in PROGRAMS]
        return f"not a place for {code[0]!r}" if code else None
    return None if block.language in RUN else f"{block.language!r} is not a language of these pages"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_code_is_run_or_says_what_it_needs(block: Block) -> None:
    assert misplaced(block) is None


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("console", "aws s3 ls\n", "its first line must say"),
        ("console", "# needs \naws s3 ls\n", "its first line must say"),
        ("text", "skyrl-maze sets\n", "not a place for"),
        ("", "  kubectl get pods\n", "not a place for"),
        ("text", "$ ls\n", "not a place for"),
        ("text", "from trl import SFTTrainer\n", "not a place for"),
        ("bash", "ls\n", "not a language"),
    ],
)
def test_code_in_the_wrong_place_is_found(language: str, text: str, fault: str) -> None:
    assert fault in str(misplaced(Block(Path("page.md"), 1, language, text)))


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
        if place == CI:
            assert command in (ROOT / CI).read_text(encoding="utf-8"), command
        else:
            assert (ROOT / "tests" / place).is_file(), command


@pytest.mark.parametrize("block", [b for b in _blocks("console") if b.page.name == "hyperpod.md"], ids=str)
def test_what_no_test_runs_of_a_cluster_says_that_it_needs_aws(block: Block) -> None:
    assert block.text.splitlines()[0] == NEEDS_AWS
    commands = _commands(block)
    assert commands
    for command in commands:
        assert any(command.startswith(f"{program} ") for program in OF_CLUSTERS), command
        assert not command.startswith("kubectl kustomize"), "a test can run it: make it a block of sh"
        for overlay in re.findall(r"hyperpod/\S+", command.partition(" --tag ")[0]):
            assert (ROOT / overlay).exists(), overlay


def test_the_hooks_of_git_can_be_installed(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    for command in (["git", "init", "--quiet"], [SCRIPTS / "pre-commit", "install"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / ".git/hooks/pre-commit").is_file()


@pytest.mark.parametrize("block", QUOTING, ids=str)
def test_what_is_quoted_is_there(block: Block) -> None:
    file = _quoted_file(block)
    assert file is not None
    assert block.text.partition("\n")[2] in file.read_text(encoding="utf-8")


def test_what_contributors_are_told_to_change_is_there() -> None:
    rows = re.findall(r"^\| .* \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w.*/]+/[\w.*/]*)`|\b(docs/[\w-]+\.md)", row)}
    patterns = [pattern for pair in named for pattern in pair if pattern]
    assert len(patterns) > 20
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []


def test_the_tutorial_tells_how_long_its_files_are() -> None:
    page = (ROOT / "docs/your-own-environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \| .* \| ([\d, ]+) \|$", page, re.MULTILINE)
    said = {
        name: int(n)
        for names, ns in rows
        for name, n in zip(re.findall(r"`(.*?)`", names), ns.split(","), strict=True)
    }
    folder = ROOT / "examples/sliding_puzzle/sliding_puzzle"
    assert said == {name: len((folder / name).read_text().splitlines()) for name in said}
    assert len(said) == 6


@pytest.mark.parametrize("block", _blocks("python"), ids=str)
def test_the_example_runs(block: Block) -> None:
    exec(compile(block.text, block.page.name, "exec"), {})


def test_the_example_recipe_can_be_run(tmp_path: Path) -> None:
    from skyrl_maze import _compat

    _compat.install()
    from skyrl_maze.config import build_config

    [recipe] = _blocks("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(recipe.text, encoding="utf-8")
    cfg = build_config([f"+recipe={path}"])
    assert cfg.data.mazes.train.sizes == [7, 9]
    assert cfg.trainer.policy.optimizer_config.lr == 3.0e-5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def _where_to_go(page: Path) -> dict[str, list[str]]:
    """Pages of docs/ by what a reader wants, from the table of a page."""
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    links = {wanted: re.findall(r"\]\(([^)]+)\)", cell) for wanted, cell in rows[1:]}
    places = {
        wanted: [(page.parent / link).relative_to(ROOT) for link in found] for wanted, found in links.items()
    }
    return {wanted: [str(p) for p in found if p.parts[0] == "docs"] for wanted, found in places.items()}


def test_the_readme_leads_to_every_page_and_the_site_the_same_way() -> None:
    table = _where_to_go(ROOT / "README.md")
    assert table == _where_to_go(ROOT / "docs/index.md")
    reached = {link.partition("#")[0] for links in table.values() for link in links}
    assert reached == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {"docs/index.md"}


def test_the_readme_fits_on_a_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 75


def test_the_tests_that_security_names_exist() -> None:
    named = re.findall(
        r"`(test_\w+\.py)(?:::(test_\w+))?`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    )
    assert len(named) > 10
    for file, function in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function}" in text, f"{file}::{function}"
