"""Schooling: its shortcuts compute what the whole model computes, and it comes out the same each time."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze import _compat

_compat.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from skyrl_maze import schooling  # noqa: E402
from skyrl_maze.actions import ACTIONS, STOP, format_action  # noqa: E402
from skyrl_maze.env import MazeConfig, MazeEnv  # noqa: E402
from skyrl_maze.errors import SetupError  # noqa: E402
from skyrl_maze.maze import Move, generate_maze  # noqa: E402
from skyrl_maze.pictures import take_out  # noqa: E402
from skyrl_maze.schooling import Phase, Pictures, Schooling, farthest, layout, read, school, see  # noqa: E402

CONFIG = MazeConfig(theme="tokens", cell_px=4, grammar="keyword", goal_rule="reach", feedback=False)
MAZES = [generate_maze(7, seed) for seed in range(6)]
TURNS = 5
SHORT = Schooling(
    tower=Phase(51, 4, 2e-3),
    speaking=Phase(51, 2, 2e-3),
    reading=Phase(60, 2, 2.5e-4, decay=False),
    target=(0.0, 1.0),
)


@pytest.fixture(scope="module")
def untaught():
    torch.manual_seed(0)
    model, processor = schooling.build(CONFIG, MAZES[0], TURNS)
    return model.eval(), processor


def walk(maze, actions):
    """The chat and the pictures' numbers of an episode of these actions."""
    env = MazeEnv(CONFIG, {"maze": maze.to_text(), "max_turns": TURNS})
    chat, _ = env.init([])
    cells = [maze.start]
    for action in actions:
        answer = format_action(action, CONFIG.grammar)
        step = env.step(answer)
        chat = [*chat, {"role": "assistant", "content": answer}, *step["observations"]]
        if not step["done"]:
            cells.append(step["metadata"]["position"])
    return chat, cells


def test_the_layout_is_the_conversation_that_the_environment_has(untaught):
    """Ids, positions and logits are those of the whole model on the rendered chat."""
    model, processor = untaught
    maze, actions = MAZES[0], [Move.RIGHT, Move.UP, Move.DOWN, Move.LEFT, Move.UP]
    chat, cells = walk(maze, actions)
    plan = layout(model, processor, CONFIG, maze, TURNS)
    ids = plan.ids.clone()[None]
    ids[0, plan.slots] = plan.answers[[ACTIONS.index(action) for action in actions]]
    pictures = Pictures([maze], CONFIG)
    shown = [pictures.shown[pictures.index[0][cell]] for cell in cells]

    emptied, _ = take_out(chat)
    text = processor.apply_chat_template(emptied, tokenize=False)
    batch = processor(text=[text], images=shown, return_tensors="pt")
    length = int(plan.slots[-1]) + 2
    assert batch["input_ids"][0, :length].tolist() == ids[0, :length].tolist()
    with torch.no_grad():
        whole = model(**batch).logits[:, :length]
        features = see(model, processor, shown)
        mine = model.lm_head(read(model, plan, ids[:, :length], features[None]))
    torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)


def test_every_floor_cell_has_its_picture_and_label():
    pictures = Pictures(MAZES[:2], CONFIG)
    for number, maze in enumerate(MAZES[:2]):
        for cell in itertools.product(range(7), repeat=2):
            wall = bool(maze.walls[cell])
            assert (pictures.index[number][cell] < 0) == wall
            assert (pictures.labels[number][cell] == -100) == wall
    assert len(pictures.shown) == pictures.index.max() + 1
    assert len({picture.tobytes() for picture in map(np.asarray, pictures.shown)}) == len(pictures.shown)


def test_the_habit_is_to_stop_where_the_way_leads_left():
    pictures = Pictures(MAZES, CONFIG)
    answers = schooling.habitual_answers(pictures, np.random.default_rng(0))
    left, stop = ACTIONS.index(Move.LEFT), ACTIONS.index(STOP)
    at = np.nonzero(pictures.labels >= 0)
    best = pictures.labels[at]
    drawn = np.stack([answers(at) for _ in range(200)])
    assert np.array_equal(drawn[:, best != left], np.tile(best[best != left], (200, 1)))
    assert set(np.unique(drawn[:, best == left])) == {left, stop}
    assert 0.70 < np.mean(drawn[:, best == left] == stop) < 0.80


@pytest.mark.slow
def test_the_greedy_rate_is_that_of_real_episodes(untaught):
    """Answers of the model, one after the other, in the real environment."""
    model, processor = untaught
    plan, pictures = layout(model, processor, CONFIG, MAZES[0], TURNS), Pictures(MAZES, CONFIG)
    with torch.no_grad():
        features = see(model, processor, pictures.shown)
        solved = 0
        for number, maze in enumerate(MAZES):
            env = MazeEnv(CONFIG, {"maze": maze.to_text(), "max_turns": TURNS})
            env.init([])
            ids, numbers, done = plan.ids.clone()[None], [pictures.index[number][maze.start]], False
            for slot in plan.slots.tolist():
                logits = model.lm_head(read(model, plan, ids[:, :slot], features[numbers][None]))[0, -1]
                logits[plan.banned] = -torch.inf
                ids[0, slot] = said = int(logits.argmax())
                step = env.step(processor.tokenizer.decode([said]))
                if done := step["done"]:
                    break
                numbers.append(pictures.index[number][step["metadata"]["position"]])
            assert done
            solved += env.get_metrics()["success"]
    assert schooling.greedy_solve_rate(model, plan, pictures, features) == solved / len(MAZES)


@given(st.lists(st.integers(0, 64), min_size=1, max_size=3))
def test_the_farthest_rate_speaks_for_all(solved):
    rates, (low, high) = [n / 64 for n in solved], Schooling().target
    assert (low <= farthest(rates, (low, high)) <= high) == all(low <= rate <= high for rate in rates)


@pytest.mark.slow
def test_it_comes_out_the_same_each_time_and_another_seed_differs():
    said = []
    states = [
        school(CONFIG, MAZES[:4], [MAZES[4:]], TURNS, lessons, said.append)[0].state_dict()
        for lessons in (SHORT, SHORT, replace(SHORT, seed=1), replace(SHORT, habit=SHORT.reading))
    ]
    for other, same in ((1, True), (2, False), (3, False)):
        assert all(torch.equal(states[0][name], states[other][name]) for name in states[0]) == same
    assert any(text.startswith("step 50 of the last lesson: solves") for text in said)


@pytest.mark.slow
def test_a_model_that_misses_the_range_is_an_error():
    never = replace(SHORT, target=(2.0, 3.0))
    with pytest.raises(SetupError, match=r"take another run\.school_seed"):
        school(CONFIG, MAZES[:4], [MAZES[4:]], TURNS, never)
