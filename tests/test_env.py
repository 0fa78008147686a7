"""The environment as SkyRL sees it: messages in, messages out, one maze per row, no state shared."""

import base64
import io
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest
import skyrl_gym
from omegaconf import OmegaConf
from PIL import Image
from skyrl_gym.envs.registration import registry
from skyrl_gym.metrics import aggregate_for_environment

from skyrl_maze.actions import ACTIONS, STOP, GoalRule, Grammar, format_action
from skyrl_maze.env import MazeConfig, MazeEnv, StopReason, register
from skyrl_maze.errors import ConfigError, MazeError
from skyrl_maze.maze import generate_maze
from skyrl_maze.records import episode_line, read_episode
from skyrl_maze.render import render
from skyrl_maze.reward import RewardWeights, max_return

MAZE = generate_maze(7, seed=5)
WAY = [format_action(move, "tuple") for move in MAZE.shortest_path()]
STOP_TEXT = "('stop', 'stop')"
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "placeholder"}]


def make(config=None, **extras):
    """An environment of `MAZE` with 30 turns unless `extras` says otherwise, begun."""
    env = MazeEnv(env_config=config, extras={"maze": MAZE.to_text(), "max_turns": 30} | extras)
    env.init(PROMPT)
    return env


def text_of(message):
    return message["content"][1]["text"]


def pixels_of(message):
    scheme, _, data = message["content"][0]["image_url"]["url"].partition(",")
    assert scheme == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


@pytest.fixture
def clean_registry():
    known = dict(registry)
    registry.pop("maze", None)
    yield
    registry.clear()
    registry.update(known)


def test_init_keeps_system_messages_and_drops_the_placeholder():
    env = MazeEnv(extras={"maze": MAZE.to_text(), "max_turns": 30})
    messages, info = env.init(PROMPT)
    assert messages[0] == PROMPT[0]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert "a maze of 7 by 7 cells" in text_of(messages[1])
    assert "You have 30 turns." in text_of(messages[1])
    assert np.array_equal(pixels_of(messages[1]), render(MAZE, MAZE.start))
    assert info == {"maze_key": MAZE.key, "position": MAZE.start}
    assert len(env.init()[0]) == 1


def test_a_solved_episode_turn_by_turn():
    env = make()
    for move, answer in zip(MAZE.shortest_path(), WAY, strict=True):
        before = env.step(answer)
        assert before["reward"] == 0.0
        assert not before["done"]
        (message,) = before["observations"]
        assert message["role"] == "user"
        assert text_of(message) == f"You moved {move.word}."
        assert np.array_equal(pixels_of(message), render(MAZE, before["metadata"]["position"]))
    assert env.step(STOP_TEXT) == {
        "observations": [],
        "reward": 1.0,
        "done": True,
        "metadata": {
            "terminated": True,
            "truncated": False,
            "position": MAZE.goal,
            "stop_reason": "goal",
            "action": "stop",
            "parse_failure": None,
        },
        "postprocessed_action": None,
    }
    assert env.turns == len(WAY) + 1


def test_an_answer_not_understood_costs_a_turn_and_shows_the_picture_again():
    env = make()
    out = env.step("I am lost")
    assert out["metadata"]["action"] is None
    assert out["metadata"]["parse_failure"] == "no_action"
    assert out["metadata"]["position"] == MAZE.start
    assert text_of(out["observations"][0]).startswith("Your answer was not understood: it holds no action;")
    assert np.array_equal(pixels_of(out["observations"][0]), render(MAZE, MAZE.start))
    assert env.get_metrics()["parse_failures"] == 1


def test_move_zero_is_reported():
    # Its value is falsy.
    assert make().step("('move', 0)")["metadata"]["action"] == "right"


