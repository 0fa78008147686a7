"""The public surface: the names that the package exports, as they are written and as they are documented."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import skyrl_maze

ROOT = Path(__file__).parents[1]
API_PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^::: (\S+)$", API_PAGE, re.MULTILINE)

# A change here is a change of version, and a line in CHANGELOG.md.
SURFACE = {
    "Maze": [
        "class Maze()",
        "walls: NDArray[np.bool_]",
        "start: Cell",
        "goal: Cell",
        "size -> int",
        "key -> str",
        "distance_to_goal -> NDArray[np.int32]",
        "is_open(self, cell: Cell) -> bool",
        "check_open(self, cell: Any, what: str='the position') -> Cell",
        "step(self, position: Cell, move: Move) -> Cell",
        "shortest_path(self) -> list[Move]",
        "best_move(self, position: Cell) -> Move",
        "from_rows(cls, rows: Sequence[str], start: Cell, goal: Cell) -> 'Maze'",
        "to_rows(self) -> list[str]",
        "from_text(cls, text: str) -> 'Maze'",
        "to_text(self) -> str",
    ],
    "MazeConfig": [
        "class MazeConfig()",
        "theme: str = 'tokens'",
        "cell_px: Optional[int] = None",
        "grammar: str = 'tuple'",
        "goal_rule: str = 'stop'",
        "success_weight: float = 1.0",
        "format_weight: float = 0.0",
        "shaping_weight: float = 0.0",
        "feedback: bool = True",
        "budget_note: bool = False",
        "prompt_template: Optional[str] = None",
        "from_any(cls, value: 'MazeConfig | Mapping[str, Any] | None') -> 'MazeConfig'",
        "problems(self) -> list[str]",
        "weights -> RewardWeights",
    ],
    "MazeEnv": [
        "class MazeEnv(BaseTextEnv)",
        "__init__(self, env_config: MazeConfig | Mapping[str, Any] | None=None, extras: Mapping[str, "
        "Any] | None=None) -> None",
        "init(self, prompt: list[Message] | None=None) -> tuple[list[Message], dict[str, Any]]",
        "step(self, action: str) -> BaseTextEnvStepOutput",
        "record(self) -> EpisodeRecord",
        "get_metrics(self) -> dict[str, float]",
        "aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]",
    ],
    "Move": [
        "class Move(enum.IntEnum)",
        "RIGHT = 0",
        "UP = 1",
        "LEFT = 2",
        "DOWN = 3",
        "delta -> tuple[int, int]",
        "word -> str",
    ],
    "generate_maze": ["generate_maze(size: int, seed: int, braid: float=0.0) -> Maze"],
    "register": ["register() -> None"],
}


# What other packages derive from; it is imported from its module, since it needs the trainer.
TASK = [
    "class Task(ABC)",
    "env_class: ClassVar[str]",
    "config: ClassVar[type[TrainConfig]]",
    "register(self) -> None",
    "rows(self, cfg: Config) -> int",
    "write_data(self, cfg: Config) -> tuple[Path, Path]",
    "longest_messages(self, cfg: Config) -> LongestMessages",
    "problems(self, cfg: Config) -> list[str]",
    "warnings(self, cfg: Config) -> list[str]",
    "folders(self, cfg: Config) -> list[str]",
    "build_model(self, cfg: Config, progress: Progress) -> Path | None",
]


def outline(node):
    """A definition without bodies and docstrings: its name, and the public fields and methods of a class."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return [f"{node.name}({ast.unparse(node.args)}){returns}"]
    lines = [f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"]
    for part in node.body:
        if isinstance(part, ast.AnnAssign | ast.Assign):
            lines.append(ast.unparse(part))
        elif isinstance(part, ast.FunctionDef) and (part.name == "__init__" or not part.name.startswith("_")):
            kinds = {ast.unparse(decorator) for decorator in part.decorator_list}
            is_property = kinds & {"property", "functools.cached_property"}
            [line] = outline(part)
            lines.append(re.sub(r"\(self\)", "", line) if is_property else line)
    return lines


def definition(name):
    value = getattr(skyrl_maze, name)
    tree = ast.parse(inspect.getsource(inspect.getmodule(value)))
    [node] = [node for node in tree.body if getattr(node, "name", None) == name]
    return node


def test_the_names_are_these():
    assert set(skyrl_maze.__all__) == set(SURFACE)


@pytest.mark.parametrize("name", skyrl_maze.__all__)
def test_the_signatures_are_these(name):
    assert outline(definition(name)) == SURFACE.get(name)


def test_what_a_task_must_have_is_this():
    tree = ast.parse((ROOT / "skyrl_maze/task.py").read_text(encoding="utf-8"))
    [node] = [node for node in tree.body if getattr(node, "name", None) == "Task"]
    assert outline(node) == TASK


@pytest.mark.parametrize("name", skyrl_maze.__all__)
def test_what_is_public_has_a_docstring_and_stands_on_the_page(name):
    value = getattr(skyrl_maze, name)
    assert f"{value.__module__}.{name}" in DOCUMENTED
    public = [value, *(v for k, v in vars(value).items() if not k.startswith("_") and inspect.isroutine(v))]
    assert [each.__qualname__ for each in public if not inspect.getdoc(each)] == []


def test_a_changed_signature_is_seen():
    before, after = (ast.parse(f"def f(a: int{extra}) -> str: ...").body[0] for extra in ("", ", b: int = 0"))
    assert outline(before) == ["f(a: int) -> str"]
    assert outline(after) == ["f(a: int, b: int=0) -> str"]
