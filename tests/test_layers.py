"""The shape of the code: who may import whom, what an import may cost, how long things may be."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("entrypoints", "recipes", "hyperpod")


def names(text):
    """A list that is easy to merge."""
    return text.split()


# From the bottom up: a module imports only what stands before it.
ORDER = names("""
errors durable maze render actions prompt reward episode records evaluate compare
env gymnasium_env dataset results recipes runlog gauges pictures chat trajectory faults threads
address policies endpoint plan play replay scores report report_page
demonstrations demo_rows demo_files
shards adapter merge complete versions batches checkpoints export_plan export_source export remote
findings manifests manifest_links manifest_start manifest_rules manifest_safety manifest_check
nodes collective
_compat hang_detection cpu deploy tiny stopper schooling mini advantages settings console
task limits config maze_task vision budget preflight
disk fit cluster_checks
together training_state merger serving probe applied_lora sharing worker
engine player generator adapter_trainer trainer narrator recorder exporter experiment
launch entrypoints job_server supervisor
lora_export_cli lora_cli demos_cli play_cli report_cli resubmit_cli doctor_cli serve_cli cli hyperpod
""")
HEAVY = {"torch", "ray", "vllm", "skyrl", "transformers"}
# These are the trainer's side; all others must be usable without it.
MAY_BE_HEAVY = names("""
stopper schooling advantages settings task limits config maze_task
vision budget preflight disk fit cluster_checks
together training_state merger applied_lora sharing worker
engine player generator adapter_trainer trainer narrator recorder exporter experiment
""")
BEFORE_TRAINER = ORDER[: ORDER.index("advantages")]
COMMANDS = names("""
console launch job_server supervisor
lora_export_cli lora_cli demos_cli play_cli report_cli resubmit_cli doctor_cli serve_cli cli
""")
PURE = [name for name in (*BEFORE_TRAINER, *COMMANDS) if name not in ("_compat", "stopper", "schooling")]

# Test files about the whole, not about one module.
TOPICS = names("""
layers packaging bootstrap rehearsal served docs benchmarks report_browser
hyperpod_job hyperpod_submit lost_worker observability deployed
site troubleshooting public sliding_puzzle
""")
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
PICKLE_LOADERS = {"torch.load", "np.load", "numpy.load", "pandas.read_pickle"}
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 400, 54  # docstrings and the options of a command count


def sources():
    """Every source file of the package with the name of its module, folders of several files as one."""
    for path in sorted((ROOT / "skyrl_maze").glob("*.py")):
        if path.stem != "__init__":
            yield path.stem, path
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield package, path


SOURCES = list(sources())
IDS = [str(path.relative_to(ROOT)) for _, path in SOURCES]


def own_imports(tree):
    """Names below `skyrl_maze` that are imported anywhere in a module, in functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = (
                [node.module] if node.module != "skyrl_maze" else [f"skyrl_maze.{a.name}" for a in node.names]
            )
        else:
            continue
        for name in found:
            parts = str(name).split(".")
            if parts[0] == "skyrl_maze" and len(parts) > 1 and not parts[1].startswith("__"):
                yield parts[1]


def upward_imports(name, tree):
    below = ORDER[: ORDER.index(name)]
    return [target for target in own_imports(tree) if target not in below and target != name]


def heavy_imports(tree):
    """Heavy packages that are imported when the module is; not those in functions or for type checkers."""
    found, nodes = set(), list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & HEAVY
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module).split(".")[0]} & HEAVY
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return found


def long_functions(tree):
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f.name for f in functions if f.end_lineno - f.lineno + 1 > MAX_FUNCTION_LINES]


def loaded_by(code, **environment):
    """Which heavy packages a fresh Python holds after `code`."""
    report = f"import sys; print(*[name for name in {sorted(HEAVY)!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_every_module_has_its_place_in_the_order():
    assert {name for name, _ in SOURCES} | {"hyperpod"} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize(("name", "path"), SOURCES, ids=IDS)
def test_imports_go_downward(name, path):
    assert upward_imports(name, ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        "from skyrl_maze import env",
        "from skyrl_maze.env import MazeEnv",
        "import skyrl_maze.env as e",
        "def f():\n    from skyrl_maze.env import MazeEnv",
        "from skyrl_maze import __version__, errors, env",
    ],
)
def test_an_upward_import_is_seen(code):
    assert upward_imports("maze", ast.parse(code)) == ["env"]