def test_the_budget_truncates():
    env = make(max_turns=2)
    assert not env.step("?")["done"]
    out = env.step("?")
    assert out["done"]
    assert out["observations"] == []
    assert (out["metadata"]["terminated"], out["metadata"]["truncated"]) == (False, True)
    assert out["metadata"]["stop_reason"] == StopReason.OUT_OF_TURNS


def test_arriving_ends_under_reach():
    env = make({"goal_rule": "reach"})
    outs = [env.step(answer) for answer in WAY]
    assert [out["reward"] for out in outs] == [0.0] * (len(WAY) - 1) + [1.0]
    assert outs[-1]["metadata"]["terminated"]


def test_the_budget_note_and_the_feedback_can_be_chosen():
    env = MazeEnv({"budget_note": True, "feedback": False}, {"maze": MAZE.to_text(), "max_turns": 3})
    assert text_of(env.init()[0][0]).endswith("\n3 turns left.")
    assert text_of(env.step("?")["observations"][0]) == "2 turns left."
    silent = make({"feedback": False})
    assert [part["type"] for part in silent.step("?")["observations"][0]["content"]] == ["image_url"]


def test_a_step_needs_a_running_episode():
    env = MazeEnv(extras={"maze": MAZE.to_text(), "max_turns": 3})
    with pytest.raises(MazeError, match=r"the episode has not begun; call init\(prompt\) first"):
        env.step("('move', 0)")
    env.init(PROMPT)
    env.step(STOP_TEXT)
    with pytest.raises(MazeError, match="ended after 1"):
        env.step("('move', 0)")
    env.init(PROMPT)
    assert not env.step("('move', 0)")["done"]
    env.close()
    env.close()


@pytest.mark.parametrize("goal_rule", list(GoalRule))
@pytest.mark.parametrize("grammar", list(Grammar))
@pytest.mark.parametrize("size", [5, 7, 9, 15])
def test_the_oracle_earns_exactly_the_maximum(size, grammar, goal_rule):
    for seed in range(6):
        draw = random.Random(seed)
        weights = RewardWeights(*(draw.uniform(0, 3) for _ in range(3)))
        config = MazeConfig(
            grammar=grammar,
            goal_rule=goal_rule,
            success_weight=weights.success,
            format_weight=weights.format,
            shaping_weight=weights.shaping,
            cell_px=4,
        )
        maze = generate_maze(size, seed, braid=seed / 5)
        way = [*maze.shortest_path(), *([STOP] if goal_rule == "stop" else [])]
        env = make(config, maze=maze.to_text(), max_turns=len(way))
        outs = [env.step(f"<think>hm</think>{format_action(action, grammar)}<|im_end|>") for action in way]
        total = 0.0
        for out in outs:
            total += out["reward"]
        assert total == max_return(weights)
        assert [out["done"] for out in outs] == [False] * (len(way) - 1) + [True]
        assert env.get_metrics()["spl"] == 1.0


def test_never_moving_earns_nothing():
    for answer in ("?", STOP_TEXT):
        env = make(max_turns=10)
        reward = 0.0
        done = False
        while not done:
            out = env.step(answer)
            reward, done = reward + out["reward"], out["done"]
        assert reward == 0.0


def test_circles_earn_nothing_more():
    env = make({"shaping_weight": 1.0})
    back = {"right": "('move', 2)", "left": "('move', 0)", "up": "('move', 3)", "down": "('move', 1)"}
    first = MAZE.shortest_path()[0]
    gains = [env.step(answer)["reward"] for _ in range(10) for answer in (WAY[0], back[first.word])]
    assert sum(gains) == 0.0
    assert max(gains) > 0


def test_rows_may_give_a_seed_and_a_size():
    row = {"seed": np.int64(5), "size": 7, "max_turns": np.int32(9), "maze": None, "braid": None, "note": "x"}
    env = MazeEnv(extras=row)
    assert env.maze == MAZE
    assert env.max_turns == 9
    assert MazeEnv(extras=row | {"braid": 1.0}).maze == generate_maze(7, 5, 1.0)
    # The maze itself wins over a seed.
    assert MazeEnv(extras=row | {"maze": MAZE.to_text(), "seed": 6}).maze == MAZE


