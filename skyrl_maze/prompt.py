"""The words around the pictures: the task, the feedback of each turn, and the message that carries both.

The task text states the rule that is rewarded, no other. A recipe may bring its own wording in a file, with
the placeholders `$size`, `$actions`, `$rule` and `$max_turns` (`string.Template`; `$$` is a dollar sign).
"""

from pathlib import Path
from string import Template
from typing import Any

from skyrl_maze.actions import (
    ACTIONS,
    STOP,
    Action,
    GoalRule,
    ParseFailure,
    checked_goal_rule,
    format_action,
)
from skyrl_maze.errors import ConfigError, MazeError, closest
from skyrl_maze.render import THEMES, picture_side_px

PLACEHOLDERS = ("size", "actions", "rule", "max_turns")

_TASK = Template(
    """\
The picture shows a maze of $size by $size cells, seen from above. $legend

$rule

Actions, one each turn:
$actions

${budget}Each turn shows you the maze as it is then. Answer with exactly one action, written as above.\
"""
)

_RULES = {
    GoalRule.STOP: (
        "Walk to the goal and answer stop while you stand on it: that alone solves the maze. "
        "Stop ends the episode wherever you are; anywhere else it counts as unsolved."
    ),
    GoalRule.REACH: (
        "Walk to the goal: arriving there solves the maze and ends the episode. "
        "Stop ends the episode before that, unsolved."
    ),
}


def task_prompt(
    maze_size: int,
    grammar: str,
    goal_rule: str,
    max_turns: int | None = None,
    theme: str = "tokens",
    template_path: str | None = None,
) -> str:
    """The text of the first user message.

    Args:
        maze_size: cells along each side, walls included.
        grammar: how actions are written, a `Grammar`.
        goal_rule: what solves the maze, a `GoalRule`.
        max_turns: the turn budget; None is no budget, `unlimited` in a template.
        theme: whose colours the text names. A template file names its own.
        template_path: a UTF-8 file with the wording to use instead of the built-in one.

    Raises:
        ConfigError: an unknown grammar, goal rule or theme, or a template file that cannot be used.
    """
    template = _TASK if template_path is None else load_template(template_path)
    return template.substitute(
        size=maze_size,
        legend=_legend(theme),
        rule=_RULES[checked_goal_rule(goal_rule)],
        actions=_action_list(grammar),
        max_turns="unlimited" if max_turns is None else max_turns,
        budget="" if max_turns is None else f"You have {_turns(max_turns)}. ",
    )


def load_template(path: str) -> Template:
    """The prompt template in the file at `path`, relative to the working directory.

    Raises:
        ConfigError: the file cannot be read as UTF-8, is empty, or has a placeholder that does not exist.
    """
    what = f"cannot use the prompt template {path!r}"
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{what}: {error}; give the path of a readable UTF-8 text file") from error
    allowed = ", ".join(f"${name}" for name in PLACEHOLDERS)
    if not text:
        raise ConfigError(f"{what}: it is empty; write the task in it, with any of {allowed}")
    template = Template(text)
    if not template.is_valid():
        raise ConfigError(
            f"{what}: a dollar sign begins no placeholder; write $$ for the sign itself, or use {allowed}"
        )
    if unknown := [name for name in template.get_identifiers() if name not in PLACEHOLDERS]:
        named = ", ".join(f"${name}" for name in unknown)
        hint = closest(unknown[0], PLACEHOLDERS)
        raise ConfigError(f"{what}: unknown placeholder {named}; choose from {allowed}{hint}")
    return template


def turn_text(feedback: str | None = None, turns_left: int | None = None) -> str:
    """The text of a later turn: what the last answer did and how many turns are left, each if given."""
    note = None if turns_left is None else f"{_turns(turns_left)} left."
    return "\n".join(part for part in (feedback, note) if part)


def action_feedback(action: Action | ParseFailure, bumped: bool, grammar: str) -> str:
    """What the last answer did, in one sentence.

    Args:
        action: the answer as it was read. `STOP` has no feedback: nothing is shown after it.
        bumped: whether a wall was in the way of the move.
        grammar: the `Grammar` whose form is shown again after a failure.
    """
    if isinstance(action, ParseFailure):
        forms = f"{format_action(ACTIONS[0], grammar)} or {format_action(STOP, grammar)}"
        return f"Your answer was not understood: {action}; answer with one action such as {forms}."
    return "A wall is in the way; you did not move." if bumped else f"You moved {action.word}."


def observation_message(text: str, image_data_uri: str) -> dict[str, Any]:
    """One user message in OpenAI form: the picture, then the text (left out if there is none)."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image_data_uri}}]
    if text:
        content.append({"type": "text", "text": text})
    return {"role": "user", "content": content}


def _legend(theme: str) -> str:
    """The sentence that says what each colour means."""
    try:
        picture_side_px(1, theme)
    except MazeError as error:
        raise ConfigError(str(error)) from None
    looks = THEMES[theme]
    return (
        f"Walls are {looks.wall.words}, open floor is {looks.floor.words}, you are the {looks.agent.words} "
        f"and the goal is the {looks.goal.words}."
    )


def _action_list(grammar: str) -> str:
    """One line an action: what it does and how it is written."""
    return "\n".join(f"- {action.word}: {format_action(action, grammar)}" for action in ACTIONS)


def _turns(turns: int) -> str:
    return f"{turns} turn" if turns == 1 else f"{turns} turns"