def rows_of_the_map():
    """(modules, packages that they need) of each row of the table in docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`.*?) \|.*\| (.*)\|$", page, re.MULTILINE):
        yield [name.rstrip("/") for name in re.findall(r"`([\w/]+)`", row[0])], re.findall(r"\w+", row[1])


def packages_behind(name):
    """Top-level packages that a module imports, in functions as well, or that modules below it do."""
    found, todo, done = set(), {name}, set()
    while todo:
        done.add(module := todo.pop())
        for tree in (ast.parse(path.read_text(encoding="utf-8")) for n, path in SOURCES if n == module):
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(str(node.module).split(".")[0])
            todo |= set(own_imports(tree)) - done
    return found


def test_the_map_shows_every_module_once():
    shown = [name for modules, _ in rows_of_the_map() for name in modules]
    assert sorted(shown) == sorted(ORDER), "docs/architecture.md has a row for every module"


def test_the_map_is_in_the_order_of_the_imports():
    above = set()
    for modules, _ in rows_of_the_map():
        above |= set(modules)
        trees = [ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES if name in modules]
        below = {target for tree in trees for target in own_imports(tree)} - above
        assert not below, f"{modules} import {below}, which stand below them"


def boxes_of_the_figure():
    """(row, box, modules) of the figure in docs/architecture.md, from the top."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    row, box, modules = 0, "", {}
    for line in re.search(r"┌.*?┘", page, re.DOTALL)[0].splitlines():
        if not line.startswith("│"):
            row += 1
            continue
        box = line[2:12].strip() or box
        modules.setdefault((row, box), []).extend(line.strip("│")[11:].split())
    return [(row, box, names) for (row, box), names in modules.items()]


def test_the_figure_shows_every_module_once_and_imports_go_down_its_rows():
    boxes = boxes_of_the_figure()
    home = {module: (row, box) for row, box, modules in boxes for module in modules}
    assert sorted(module for _, _, modules in boxes for module in modules) == sorted(ORDER)
    used = set()
    for name, path in SOURCES:
        for target in own_imports(ast.parse(path.read_text(encoding="utf-8"))):
            (row, box), (target_row, target_box) = home[name], home[target]
            assert box == target_box or row < target_row, f"{name} ({box}) imports {target} ({target_box})"
            used |= {target_box} - {box}
    assert {box for row, box, _ in boxes if row > 2} <= used, "a box that nothing needs is in the wrong row"


@pytest.mark.parametrize(
    ("modules", "needed"), list(rows_of_the_map()), ids=lambda names: ",".join(names)[:40]
)
def test_the_map_names_what_modules_need(modules, needed):
    packages = {"PIL" if word == "pillow" else word for word in needed} - {"to", "write"}
    assert packages <= {package for name in modules for package in packages_behind(name)}


@pytest.mark.parametrize(("name", "path"), SOURCES, ids=IDS)
def test_only_the_trainers_side_imports_the_trainer(name, path):
    heavy = heavy_imports(ast.parse(path.read_text(encoding="utf-8")))
    assert not heavy or name in MAY_BE_HEAVY


def test_a_heavy_import_is_seen_and_a_lazy_one_let_pass():
    assert heavy_imports(ast.parse("try:\n    import ray.util\nexcept ImportError:\n    pass")) == {"ray"}
    assert heavy_imports(ast.parse("class A:\n    from skyrl.train import x")) == {"skyrl"}
    assert heavy_imports(ast.parse("import skyrl_gym\ndef f():\n    import torch")) == set()
    lazy = "if TYPE_CHECKING:\n    import torch\nelse:\n    import vllm"
    assert heavy_imports(ast.parse(lazy)) == {"vllm"}


def pickle_reads(tree):
    """Where a module could read a pickle: an import of such a module, or a loader that takes them."""
    for node in ast.walk(tree):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in imported if name.split(".")[0] in PICKLES)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PICKLE_LOADERS:
            yield ast.unparse(node.func)


@pytest.mark.parametrize(("name", "path"), SOURCES, ids=IDS)
def test_no_module_reads_a_pickle(name, path):
    assert list(pickle_reads(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize("code", ["import pickle", "from dill import loads", "x = torch.load(f)"])
def test_a_pickle_that_is_read_is_seen(code):
    assert len(list(pickle_reads(ast.parse(code)))) == 1


def test_importing_the_pure_modules_loads_no_trainer():
    modules = [f"skyrl_maze.{name}" for name in PURE]
    assert loaded_by(f"import skyrl_maze, skyrl_maze.entrypoints.main_base, {', '.join(modules)}") == []


def test_the_merger_needs_ray_and_no_torch():
    assert loaded_by("import skyrl_maze.merger") == ["ray"]


def test_a_loaded_trainer_is_seen(tmp_path):
    (tmp_path / "torch.py").touch()
    assert loaded_by("import skyrl_maze, torch", PYTHONPATH=str(tmp_path)) == ["torch"]


@pytest.mark.parametrize(("name", "path"), SOURCES, ids=IDS)
def test_modules_and_functions_are_short(name, path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    assert long_functions(ast.parse(text)) == []


def test_a_long_function_is_seen():
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(ast.parse(f"class A:\n  async def f():\n{body}")) == ["f"]
    assert long_functions(ast.parse(f"def f():\n{body[: -len('    pass\n')]}")) == []


@pytest.mark.parametrize(("name", "path"), SOURCES, ids=IDS)
def test_every_module_says_what_it_is(name, path):
    text = path.read_text(encoding="utf-8")
    assert not text or ast.get_docstring(ast.parse(text))


def test_test_files_mirror_modules():
    tested = {path.stem.removeprefix("test_").lstrip("_") for path in (ROOT / "tests").glob("test_*.py")}
    modules = {name.lstrip("_") for name in ORDER}
    assert tested - modules - set(TOPICS) == set(), (
        "name the file after its module, or add its topic to TOPICS"
    )
    tested_alone = (*ORDER[: ORDER.index("runlog")], "config", "cli")
    assert set(tested_alone) - tested == set()