@pytest.mark.parametrize(
    ("extras", "error", "message"),
    [
        (
            None,
            MazeError,
            r'a data row with nothing: a row needs "maze" \(the text of Maze.to_text\(\)\), or "seed"',
        ),
        ({"max_turns": 5, "seed": 3}, MazeError, "a data row with 'max_turns', 'seed': a row needs"),
        ({"maze": "#", "max_turns": 5}, MazeError, "exactly one of each"),
        ({"maze": 5, "max_turns": 5}, MazeError, "give the text of Maze.to_text"),
        ({"seed": -1, "size": 7, "max_turns": 5}, MazeError, "seed -1"),
        ({"seed": 1, "size": 8, "max_turns": 5}, MazeError, "size 8"),
        ({"seed": 1, "size": 7}, ConfigError, "max_turns None: extras must hold an int of 1 or more"),
        ({"seed": 1, "size": 7, "max_turns": 0}, ConfigError, "max_turns 0"),
        ({"seed": 1, "size": 7, "max_turns": True}, ConfigError, "max_turns True"),
    ],
)
def test_rows_that_hold_no_episode(extras, error, message):
    with pytest.raises(error, match=message):
        MazeEnv(extras=extras)


def test_a_picture_too_large_is_refused_before_the_start():
    with pytest.raises(MazeError, match="use a cell_px of at most"):
        MazeEnv({"cell_px": 128}, {"seed": 0, "size": 99, "max_turns": 5})


def test_config_from_what_a_trainer_holds():
    expected = MazeConfig(theme="visgym", shaping_weight=0.5)
    given = {"theme": "visgym", "shaping_weight": 0.5}
    assert MazeConfig.from_any(given) == expected
    assert MazeConfig.from_any(OmegaConf.create(given)) == expected
    assert MazeConfig.from_any(OmegaConf.structured(expected)) == expected
    assert MazeConfig.from_any(expected) is expected
    assert MazeConfig.from_any(None) == MazeConfig.from_any({}) == MazeConfig()
    assert MazeConfig.from_any(asdict(expected)) == expected


def test_the_default_config_has_no_problems():
    assert MazeConfig().problems() == []


def test_every_problem_is_named_at_once(tmp_path):
    config = MazeConfig(
        theme="visgim",
        grammar="keywords",
        goal_rule="reaches",
        success_weight=-1.0,
        format_weight=float("nan"),
        shaping_weight="1",
        feedback="yes",
        budget_note=1,
        prompt_template=str(tmp_path / "none.txt"),
    )
    problems = config.problems()
    assert len(problems) == 9
    for part in (
        "did you mean 'visgym'?",
        "did you mean 'keyword'?",
        "did you mean 'reach'?",
        "success_weight = -1.0: must be a finite number of 0 or more",
        "format_weight = nan",
        "shaping_weight = '1'",
        "feedback = 'yes': must be true or false",
        "budget_note = 1",
        "none.txt",
    ):
        assert any(part in problem for problem in problems), part
    with pytest.raises(ConfigError, match=r"(?s)visgim.*keywords.*reaches"):
        MazeEnv(config, {"maze": MAZE.to_text(), "max_turns": 5})


def test_a_cell_size_that_the_theme_lacks():
    (problem,) = MazeConfig(theme="visgym", cell_px=32).problems()
    assert "cell_px 32" in problem


def test_unknown_keys_are_named_with_bad_values():
    with pytest.raises(ConfigError) as caught:
        MazeConfig.from_any({"themes": "tokens", "gramar": "tuple", "goal_rule": "x"})
    message = str(caught.value)
    assert "environment.skyrl_gym.maze" in message
    assert "unknown key 'themes'; did you mean 'theme'?" in message
    assert "unknown key 'gramar'; did you mean 'grammar'?" in message
    assert "unknown goal_rule 'x'" in message


