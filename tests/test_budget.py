"""The budget of an episode: never less than an episode takes, and what it asks for is just enough."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_maze import _compat

_compat.install()

from transformers import AutoTokenizer  # noqa: E402

from skyrl_maze import maze_task, tiny  # noqa: E402
from skyrl_maze.budget import EpisodeBudget, longest_episode  # noqa: E402
from skyrl_maze.chat import ChatFormat  # noqa: E402
from skyrl_maze.config import build_config  # noqa: E402
from skyrl_maze.env import MazeEnv  # noqa: E402
from skyrl_maze.maze import generate_maze  # noqa: E402
from skyrl_maze.pictures import take_out  # noqa: E402
from skyrl_maze.settings import TrainConfig  # noqa: E402
from skyrl_maze.vision import PictureReader, vision_tokens  # noqa: E402

budgets = st.builds(
    EpisodeBudget,
    turns=st.integers(1, 60),
    opening=st.integers(1, 3000),
    observation=st.integers(1, 2000),
    answer=st.integers(1, 500),
)


# Arithmetic


@given(budget=budgets)
def test_the_sums_are_those_of_an_episode_turn_by_turn(budget: EpisodeBudget) -> None:
    length = budget.opening
    for turn in range(budget.turns):
        if turn:
            length += budget.observation
        prompt = length
        length += budget.answer
    assert (budget.longest_prompt, budget.longest_episode) == (prompt, length)


@given(budget=budgets)
def test_exactly_enough_is_enough_and_an_unknown_limit_is_none(budget: EpisodeBudget) -> None:
    assert budget.problems(budget.longest_episode, budget.longest_prompt, budget.turns) == []
    assert budget.problems(None, budget.longest_prompt, None) == []


@given(budget=budgets)
def test_one_less_is_reported_with_the_value_that_would_do(budget: EpisodeBudget) -> None:
    whole, prompt, turns = budget.longest_episode, budget.longest_prompt, budget.turns
    [window] = budget.problems(whole - 1, prompt, turns)
    assert f"{turns} turns can take {whole} tokens" in window
    assert f"context holds {whole - 1}: raise " in window
    assert f"engine_init_kwargs.max_model_len to {whole}, or lower generator.max_turns" in window
    [longest] = budget.problems(whole, prompt - 1, turns)
    assert longest.endswith(f"raise generator.max_input_length from {prompt - 1} to {prompt}")
    [pictures] = budget.problems(whole, prompt, turns - 1)
    assert pictures.endswith(f"limit_mm_per_prompt.image from {turns - 1} to {turns}")
    assert budget.problems(whole - 1, prompt - 1, turns - 1) == [window, longest, pictures]


# Episodes that are really played


class Model:
    """Tokenizer and image processor of a model whose words are those of the environment."""

    def __init__(self, folder: Path) -> None:
        episodes = maze_task.random_walks(_config().environment.skyrl_gym.maze, [5], 12, tiny.WarmUp())
        tiny.save_random_model(folder, [tiny.texts_of(next(episodes)) for _ in range(32)])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.reader = PictureReader(str(folder))
        self.chat = ChatFormat(tokenizer, vision_ids=vision_tokens(tokenizer).banned_ids)

    def budget(self, cfg: TrainConfig) -> EpisodeBudget:
        return longest_episode(cfg, self.chat, self.reader.tokens)

    def tokens(self, messages: list[dict[str, Any]], as_ids: Any) -> int:
        emptied, urls = take_out(messages)
        return len(as_ids(emptied)) + sum(self.reader.tokens(url) - 1 for url in urls)

    def played(self, cfg: TrainConfig, size: int, seed: int, answers: list[str]) -> tuple[int, int]:
        """The last prompt and the whole of an episode, each answer as long as it may be."""
        extras = {"maze": generate_maze(size, seed).to_text(), "max_turns": cfg.generator.max_turns}
        env = MazeEnv(cfg.environment.skyrl_gym.maze, extras)
        prompt = self.tokens(env.init([])[0], self.chat.opening)
        longest_answer = cfg.generator.sampling_params.max_generate_length + 1  # cut off, then closed
        for answer in answers:
            step = env.step(answer)
            if step["done"]:
                break
            prompt += longest_answer + self.tokens(step["observations"], self.chat.following)
        return prompt, prompt + longest_answer


def _config(*overrides: str) -> TrainConfig:
    return build_config(["+recipe=maze_cpu", *overrides])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


# Every kind of answer that is not understood has a sentence of its own.
BAD = {
    "empty": "",
    "no action": "hello",
    "unknown action": "<action>jump</action>",
    "several actions": "<action>up down</action>",
}
MOVES = [f"<action>{word}</action>" for word in ("right", "up", "left", "down")]
ANSWERS = st.sampled_from([*BAD.values(), *MOVES])


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_an_episode_of_answers_that_are_not_understood_fits(model: Model, answer: str) -> None:
    cfg = _config()
    budget = model.budget(cfg)
    prompt, whole = model.played(cfg, 5, 0, [answer] * 12)
    assert prompt <= budget.longest_prompt
    assert whole <= budget.longest_episode


def test_the_budget_is_not_much_more_than_the_longest_episode(model: Model) -> None:
    cfg = _config()
    longest = max(model.played(cfg, 5, 0, [answer] * 12)[1] for answer in BAD.values())
    assert model.budget(cfg).longest_episode <= 1.05 * longest


VARIANTS = {
    "as shipped": (),
    "turns left": ("environment.skyrl_gym.maze.budget_note=true",),
    "no feedback": ("environment.skyrl_gym.maze.feedback=false",),
    "larger mazes to train on": ("data.mazes.train.sizes=[5, 9]",),
    "larger mazes to evaluate on": ("data.mazes.eval.sizes=[5, 9]",),
    "a longer answer in the evaluation": ("generator.eval_sampling_params.max_generate_length=20",),
}


@pytest.fixture(scope="module")
def variant(model: Model) -> Callable[[str], tuple[TrainConfig, EpisodeBudget]]:
    configs = {name: _config(*overrides) for name, overrides in VARIANTS.items()}
    budgets = {name: (cfg, model.budget(cfg)) for name, cfg in configs.items()}
    return lambda name: budgets[name]  # a table would fill pages where an example fails


@given(
    name=st.sampled_from(list(VARIANTS)),
    seed=st.integers(0, 10**6),
    answers=ANSWERS.map(lambda answer: [answer] * 12) | st.lists(ANSWERS, min_size=12, max_size=12),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_answered_the_episode_fits(
    model: Model, variant: Any, name: str, seed: int, answers: list[str]
) -> None:
    cfg, budget = variant(name)
    prompt, whole = model.played(cfg, 9 if "larger" in name else 5, seed, answers)
    assert prompt <= budget.longest_prompt
    assert whole <= budget.longest_episode


@pytest.mark.parametrize("turns", [1, 2, 9, 10, 99])
def test_the_number_of_turns_in_the_task_is_counted(model: Model, turns: int) -> None:
    # SkyRL wants the two lengths equal where there is a single turn.
    cfg = _config(f"generator.max_turns={turns}", "trainer.max_prompt_length=1792")
    budget = model.budget(cfg)
    assert budget.turns == turns
    assert model.played(cfg, 5, 0, [])[0] <= budget.opening


def test_the_longer_of_the_two_answers_counts(model: Model) -> None:
    longer = _config("generator.eval_sampling_params.max_generate_length=20")
    assert (model.budget(_config()).answer, model.budget(longer).answer) == (11, 21)
