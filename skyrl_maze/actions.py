"""What the model may answer, how an answer is written, and how it is read back.

Two grammars say the same five things:

=========  ==========================================  =======================
grammar    a move                                      stop
=========  ==========================================  =======================
`tuple`    `('move', 0)`; 0 right, 1 up, 2 left,       `('stop', 'stop')`
           3 down
`keyword`  `<action>up</action>`                       `<action>stop</action>`
=========  ==========================================  =======================

`parse_action` is total: whatever the text, it gives an action or a `ParseFailure`, in linear time. It reads
by these rules:

* Text in `<think>`, `<observation>` or `<justification>` is reasoning and never the answer, closed or not.
  A lone closing tag ends reasoning that the chat template opened: all before it is reasoning as well.
* Text in `<answer>` or `<action>` is the answer, and then nothing outside counts. An unclosed tag reaches to
  the end of the text, because engines drop the stop string `</action>`.
* Without such a tag, `tuple` searches the bare text and `keyword` fails.
* Everything in the answer that has the form of an action must be the same allowed action. Saying it twice is
  fine; two different ones are a failure, never a choice.
* Upper and lower case are alike, both quote characters and any white space are accepted. Nothing else is:
  no other integer spelling, no trailing comma, no other word after `'stop'`.
"""

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from skyrl_maze.errors import ConfigError, closest
from skyrl_maze.maze import Cell, Maze, Move


class Stop(enum.Enum):
    """The one action that is not a move; its only member is `STOP`."""

    STOP = "stop"

    @property
    def word(self) -> str:
        return self.value


STOP: Final = Stop.STOP

Action = Move | Stop
"""A move, or `STOP`."""

ACTIONS: Final[tuple[Action, ...]] = (*Move, STOP)
"""All five actions in the order of their numbers: right, up, left, down, stop."""


def best_action(maze: Maze, position: Cell) -> Action:
    """The next action of a shortest way from `position`: stop on the goal, else the lowest-numbered move."""
    return STOP if position == maze.goal else maze.best_move(position)


class Grammar(enum.StrEnum):
    """How an action is written."""

    TUPLE = "tuple"
    KEYWORD = "keyword"


class GoalRule(enum.StrEnum):
    """What solves a maze."""

    STOP = "stop"  # Answering stop while standing on the goal.
    REACH = "reach"  # Arriving at the goal.


class FailureReason(enum.StrEnum):
    """Why a text is not an action."""

    EMPTY = "empty"  # Nothing is left outside of the reasoning.
    NO_ACTION = "no_action"  # Nothing in it has the form of an action.
    UNKNOWN_ACTION = "unknown_action"  # It has the form of an action that does not exist.
    SEVERAL_ACTIONS = "several_actions"  # It names more than one action.


_SENTENCES = {
    FailureReason.EMPTY: "it is empty",
    FailureReason.NO_ACTION: "it holds no action",
    FailureReason.UNKNOWN_ACTION: "it names an action that does not exist",
    FailureReason.SEVERAL_ACTIONS: "it names more than one action",
}


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """A text that is not exactly one action."""

    reason: FailureReason

    def __str__(self) -> str:
        return _SENTENCES[self.reason]


def checked_grammar(name: str) -> Grammar:
    """The grammar of that name.

    Raises:
        ConfigError: there is none.
    """
    return _member(Grammar, "grammar", name)


def checked_goal_rule(name: str) -> GoalRule:
    """The goal rule of that name.

    Raises:
        ConfigError: there is none.
    """
    return _member(GoalRule, "goal_rule", name)


def _member[Name: enum.StrEnum](kind: type[Name], what: str, name: str) -> Name:
    try:
        return kind(name)
    except ValueError:
        allowed = [member.value for member in kind]
        hint = closest(name, allowed)
        raise ConfigError(f"unknown {what} {name!r}; choose one of {', '.join(allowed)}{hint}") from None


def format_action(action: Action, grammar: str) -> str:
    """The text of an action, such that `parse_action` gives the action back.

    Raises:
        ConfigError: the grammar does not exist.
    """
    return _FORMS[checked_grammar(grammar)].write(action)


