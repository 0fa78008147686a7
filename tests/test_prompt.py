"""The words: the rule that is rewarded, actions as they are read, templates that cannot go wrong unseen."""

import pytest

from skyrl_maze.actions import (
    ACTIONS,
    STOP,
    FailureReason,
    GoalRule,
    Grammar,
    ParseFailure,
    format_action,
    parse_action,
)
from skyrl_maze.errors import ConfigError
from skyrl_maze.maze import Move
from skyrl_maze.prompt import action_feedback, load_template, observation_message, task_prompt, turn_text
from skyrl_maze.render import THEMES


@pytest.fixture
def write(tmp_path):
    """Writes a template file and gives its path."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "task.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.mark.parametrize("grammar", list(Grammar))
def test_the_task_shows_every_action_as_it_is_read(grammar):
    listed = [line for line in task_prompt(9, grammar, "stop").splitlines() if line.startswith("- ")]
    assert [parse_action(line, grammar) for line in listed] == list(ACTIONS)


def test_the_task_states_the_rule_that_is_rewarded():
    stop, reach = (task_prompt(9, "tuple", rule) for rule in GoalRule)
    assert "answer stop while you stand on it: that alone solves the maze" in stop
    assert "arriving there solves the maze and ends the episode" in reach
    assert "arriving there solves" not in stop


def test_the_task_gives_size_and_budget():
    text = task_prompt(11, "tuple", "stop", max_turns=20)
    assert "a maze of 11 by 11 cells" in text
    assert "You have 20 turns. Each turn" in text
    assert "You have 1 turn. " in task_prompt(11, "tuple", "stop", max_turns=1)
    assert "You have" not in task_prompt(11, "tuple", "stop")
    assert "exactly one action" in text


@pytest.mark.parametrize("theme", list(THEMES))
def test_the_task_names_the_colours_of_the_theme(theme):
    text = task_prompt(9, "tuple", "stop", theme=theme)
    looks = THEMES[theme]
    assert f"Walls are {looks.wall.words}, open floor is {looks.floor.words}" in text
    assert f"you are the {looks.agent.words} and the goal is the {looks.goal.words}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"grammar": "tupel"},
            r"unknown grammar 'tupel'; choose one of tuple, keyword; did you mean 'tuple'\?",
        ),
        ({"goal_rule": "arrive"}, r"unknown goal_rule 'arrive'; choose one of stop, reach"),
        ({"theme": "visgim"}, r"theme 'visgim'.*did you mean 'visgym'\?"),
    ],
)
def test_unknown_names(arguments, message):
    with pytest.raises(ConfigError, match=message):
        task_prompt(**{"maze_size": 9, "grammar": "tuple", "goal_rule": "stop"} | arguments)


def test_a_template_may_hold_braces_and_dollars(write):
    path = write("{size} $$5 ${size}x$size in $max_turns\n$rule\n$actions\n")
    text = task_prompt(9, "keyword", "reach", max_turns=20, template_path=path)
    first, rule, *actions = text.splitlines()
    assert first == "{size} $5 9x9 in 20"
    assert rule.startswith("Walk to the goal: arriving there")
    assert actions[0] == "- right: <action>right</action>"
    assert task_prompt(9, "keyword", "reach", template_path=path).startswith("{size} $5 9x9 in unlimited")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty; write the task in it, with any of \\$size, \\$actions, \\$rule, \\$max_turns"),
        (" \n", "it is empty"),
        ("$sise $size", r"unknown placeholder \$sise; choose from \$size, .*; did you mean 'size'\?"),
        ("$a and $b", r"unknown placeholder \$a, \$b; choose from"),
        ("$legend", r"unknown placeholder \$legend"),
        ("costs 5 $", r"a dollar sign begins no placeholder; write \$\$"),
        (b"\xff\xfe", "codec can't decode"),
    ],
)
def test_templates_that_cannot_be_used(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_template(path)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize("path", ["no/such/file.txt", "/", "nul\0byte", 5])
def test_templates_that_cannot_be_read(path):
    with pytest.raises(ConfigError, match="give the path of a readable UTF-8 text file"):
        load_template(path)


def test_feedback_says_what_happened():
    assert action_feedback(Move.RIGHT, False, "tuple") == "You moved right."
    assert action_feedback(Move.RIGHT, True, "tuple") == "A wall is in the way; you did not move."
    assert action_feedback(ParseFailure(FailureReason.NO_ACTION), False, "keyword") == (
        "Your answer was not understood: it holds no action; answer with one action such as "
        "<action>right</action> or <action>stop</action>."
    )


def test_turn_text_joins_what_there_is():
    assert turn_text() == ""
    assert turn_text("You moved up.") == "You moved up."
    assert turn_text("You moved up.", 2) == "You moved up.\n2 turns left."
    assert turn_text(None, 1) == "1 turn left."


def test_the_picture_comes_before_the_text():
    picture = {"type": "image_url", "image_url": {"url": "data:x"}}
    assert observation_message("hello", "data:x") == {
        "role": "user",
        "content": [picture, {"type": "text", "text": "hello"}],
    }
    assert observation_message("", "data:x") == {"role": "user", "content": [picture]}


@pytest.mark.parametrize("grammar", list(Grammar))
def test_the_feedback_shows_actions_in_the_grammar_in_use(grammar):
    text = action_feedback(ParseFailure(FailureReason.EMPTY), False, grammar)
    assert f"{format_action(Move.RIGHT, grammar)} or {format_action(STOP, grammar)}" in text
