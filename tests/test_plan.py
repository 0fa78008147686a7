"""Plans: a recipe's values, what is given over them, and refusals."""

import json

import pytest

from skyrl_maze import dataset, recipes
from skyrl_maze.address import Sampling
from skyrl_maze.config import build_config
from skyrl_maze.errors import ConfigError, DatasetError
from skyrl_maze.plan import SKYRL_SEED, plan_of

EASY, HARD = "visgym-easy-64", "visgym-hard-64"


def test_a_recipe_gives_all_values():
    plan = plan_of("maze", None, [])
    assert (plan.mazes_name, plan.max_turns, plan.samples) == (EASY, 18, 1)
    assert plan.sampling == Sampling(max_tokens=256, temperature=0.0, top_p=1.0, seed=SKYRL_SEED)
    assert list(plan.mazes) == dataset.load_set(EASY)
    assert (plan.env.theme, plan.env.grammar, plan.env.goal_rule) == ("visgym", "tuple", "stop")
    assert plan_of(None, EASY, []) == plan


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_plan_is_what_the_trainer_evaluates(recipe):
    plan, cfg = plan_of(recipe, None, []), build_config([f"+recipe={recipe}"])
    params = cfg.generator.eval_sampling_params
    assert plan.env == cfg.environment.skyrl_gym.maze
    assert list(plan.mazes) == dataset.mazes_of(cfg.data.mazes.eval)
    assert plan.max_turns == cfg.generator.max_turns
    assert plan.samples == cfg.generator.eval_n_samples_per_prompt
    assert plan.sampling == Sampling(
        params.max_generate_length, params.temperature, params.top_p, cfg.trainer.seed
    )


def test_what_is_given_goes_over_the_recipe():
    theme = ["environment.skyrl_gym.maze.theme=tokens", "environment.skyrl_gym.maze.cell_px=8"]
    plan = plan_of("maze_cpu", HARD, theme, max_turns=33, temperature=0.5)
    assert (plan.mazes_name, plan.max_turns, plan.samples, plan.sampling.temperature) == (HARD, 33, 8, 0.5)
    assert (plan.env.cell_px, plan.env.grammar) == (8, "keyword")


def test_a_file_of_mazes_can_be_played(tmp_path):
    path = tmp_path / "mine.parquet"
    dataset.write_rows(path, dataset.rows(dataset.load_set(EASY)[:3], "x"))
    plan = plan_of(None, str(path), [])
    assert (plan.mazes_name, len(plan.mazes)) == ("mine.parquet", 3)


def test_how_many_can_be_solved():
    assert plan_of(None, EASY, [], max_turns=15).solvable == 50


def test_settings_are_json_and_tell_what_matters(tmp_path):
    template = tmp_path / "words.txt"
    template.write_text("Walk $size")
    over = [f"environment.skyrl_gym.maze.prompt_template={template}"]
    settings = plan_of(None, EASY, over).settings("qwen", "http://host/v1")
    assert json.loads(json.dumps(settings)) == settings
    assert settings["prompt_template"] == "Walk $size"
    plain = plan_of(None, EASY, []).settings("qwen", "http://host/v1")
    assert {name for name in settings if settings[name] != plain[name]} == {"prompt_template"}
    other = plan_of(None, HARD, []).settings("qwen", "http://host/v1")
    assert {name for name in plain if plain[name] != other[name]} == {"mazes", "maze_keys"}


def test_a_summary_says_the_temperature_of_a_model_only():
    plan = plan_of(None, EASY, [], temperature=0.7)
    assert plan.conditions("qwen", "http://host/v1").temperature == 0.7
    assert plan.conditions("oracle", None).temperature == 0.0


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"max_turns": 0}, "max_turns = 0: must be a number from 1"),
        ({"samples": 0}, "samples = 0: must be a number from 1"),
        ({"max_tokens": -1}, "max_tokens = -1: must be"),
        ({"temperature": float("nan")}, "temperature = nan: must be"),
        ({"seed": 2**31}, "seed = 2147483648: must be"),
    ],
)
def test_impossible_values_are_refused(over, problem):
    with pytest.raises(ConfigError, match=problem):
        plan_of(None, EASY, [], **over)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="did you mean 'visgym-easy-64'"):
        plan_of(None, "visgym-easy", [])
    with pytest.raises(ConfigError, match="no recipe 'maz'"):
        plan_of("maz", None, [])
    with pytest.raises(ConfigError, match="unknown key 'colour'"):
        plan_of(None, EASY, ["environment.skyrl_gym.maze.colour=red"])
    bare = tmp_path / "bare.yaml"
    bare.write_text("generator: {max_turns: 3}\n")
    with pytest.raises(ConfigError, match=r"cannot play recipe .*bare.yaml: it needs data.mazes.eval"):
        plan_of(str(bare), None, [])


def test_an_empty_file_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"maze": pa.array([], pa.string())}), path)
    with pytest.raises(DatasetError, match=r"cannot play none\.parquet: it holds no maze"):
        plan_of(None, str(path), [])
