"""Reading answers: the exact form comes back, sloppy but clear forms too, and nothing whatever raises."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.actions import (
    ACTIONS,
    STOP,
    FailureReason,
    Grammar,
    ParseFailure,
    best_action,
    format_action,
    parse_action,
)
from skyrl_maze.errors import ConfigError
from skyrl_maze.maze import Move, generate_maze

GRAMMARS = list(Grammar)
EMPTY, NO_ACTION, UNKNOWN, SEVERAL = FailureReason


def read(text: str, grammar: str = "tuple") -> object:
    """The action, or the reason why there is none."""
    parsed = parse_action(text, grammar)
    return parsed.reason if isinstance(parsed, ParseFailure) else parsed


def test_actions_are_in_the_order_of_their_numbers():
    assert [action.word for action in ACTIONS] == ["right", "up", "left", "down", "stop"]


@pytest.mark.parametrize(
    ("action", "as_tuple", "as_keyword"),
    [
        (Move.RIGHT, "('move', 0)", "<action>right</action>"),
        (Move.UP, "('move', 1)", "<action>up</action>"),
        (Move.LEFT, "('move', 2)", "<action>left</action>"),
        (Move.DOWN, "('move', 3)", "<action>down</action>"),
        (STOP, "('stop', 'stop')", "<action>stop</action>"),
    ],
)
def test_written_form(action, as_tuple, as_keyword):
    assert format_action(action, "tuple") == as_tuple
    assert format_action(action, "keyword") == as_keyword


reasoning = st.text() | st.sampled_from(
    ["('move', 1)", "<action>up</action>", "<answer>('stop', 'stop')</answer>"]
)
wrapped = st.sampled_from(
    [
        "{answer}",
        "<answer>{answer}</answer>",
        "<action>{answer}</action>",
        "<answer><action>{answer}</action></answer>",
        "<think>{thought}</think><answer>{answer}</answer>",
        "<observation>{thought}</observation><justification>{thought}</justification><action>{answer}</action>",
        "{thought}</think>\n\n<answer>{answer}",
        "<action> {answer} <|im_end|>\n<|endoftext|>",
    ]
)


@given(action=st.sampled_from(ACTIONS), grammar=st.sampled_from(GRAMMARS), frame=wrapped, thought=reasoning)
def test_written_then_read_is_the_same(action, grammar, frame, thought):
    # A closing tag in the thought would end it early, and rightly so.
    thought = thought.replace("</", "")
    assert (
        parse_action(frame.format(answer=format_action(action, grammar), thought=thought), grammar) is action
    )


@pytest.mark.parametrize(
    "text",
    [
        "<observation></observation><justification>('move', 1)</justification><action>('move', 0)</action>",
        "('move', 0)</answer>",
        "<think></think><answer>('move', 0)</answer>",
        "('move', 0)",
        "('move', 0)<|im_end|>",
        '  ( "move" ,\t0 )\n',
        "('MOVE', 0)",
        "I go right: ('move', 0).",
        "('move', 0) ('move', 0)",
        "maybe ('move', 2)? <ANSWER>('move', 0)</ANSWER> or ('move', 3)",
        "<answer>('move', 0)</answer> <answer>(\"move\", 0)</answer>",
        "<think>up?</think><action>('move', 0)",
        "walls (three of them, I think) so ('move', 0)",
    ],
)
def test_clear_answers_are_read(text):
    assert read(text) is Move.RIGHT


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", EMPTY),
        (" \n<|im_end|>\n<|endoftext|> ", EMPTY),
        ("<think>('move', 0)</think>", EMPTY),
        ("<think>('move', 0)", EMPTY),
        ("<think>x</answer>('move', 0)", EMPTY),
        ("<think>x</observation>('move', 0)", EMPTY),
        ("('move', 0)</think>", EMPTY),
        ("<answer></answer>('move', 0)", EMPTY),
        ("up", NO_ACTION),
        ("<answer>up</answer>('move', 0)", NO_ACTION),
        ("('move', <think></think>0)", NO_ACTION),
        ("move, 0", NO_ACTION),
        ("('move' 0)", NO_ACTION),
        ("('move', (0))", NO_ACTION),
        ("('move\", 0)", NO_ACTION),
        ("('move', 4)", UNKNOWN),
        ("('move', True)", UNKNOWN),
        ("('move', -0)", UNKNOWN),
        ("('move', +0)", UNKNOWN),
        ("('move', 00)", UNKNOWN),
        ("('move', 0x0)", UNKNOWN),
        ("('move', 0.0)", UNKNOWN),
        ("('move', '0')", UNKNOWN),
        ("('move', 0,)", UNKNOWN),
        ("('move', 0 # right)", UNKNOWN),
        ("('move', \N{FULLWIDTH DIGIT ZERO})", UNKNOWN),
        ("('move', 99999999999999999999)", UNKNOWN),
        ("('move', " + "9" * 10_000 + ")", UNKNOWN),
        ("('move', 'stop')", UNKNOWN),
        ("('stop', 'now')", UNKNOWN),
        ("('stop', 0)", UNKNOWN),
        ("('stop', stop)", UNKNOWN),
        ("('\N{LATIN SMALL LETTER LONG S}top', 'stop')", UNKNOWN),
        ("('jump', 0)", UNKNOWN),
        ("('move', 0) ('move', 1)", SEVERAL),
        ("('move', 0) ('move', 4)", UNKNOWN),
        ("<answer>('move', 0)</answer><action>('move', 1)</action>", SEVERAL),
        ("<answer>('move', 0)<action>('move', 1)</action></answer>", SEVERAL),
        ("<answer><action>('move', 1)</action>('move', 0)</answer>", SEVERAL),
    ],
)
def test_what_is_not_one_action_in_tuple_grammar(text, reason):
    assert read(text) is reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<action> UP\n</action>", Move.UP),
        ("<answer>up, up</answer>", Move.UP),
        ("down? <action>up</action> down", Move.UP),
        ("<think>left</think><action>up", Move.UP),
        ("<action>up<|im_end|>", Move.UP),
        ("up", NO_ACTION),
        ("('move', 1)", NO_ACTION),
        ("<action>('move', 1)</action>", UNKNOWN),
        ("<action>north</action>", UNKNOWN),
        ("<action>go up</action>", UNKNOWN),
        ("<action>up down</action>", SEVERAL),
        ("<action>up</action><action>stop</action>", SEVERAL),
        ("<action></action>", EMPTY),
    ],
)
def test_keyword_grammar(text, expected):
    assert read(text, "keyword") is expected


def test_failures_explain_themselves():
    sentences = {str(ParseFailure(reason)) for reason in FailureReason}
    assert len(sentences) == len(FailureReason)
    assert str(parse_action("hm", "tuple")) == "it holds no action"


def test_an_unknown_grammar_names_the_closest():
    for call in (lambda: parse_action("", "keywords"), lambda: format_action(STOP, "keywords")):
        with pytest.raises(
            ConfigError, match=r"'keywords'; choose one of tuple, keyword; did you mean 'keyword'\?"
        ):
            call()


@given(text=st.text(st.characters()), grammar=st.sampled_from(GRAMMARS))
def test_any_text_is_read(text, grammar):
    assert isinstance(parse_action(text, grammar), ParseFailure | Move | type(STOP))


def test_a_million_strings_made_of_pieces_of_the_grammar():
    pieces = [
        *"()'\",<>/ \n\0\ud800\udfff0123-xX",
        *(
            "move",
            "stop",
            "up",
            "True",
            "<action>",
            "</action>",
            "<answer>",
            "</answer>",
            "<think>",
            "</think>",
        ),
        *(
            "<|im_end|>",
            "<|endoftext|>",
            "('move', 0)",
            "('stop', 'stop')",
            "('move', ",
            "9" * 50,
            "\N{KELVIN SIGN}",
        ),
    ]
    draw = random.Random(0)
    drawn = draw.choices(pieces, k=100_010)
    seen = set()
    for begin in range(1_000_000):
        first = begin % 100_000
        parsed = parse_action("".join(drawn[first : first + 1 + begin // 100_000]), GRAMMARS[begin % 2])
        seen.add(parsed)
    assert seen >= {ParseFailure(reason) for reason in FailureReason} | {Move.RIGHT, Move.UP, STOP}


@pytest.mark.parametrize(
    "piece",
    [
        "(",
        ")",
        "('",
        "('move',",
        "('move', 0)",
        "(" + " " * 50,
        "<",
        "<think",
        "<think >",
        "</think>",
        "<answer>",
        "</answer>",
        "<action >up",
        "<|im_end|>",
        " ",
        "'",
        ",",
        "up ",
        "9",
        "\0",
        "\ud800",
        "<think" + " " * 50,
    ],
)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_megabyte_takes_linear_time(piece, grammar):
    text = piece * (1_000_000 // len(piece))
    begin = time.process_time()
    parse_action(text, grammar)
    # Quadratic time would be minutes.
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("maze", [generate_maze(7, seed, braid) for seed in range(4) for braid in (0.0, 0.5)])
def test_the_best_action_leads_to_the_goal_and_stops_there(maze):
    assert best_action(maze, maze.goal) is STOP
    cell, taken = maze.start, []
    while cell != maze.goal:
        taken.append(best_action(maze, cell))
        cell = maze.step(cell, taken[-1])
    assert taken == maze.shortest_path()
