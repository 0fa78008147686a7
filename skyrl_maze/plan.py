"""What is played: mazes, rules, looks and sampling, from a recipe and what is given over it."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_maze import dataset, recipes
from skyrl_maze.actions import GoalRule
from skyrl_maze.address import Sampling
from skyrl_maze.env import MazeConfig
from skyrl_maze.errors import ConfigError, DatasetError
from skyrl_maze.maze import Maze
from skyrl_maze.records import Conditions

DEFAULT_RECIPE = "maze"
SKYRL_SEED = 42  # trainer.seed where a recipe says nothing


@dataclass(frozen=True)
class Plan:
    """All that the outcome of an evaluation depends on, but the policy.

    Attributes:
        mazes: in the order of their numbers.
        mazes_name: of a shipped set or a file; None for mazes that were drawn.
        env: rules, looks and words.
        max_turns: the turn budget.
        samples: episodes of each maze.
        sampling: how a model is asked.

    Raises:
        ConfigError: a value cannot be used.
        DatasetError: there are no mazes.
    """

    mazes: tuple[Maze, ...]
    mazes_name: str | None
    env: MazeConfig
    max_turns: int
    samples: int
    sampling: Sampling

    def __post_init__(self) -> None:
        if not self.mazes:
            raise DatasetError(f"cannot play {self.mazes_name or 'the set'}: it holds no maze")
        allowed = {
            "max_turns": (self.max_turns, 1, 100_000),
            "samples": (self.samples, 1, 100_000),
            "max_tokens": (self.sampling.max_tokens, 1, 10_000_000),
            "temperature": (self.sampling.temperature, 0, 100),
            "top_p": (self.sampling.top_p, 0, 1),
            "seed": (self.sampling.seed, 0, 2**31 - 1),
        }
        problems = [
            f"{name} = {value!r}: must be a number from {low} to {high}"
            for name, (value, low, high) in allowed.items()
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high
        ]
        if problems:
            raise ConfigError.from_problems("cannot play with these settings:", problems)

    @property
    def solvable(self) -> int:
        """How many of the mazes anyone could solve within the budget."""
        return dataset.solvable(self.mazes, self.env.goal_rule, self.max_turns)

    def conditions(self, policy: str, endpoint: str | None) -> Conditions:
        """The part of a summary that is known before."""
        return Conditions(
            policy=policy,
            endpoint=endpoint,
            mazes=self.mazes_name,
            goal_rule=GoalRule(self.env.goal_rule),
            max_turns=self.max_turns,
            grammar=self.env.grammar,
            theme=self.env.theme,
            temperature=0.0 if endpoint is None else float(self.sampling.temperature),
        )

    def settings(self, policy: str, endpoint: str | None) -> dict[str, Any]:
        """The plan and the policy as JSON values, to tell a continued evaluation from another one."""
        keys = "\n".join(maze.key for maze in self.mazes)
        template = self.env.prompt_template
        return {
            "policy": policy,
            "endpoint": endpoint,
            "mazes": self.mazes_name,
            "maze_keys": hashlib.sha256(keys.encode()).hexdigest(),
            "samples": self.samples,
            "max_turns": self.max_turns,
            **asdict(self.env),
            "prompt_template": None if template is None else Path(template).read_text(encoding="utf-8"),
            **asdict(self.sampling),
        }


def plan_of(
    recipe: str | None,
    source: str | None,
    overrides: list[str],
    **over: int | float | None,
) -> Plan:
    """The plan of a recipe, with other mazes if `source` is given.

    Args:
        recipe: a shipped recipe or a file; `maze` if None.
        source: a shipped set or a .parquet file; the recipe's own evaluation set if None.
        overrides: `key=value` over the recipe's settings.
        over: `max_turns`, `samples`, `max_tokens`, `temperature` and `seed` where they are not None.

    Raises:
        ConfigError: the recipe cannot be read, lacks what is needed, or a value cannot be used.
        DatasetError: the mazes cannot be read.
    """
    settings = recipes.read_settings([f"+recipe={recipe or DEFAULT_RECIPE}", *overrides])
    needs = (
        "data.mazes.eval, environment.skyrl_gym.maze, generator.max_turns and "
        "generator.eval_sampling_params with max_generate_length and temperature"
    )
    with recipes.well_formed(recipe or DEFAULT_RECIPE, "play", needs):
        generator, spec = settings["generator"], dataset.MazeSetSpec(**settings["data"]["mazes"]["eval"])
        env = MazeConfig.from_any(settings["environment"]["skyrl_gym"]["maze"])
        sampling = generator["eval_sampling_params"]
        found = {
            "max_turns": generator["max_turns"],
            "samples": generator.get("eval_n_samples_per_prompt", 1),
            "max_tokens": sampling["max_generate_length"],
            "temperature": sampling["temperature"],
            "top_p": sampling.get("top_p", 1.0),
            "seed": settings.get("trainer", {}).get("seed", SKYRL_SEED),
        }
        drawn = dataset.mazes_of(spec) if source is None else dataset.load(source)
    found |= {name: value for name, value in over.items() if value is not None}
    return Plan(
        mazes=tuple(drawn),
        mazes_name=spec.name if source is None else Path(source).name,
        env=env,
        max_turns=found["max_turns"],
        samples=found["samples"],
        sampling=Sampling(found["max_tokens"], found["temperature"], found["top_p"], found["seed"]),
    )
