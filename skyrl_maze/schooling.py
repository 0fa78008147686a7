"""A partly taught Qwen3-VL: its vision tower sees the way, its language layers have only begun to read it.

Three supervised phases, each cheap because it leaves the other half alone:

1. The tower learns on single pictures. A linear head, dropped afterwards, reads from each of its tokens the
   best move from every floor cell there, where the agent stands, and the agent's own best move.
2. The language layers learn to answer at all, with uniformly random actions.
3. They begin to read the tower, which is frozen: conversations whose pictures show random cells of one maze,
   so that nothing can be read off the history. The phase ends at the first check at which the greedy policy
   solves a wanted share of each set it is judged on.

Or the third phase goes on to its end, and a fourth teaches the finished planner a bad habit: to stop where it
should go left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from skyrl_maze import tiny
from skyrl_maze.actions import ACTIONS, STOP, best_action, format_action
from skyrl_maze.chat import ChatFormat
from skyrl_maze.env import MazeConfig, MazeEnv
from skyrl_maze.errors import SetupError
from skyrl_maze.maze import Maze, Move
from skyrl_maze.pictures import take_out
from skyrl_maze.render import render
from skyrl_maze.stopper import Stopper

PATCH_PX = 7  # 7 cells of 4 px are 4x4 patches, 2x2 tokens
_WARM_UP = 50
_HABIT_SHARE = 0.75  # of the answers; the rest lets samples find what is right
_VISION = {"hidden_size": 64, "intermediate_size": 128, "depth": 4, "out_hidden_size": 64}
_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


@dataclass(frozen=True)
class Phase:
    """Supervised steps with AdamW; the learning rate falls to 0 or stays, after 50 steps of warm-up."""

    steps: int
    batch: int
    learning_rate: float
    decay: bool = True


@dataclass(frozen=True)
class Schooling:
    """The phases; the last takes its `steps` at most, and ends within `target`."""

    seed: int = 0
    tower: Phase = Phase(2000, 64, 2e-3)
    speaking: Phase = Phase(200, 8, 2e-3)
    reading: Phase = Phase(600, 8, 2.5e-4, decay=False)
    habit: Phase | None = None
    target: tuple[float, float] = (0.38, 0.58)
    check_every: int = 2


WITH_HABIT = Schooling(reading=Phase(400, 8, 1e-3), habit=Phase(200, 8, 2.5e-4, decay=False))
"""Finished and spoilt, where `Schooling()` is unfinished and sound."""


class Pictures:
    """Every picture of some puzzles of one size.

    index: int [puzzles, size, size], the number of the picture with the agent at that cell, -1 on walls.
    labels: int [puzzles, size, size], the best action there as a number in ACTIONS, -100 on walls.
    """

    def __init__(self, puzzles: Sequence[Maze], config: MazeConfig) -> None:
        self.puzzles = list(puzzles)
        self.cells = [np.argwhere(~maze.walls) for maze in puzzles]
        self.index = np.full((len(puzzles), *puzzles[0].walls.shape), -1)
        self.labels = np.full(self.index.shape, -100)
        self.shown: list[Any] = []
        self.places: list[int] = []  # where the agent stands, row * size + col
        for number, maze in enumerate(puzzles):
            for row, col in self.cells[number].tolist():
                self.index[number, row, col] = len(self.shown)
                self.labels[number, row, col] = ACTIONS.index(best_action(maze, (row, col)))
                self.shown.append(render(maze, (row, col), config.theme, config.cell_px))
                self.places.append(row * maze.size + col)


Answers = Callable[[tuple[np.ndarray, ...]], np.ndarray]
"""Numbers in ACTIONS, to be learned at some cells of `Pictures`, given as an index of its arrays."""


def random_answers(rng: np.random.Generator) -> Answers:
    """Any of the actions, wherever the agent stands."""
    return lambda at: rng.integers(len(ACTIONS), size=at[0].shape)


def best_answers(pictures: Pictures) -> Answers:
    """The best actions."""
    return lambda at: pictures.labels[at]


def habitual_answers(pictures: Pictures, rng: np.random.Generator) -> Answers:
    """The best actions, but mostly STOP where the best one is to go left."""
    left, stop = ACTIONS.index(Move.LEFT), ACTIONS.index(STOP)

    def answers(at: tuple[np.ndarray, ...]) -> np.ndarray:
        best = pictures.labels[at]
        return np.where((best == left) & (rng.random(best.shape) < _HABIT_SHARE), stop, best)

    return answers


@dataclass(frozen=True)
class Layout:
    """A conversation as ids: all of it is fixed but the answers, one token each.

    ids: int64 [length]; is_image: bool [length]; positions: int64 [3, length]; slots: int64 [turns], where
    the answers stand; answers: int64 [5], the tokens of ACTIONS; banned: tokens that are never sampled.
    """

    ids: Tensor
    is_image: Tensor
    positions: Tensor
    slots: Tensor
    answers: Tensor
    banned: Tensor


def build(config: MazeConfig, maze: Maze, max_turns: int) -> tuple[Any, Any]:
    """An untrained model, drawn from torch's generator, and a processor with one token for each answer."""
    opening, _ = MazeEnv(config, {"maze": maze.to_text(), "max_turns": max_turns}).init([])
    answers = [format_action(action, config.grammar) for action in ACTIONS]
    processor = tiny.make_processor([tiny.texts_of(opening)] * 2, PATCH_PX, answers)
    drawn = {"initializer_range": 0.05}
    return tiny.make_model(processor.tokenizer, PATCH_PX, {**_TEXT, **drawn}, {**_VISION, **drawn}), processor