def test_settings_of_another_type():
    with pytest.raises(ConfigError, match=r"from list \[\]: give a MazeConfig, a mapping"):
        MazeConfig.from_any([])


def test_a_prompt_of_one_s_own(tmp_path):
    path = tmp_path / "task.txt"
    path.write_text("Maze $size, $max_turns turns. {x}\n")
    env = MazeEnv({"prompt_template": str(path)}, {"maze": MAZE.to_text(), "max_turns": 4})
    assert text_of(env.init()[0][0]) == "Maze 7, 4 turns. {x}"


def test_means_over_episodes():
    assert MazeEnv.aggregate_metrics([]) == {}
    assert MazeEnv.aggregate_metrics([{}]) == {}
    assert MazeEnv.aggregate_metrics([{"turns": 2.0}, {"success": 1.0, "turns": 4.0}, {"success": 0.0}]) == {
        "turns": 3.0,
        "success": 0.5,
        "solve_rate": 0.5,
    }


def test_metrics_before_and_after_the_end():
    env = make()
    assert env.get_metrics()["stop_reason/cut"] == 1.0
    env.step(STOP_TEXT)
    env.close()
    assert env.get_metrics()["stop_reason/stopped_early"] == 1.0


@pytest.mark.usefixtures("clean_registry")
def test_registration_works_twice_and_builds_what_skyrl_asks_for():
    register()
    register()
    env = skyrl_gym.make("maze", env_config={}, extras={"maze": MAZE.to_text(), "max_turns": 5})
    assert isinstance(env, MazeEnv)
    assert aggregate_for_environment("maze", [env.get_metrics()])["solve_rate"] == 0.0


@pytest.mark.usefixtures("clean_registry")
def test_registration_does_not_take_a_name_that_is_in_use():
    skyrl_gym.register(id="maze", entry_point="other:Env")
    with pytest.raises(ConfigError, match=r"the name belongs to 'other:Env'; .*\.deregister\('maze'\)"):
        register()


def episode_of(number):
    """All that one random episode gives out."""
    draw = random.Random(number)
    maze = generate_maze(7, number % 8)
    env = make({"shaping_weight": 0.5, "cell_px": 8}, maze=maze.to_text(), max_turns=25)
    outs = []
    while not outs or not outs[-1]["done"]:
        action = draw.choice(ACTIONS[:4]) if draw.random() < 0.97 else STOP
        outs.append(env.step(format_action(action, "tuple")))
    return outs, env.get_metrics()


def test_threads_do_not_disturb_each_other():
    numbers = range(60)
    alone = [episode_of(number) for number in numbers]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(episode_of, numbers)) == alone


def test_the_record_is_what_happened():
    env = make({"shaping_weight": 0.5})
    outs = [env.step(answer) for answer in ("hm", *WAY, STOP_TEXT)]
    record = env.record()
    assert read_episode(episode_line(record), "here") == record
    assert [turn.text for turn in record.turns] == ["hm", *WAY, STOP_TEXT]
    for turn, out in zip(record.turns, outs, strict=True):
        assert (turn.action, turn.parse_failure, turn.position, turn.reward) == (
            out["metadata"]["action"],
            out["metadata"]["parse_failure"],
            out["metadata"]["position"],
            out["reward"],
        )
    assert (record.success, record.stop_reason, record.max_turns) == (True, "goal", 30)
    assert record.return_ == sum(out["reward"] for out in outs) == 1.5


def test_a_record_can_be_asked_for_at_any_time():
    env = MazeEnv({}, {"maze": MAZE.to_text(), "max_turns": 30})
    assert env.record().turns == ()
    env.init(PROMPT)
    env.step(WAY[0])
    assert (len(env.record().turns), env.record().stop_reason) == (1, "running")
    env.init(PROMPT)
    assert env.record().turns == (), "another episode"
