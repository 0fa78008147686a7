"""Episodes that were really played, for tests of what is kept of them."""

import itertools

from hypothesis import strategies as st

from skyrl_maze.actions import ACTIONS, format_action
from skyrl_maze.env import MazeEnv
from skyrl_maze.maze import generate_maze

NONSENSE = (
    "",
    "I am lost",
    "<action>up down</action>",
    "<action>jump</action>",
    "\u2028\x85\n",
    "a \ud800",
)


def walked(answers, *, seed=0, size=5, max_turns=8, index=0, sample=0, **config):
    """The record of an environment that got these answers, until it ended or there are no more."""
    env = MazeEnv({"grammar": "keyword", **config}, {"seed": seed, "size": size, "max_turns": max_turns})
    env.init([])
    for answer in answers:
        if env.step(answer)["done"]:
            break
    return env.record().played_as(index, sample, None)


def path_of(size, seed):
    """The answers of a shortest path, without a stop."""
    return [format_action(move, "keyword") for move in generate_maze(size, seed).shortest_path()]


def solved(**options):
    """The record of a shortest walk."""
    path = path_of(options.get("size", 5), options.get("seed", 0))
    return walked([*path, format_action(ACTIONS[-1], "keyword")], **{"max_turns": len(path) + 1, **options})


@st.composite
def walks(draw):
    """Records of episodes of any length, any answers and any rule."""
    sayings = [*(format_action(action, "keyword") for action in ACTIONS), *NONSENSE]
    size, seed = draw(st.sampled_from([5, 7])), draw(st.integers(0, 5))
    led = path_of(size, seed)[: draw(st.integers(0, 20))]
    return walked(
        itertools.chain(led, draw(st.lists(st.sampled_from(sayings), max_size=6))),
        size=size,
        seed=seed,
        max_turns=draw(st.integers(1, 20)),
        goal_rule=draw(st.sampled_from(["stop", "reach"])),
        shaping_weight=draw(st.sampled_from([0.0, 0.5])),
        index=draw(st.integers(0, 3)),
        sample=draw(st.integers(0, 3)),
    )