def parse_action(text: str, grammar: str) -> Action | ParseFailure:
    """The one action that a model's whole answer names, by the rules at the top of this module.

    Raises:
        ConfigError: the grammar does not exist. No text raises anything.
    """
    form = _FORMS[checked_grammar(grammar)]
    pieces, tagged = _answer_pieces(text)
    if not any(piece and not piece.isspace() for piece in pieces):
        return ParseFailure(FailureReason.EMPTY)
    if form.needs_tags and not tagged:
        return ParseFailure(FailureReason.NO_ACTION)
    # Pieces are read one by one, so that no action arises from the two sides of something cut out.
    found = {action for piece in pieces for action in form.read(piece)}
    if not found:
        return ParseFailure(FailureReason.NO_ACTION)
    action, *others = found
    if action is None or None in others:
        return ParseFailure(FailureReason.UNKNOWN_ACTION)
    return ParseFailure(FailureReason.SEVERAL_ACTIONS) if others else action


_END_OF_TURN = ("<|im_end|>", "<|endoftext|>")
_ANSWER_TAGS = ("answer", "action")
# ASCII: otherwise letters such as the long s would match, too. `*+` never backtracks, so time stays linear.
_TAG = re.compile(r"<(/?)(think|observation|justification|answer|action)\s*+>", re.IGNORECASE | re.ASCII)


def _answer_pieces(text: str) -> tuple[list[str], bool]:
    """The parts of `text` that count as the answer, and whether tags say so (else: all but the reasoning)."""
    bare: list[str] = []
    tagged: list[str] = []
    depth, reasoning, seen_tag, begin = 0, "", False, 0
    end = _end_of_text(text)
    for match in _TAG.finditer(text, 0, end):
        closing, name = match[1] == "/", match[2].lower()
        if reasoning:
            if closing and name == reasoning:
                reasoning, begin = "", match.end()
            continue
        (tagged if depth else bare).append(text[begin : match.start()])
        begin = match.end()
        if name in _ANSWER_TAGS:
            depth = max(depth - 1, 0) if closing else depth + 1
            seen_tag = seen_tag or not closing
        elif not closing:
            reasoning = name
        else:
            bare, tagged, depth, seen_tag = [], [], 0, False
    if not reasoning:
        (tagged if depth else bare).append(text[begin:end])
    return (tagged, True) if seen_tag else (bare, False)


def _end_of_text(text: str) -> int:
    """Where `text` ends without trailing white space and end-of-turn tokens (copying nothing)."""
    end = len(text)
    while end:
        token = next((token for token in _END_OF_TURN if text.endswith(token, 0, end)), None)
        if token is None and not text[end - 1].isspace():
            break
        end -= len(token) if token else 1
    return end


_PARENTHESES = re.compile(r"\(([^()]*+)\)")
_QUOTED_THEN_COMMA = re.compile(r"""\s*+(['"])([^'"]*+)\1\s*+,(.*+)""", re.DOTALL)
_MOVES = {str(move.value): move for move in Move}
_STOPS = {"'stop'", '"stop"'}


def _read_tuples(piece: str) -> Iterator[Action | None]:
    """Every pair that begins with a quoted name: its action, or None if it is none."""
    for inside in _PARENTHESES.finditer(piece):
        pair = _QUOTED_THEN_COMMA.fullmatch(inside[1])
        if pair is None:
            continue
        name, payload = pair[2].lower(), pair[3].strip()
        if name == "stop" and payload.lower() in _STOPS:
            yield STOP
        else:
            yield _MOVES.get(payload) if name == "move" else None


_WORDS = {action.word: action for action in ACTIONS}


def _read_words(piece: str) -> Iterator[Action | None]:
    """Every word, split at white space and commas: its action, or None if it is none."""
    for word in piece.replace(",", " ").split():
        yield _WORDS.get(word.lower())


def _write_tuple(action: Action) -> str:
    return "('stop', 'stop')" if isinstance(action, Stop) else f"('move', {action.value})"


def _write_word(action: Action) -> str:
    return f"<action>{action.word}</action>"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a grammar is written and read."""

    write: Callable[[Action], str]
    read: Callable[[str], Iterator[Action | None]]
    needs_tags: bool
    """Whether an answer outside tags names nothing."""


_FORMS = {
    Grammar.TUPLE: _Form(_write_tuple, _read_tuples, needs_tags=False),
    Grammar.KEYWORD: _Form(_write_word, _read_words, needs_tags=True),
}