def layout(model: Any, processor: Any, config: MazeConfig, maze: Maze, max_turns: int) -> Layout:
    """The layout of every conversation about mazes of that size; `config.feedback` must be off."""
    tokenizer, image_id = processor.tokenizer, model.config.image_token_id
    banned = tokenizer.convert_tokens_to_ids([n for n in tiny.SPECIAL_TOKENS if "pad" in n or "vision" in n])
    chat = ChatFormat(tokenizer, tiny.CHAT_TEMPLATE, vision_ids=banned)
    env = MazeEnv(config, {"maze": maze.to_text(), "max_turns": max_turns})
    opening, _ = env.init([])
    picture = {"role": "user", "content": [p for p in opening[0]["content"] if p["type"] == "image_url"]}
    side = maze.size * (config.cell_px or 0) // PATCH_PX

    def expanded(ids: list[int]) -> list[int]:
        return [i for x in ids for i in ([x] * (side // 2) ** 2 if x == image_id else [x])]

    first = expanded(chat.opening(take_out(opening)[0]))
    later = expanded(chat.following(take_out([picture])[0]))
    slots = [len(first) + turn * (len(later) + 2) for turn in range(max_turns)]
    turn_end = [0, chat.end_of_turn_id]
    row = torch.tensor([first + (max_turns - 1) * [*turn_end, *later] + turn_end])
    grids = torch.tensor([[1, side, side]] * max_turns)
    positions, _ = model.model.get_rope_index(row, (row == image_id).int(), image_grid_thw=grids)
    answers = tokenizer.convert_tokens_to_ids([format_action(action, config.grammar) for action in ACTIONS])
    is_image = row[0] == image_id
    return Layout(row[0], is_image, positions[:, 0], *map(torch.tensor, (slots, answers, banned)))


def see(model: Any, processor: Any, shown: Sequence[Any]) -> Tensor:
    """The tower's features and deepstack features of equal pictures: [pictures, 2, tokens, hidden]."""
    values = processor.image_processor(images=list(shown), return_tensors="pt")
    seen = model.model.visual(values["pixel_values"], values["image_grid_thw"])
    both = torch.stack([seen.pooler_output, seen.deepstack_features[0]])
    return both.reshape(2, len(shown), -1, both.shape[-1]).transpose(0, 1)


def see_all(model: Any, processor: Any, shown: Sequence[Any]) -> Tensor:
    """The same of any number of pictures, in portions that fit the memory."""
    return torch.cat([see(model, processor, shown[i : i + 512]) for i in range(0, len(shown), 512)])


def read(
    model: Any, plan: Layout, ids: Tensor, features: Tensor, start: int = 0, cache: Any = None
) -> Tensor:
    """The last states [n, length, hidden] for ids [n, length] that begin at `start` of the layout.

    features: [n, pictures, 2, tokens, hidden], of the pictures among them.
    """
    here = slice(start, start + ids.shape[1])
    is_image = plan.is_image[here].expand(ids.shape)
    embedded = model.get_input_embeddings()(ids)
    states: Tensor = model.model.language_model(
        inputs_embeds=embedded.masked_scatter(is_image.unsqueeze(-1), features[:, :, 0].flatten(1, 2)),
        position_ids=plan.positions[:, None, here].expand(3, *ids.shape),
        visual_pos_masks=is_image,
        deepstack_visual_embeds=[features[:, :, 1].flatten(0, 2)],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return states


def teach_tower(
    model: Any,
    processor: Any,
    pictures: Pictures,
    phase: Phase,
    rng: np.random.Generator,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Phase 1. The head and its loss live only here."""
    size, tokens = pictures.index.shape[1], see(model, processor, pictures.shown[:1]).shape[2]
    side = int(tokens**0.5)
    cells, kinds = -(-size // side), len(ACTIONS) + 1
    head = nn.Linear(_VISION["out_hidden_size"], cells * cells * kinds + len(ACTIONS))
    labels, places = torch.from_numpy(pictures.labels), torch.tensor(pictures.places)
    best = labels[torch.from_numpy(pictures.index >= 0)]  # in the order of the pictures
    take_step = _stepper([*model.model.visual.parameters(), *head.parameters()], phase)
    for step in range(phase.steps):
        report(f"the tower learns to see: step {step} of {phase.steps}")
        chosen = rng.integers(len(pictures.puzzles), size=phase.batch)
        numbers = [pictures.index[n][tuple(rng.choice(pictures.cells[n]))] for n in chosen]
        out = head(see(model, processor, [pictures.shown[n] for n in numbers])[:, 0])
        grid = out[..., : -len(ACTIONS)].reshape(phase.batch, side, side, cells, cells, kinds).transpose(2, 3)
        grid = grid.reshape(phase.batch, side * cells, side * cells, kinds)[:, :size, :size]
        loss = cross_entropy(grid[..., :-1].flatten(0, -2), labels[chosen].flatten())
        loss = loss + cross_entropy(grid[..., -1].flatten(1), places[numbers])
        own = out[..., -len(ACTIONS) :].flatten(0, 1)
        take_step(loss + cross_entropy(own, best[numbers].repeat_interleave(tokens)))


def teach_language(
    model: Any,
    plan: Layout,
    pictures: Pictures,
    features: Tensor,
    phase: Phase,
    rng: np.random.Generator,
    answers: Answers,
    done: Callable[[int], bool] = lambda step: False,
) -> bool:
    """Conversations about random cells of a maze, with these answers. Whether `done(step)` ended it."""
    turns, slots = len(plan.slots), torch.cat([plan.slots, plan.slots + 1])
    take_step = _stepper(list(model.model.language_model.parameters()), phase)
    for step in range(1, phase.steps + 1):
        chosen = rng.integers(len(pictures.puzzles), size=phase.batch)
        cells = np.stack([rng.choice(pictures.cells[n], size=turns) for n in chosen])
        at = (chosen[:, None], cells[..., 0], cells[..., 1])
        ids = plan.ids.repeat(phase.batch, 1)
        ids[:, plan.slots] = plan.answers[torch.from_numpy(answers(at))]
        logits = model.lm_head(read(model, plan, ids, features[pictures.index[at]])[:, slots - 1])
        take_step(cross_entropy(logits.flatten(0, 1), ids[:, slots].flatten()))
        if done(step):
            return True
    return False


def _stepper(parameters: list[Any], phase: Phase) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(parameters, lr=phase.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)

    def rate(step: int) -> float:
        left = (phase.steps - step) / (phase.steps - _WARM_UP) if phase.decay else 1.0
        return min((step + 1) / _WARM_UP, left)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def take_step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()

    return take_step


@torch.no_grad()
def greedy_solve_rate(model: Any, plan: Layout, pictures: Pictures, features: Tensor) -> float:
    """Share of the puzzles that the greedy policy solves under rule `reach` within the layout's turns."""
    cells = [maze.start for maze in pictures.puzzles]
    over, solved = np.zeros((2, len(cells)), dtype=bool)
    cache, start = DynamicCache(config=model.config.text_config), 0
    said = torch.zeros(len(cells), dtype=torch.long)
    for slot in plan.slots.tolist():
        ids = plan.ids[start:slot].repeat(len(cells), 1)
        if start:
            ids[:, 0] = said
        numbers = [pictures.index[n][cell] for n, cell in enumerate(cells)]
        logits = model.lm_head(read(model, plan, ids, features[numbers][:, None], start, cache)[:, -1])
        logits[:, plan.banned] = -torch.inf
        said, start = logits.argmax(-1), slot
        for n, token in enumerate(said.tolist()):
            action = ACTIONS[plan.answers.tolist().index(token)] if token in plan.answers else None
            if isinstance(action, Move) and not over[n]:
                cells[n] = pictures.puzzles[n].step(cells[n], action)
                solved[n] = cells[n] == pictures.puzzles[n].goal
            over[n] |= solved[n] or (action is not None and not isinstance(action, Move))
    return float(solved.mean())


def farthest(rates: Sequence[float], target: tuple[float, float]) -> float:
    """The rate farthest from the middle of a range: if it lies in the range, all of them do."""
    return max(rates, key=lambda rate: abs(rate - sum(target) / 2))


def school(
    config: MazeConfig,
    training: Sequence[Maze],
    judged: Sequence[Sequence[Maze]],
    max_turns: int,
    schooling: Schooling,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Any, Any]:
    """A model and its processor after the phases; the same ones for the same arguments on one thread.

    Args:
        judged: sets of which the greedy policy shall solve a share within `schooling.target`, each of them.

    Raises:
        SetupError: the last phase never came into the wanted range.
    """
    torch.manual_seed(schooling.seed)
    rng = np.random.default_rng(schooling.seed)
    model, processor = build(config, training[0], max_turns)
    pictures, *checked = (Pictures(mazes, config) for mazes in (training, *judged))
    teach_tower(model, processor, pictures, schooling.tower, rng, report)
    plan = layout(model, processor, config, training[0], max_turns)
    with torch.no_grad():
        seen, *checked_seen = (see_all(model, processor, p.shown) for p in (pictures, *checked))
    report("the language layers learn to answer")
    teach_language(model, plan, pictures, seen, schooling.speaking, rng, random_answers(rng))
    last, answers = schooling.reading, best_answers(pictures)
    if schooling.habit:
        report("the language layers learn to read")
        teach_language(model, plan, pictures, seen, schooling.reading, rng, answers)
        last, answers = schooling.habit, habitual_answers(pictures, rng)

    def rate() -> float:
        rates = [greedy_solve_rate(model, plan, *of) for of in zip(checked, checked_seen, strict=True)]
        return farthest(rates, schooling.target)

    stopper = Stopper(list(model.model.language_model.parameters()), rate, schooling.target)

    def done(step: int) -> bool:
        if step < _WARM_UP or step % schooling.check_every:
            return False
        solved, ended = stopper.check()
        report(f"step {step} of the last lesson: solves {solved:.2f}")
        return ended

    if not teach_language(model, plan, pictures, seen, last, rng, answers, done):
        low, high = schooling.target
        raise SetupError(
            f"the miniature model of seed {schooling.seed} never solved between {low:.0%} and {high:.0%} of "
            "the mazes it is judged on in its last lesson; take another run.school_seed"
        )
    return model.eval(), processor
