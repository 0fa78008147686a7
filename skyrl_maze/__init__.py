"""Train vision-language models to walk mazes with SkyRL's stock GRPO trainer.

The path of the data, one module a stage, each importing only those before it:

    maze -> render -> actions -> prompt -> reward -> episode -> env    the task, in numpy and pillow
    dataset -> recipes -> task -> config -> preflight                  what to train on, and how
    records -> evaluate -> results -> play                             how well a policy walks
    worker, generator -> experiment                                    inside Ray: SkyRL with parts put in
    launch                                                             the driver, behind `entrypoints`

`register()` makes the environment known to SkyRL under the name `maze`, in any project.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_maze.env import MazeConfig, MazeEnv, register
    from skyrl_maze.maze import Maze, Move, generate_maze

__version__ = "0.1.0"
__all__ = ["Maze", "MazeConfig", "MazeEnv", "Move", "generate_maze", "register"]

# In a checkout, entrypoints/, recipes/ and hyperpod/ lie beside the package; a wheel has them inside.
if (Path(__file__).parents[1] / "pyproject.toml").is_file():
    __path__.append(str(Path(__file__).parents[1]))

_HOMES = {
    "Maze": "maze",
    "Move": "maze",
    "generate_maze": "maze",
    "MazeConfig": "env",
    "MazeEnv": "env",
    "register": "env",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
