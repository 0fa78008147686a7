"""Records: what is written comes back, and what contradicts itself is refused by name."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from walks import NONSENSE, solved, walked, walks

from skyrl_maze.actions import GoalRule
from skyrl_maze.errors import RecordError
from skyrl_maze.evaluate import figures
from skyrl_maze.records import (
    Conditions,
    Summary,
    episode_line,
    read_episode,
    read_summary,
    summary_bytes,
)

HERE = "episodes.jsonl:7"
CONDITIONS = Conditions(
    policy="oracle", goal_rule=GoalRule.STOP, max_turns=8, grammar="keyword", theme="tokens", temperature=0.0
)


def changed(record, **values):
    """The record's line with other values, by their names in JSON; None as a name's value stays None."""
    return json.dumps({**json.loads(episode_line(record)), **values}).encode()


@given(record=walks(), seconds=st.none() | st.floats(0, 1e6), error=st.none() | st.text(max_size=20))
def test_what_is_written_comes_back(record, seconds, error):
    record = record.played_as(record.index, record.sample, seconds)
    if error is not None:
        record = record.failed(error)
    assert read_episode(episode_line(record), HERE) == record


@given(record=walks())
def test_a_line_is_one_line_to_everybody(record):
    line = episode_line(record)
    assert line.isascii()
    assert len(line.decode().splitlines()) == line.count(b"\n") == 1


def test_the_line_has_the_names_of_the_format():
    record = walked(["<action>stop</action>"])
    assert json.loads(episode_line(record)) == {
        "schema": 1,
        "index": 0,
        "sample": 0,
        "maze": record.maze,
        "maze_key": record.maze_key,
        "size": 5,
        "shortest_path": 4,
        "goal_rule": "stop",
        "max_turns": 8,
        "stop_reason": "stopped_early",
        "success": False,
        "return": 0.0,
        "seconds": None,
        "error": None,
        "turns": [
            {
                "text": "<action>stop</action>",
                "action": "stop",
                "parse_failure": None,
                "bumped": False,
                "position": list(record.turns[0].position),
                "reward": 0.0,
            }
        ],
    }


@pytest.mark.parametrize("text", NONSENSE)
def test_an_answer_that_was_not_understood_is_kept(text):
    record = walked([text])
    assert record.turns[0].action is None
    assert record.turns[0].parse_failure is not None
    assert record.turns[0].text == text.replace("\ud800", "?")


WRONG = {
    "schema": 2,
    "index": -1,
    "sample": "0",
    "maze": None,
    "maze_key": "0" * 32,
    "size": 7,
    "shortest_path": 3,
    "goal_rule": "touch",
    "max_turns": True,
    "stop_reason": "out_of_turns",
    "success": False,
    "return": 0.5,
    "seconds": -1.0,
    "error": 3,
    "turns": {},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_its_name(name):
    assert read_episode(changed(solved()), HERE)
    with pytest.raises(RecordError) as refused:
        read_episode(changed(solved(), **{name: WRONG[name]}), HERE)
    assert str(refused.value).startswith(f"{HERE}: ")
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


WRONG_TURNS = {
    "text": 1,
    "action": "jump",
    "parse_failure": "empty",
    "bumped": "no",
    "position": [1, 1, 1],
    "reward": "much",
}


@pytest.mark.parametrize("name", WRONG_TURNS)
def test_a_wrong_value_of_a_turn_is_refused(name):
    turns = json.loads(episode_line(solved()))["turns"]
    turns[1][name] = WRONG_TURNS[name]
    with pytest.raises(RecordError, match=r"turns\.1|turn 2"):
        read_episode(changed(solved(), turns=turns), HERE)


def test_a_turn_must_lead_where_the_maze_lets_it():
    turns = json.loads(episode_line(solved()))["turns"]
    other = dict(turns[0], position=[3, 3])
    with pytest.raises(RecordError, match=r"turn 1 leads to .*, and the record says \(3, 3\); it was"):
        read_episode(changed(solved(), turns=[other, *turns[1:]]), HERE)
    other = dict(turns[0], bumped=True)
    with pytest.raises(RecordError, match="turn 1 bumps into a wall, or does not"):
        read_episode(changed(solved(), turns=[other, *turns[1:]]), HERE)
    with pytest.raises(RecordError, match="cannot take turn 6: the episode ended after 5"):
        read_episode(changed(solved(), turns=[*turns, turns[0]]), HERE)
    with pytest.raises(RecordError, match="stop_reason is goal, and from maze and actions follows running"):
        read_episode(changed(solved(), turns=turns[:-1]), HERE)


def test_an_episode_with_an_error_counts_as_unsolved():
    record = solved().failed("engine:\n  fell over")
    assert (record.success, record.error) == (False, "engine: fell over")
    with pytest.raises(RecordError, match="success is True, and from maze and actions follows False"):
        read_episode(changed(record, success=True), HERE)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "Invalid JSON"),
        (b"[]", "Input should be an object"),
        (b'{"schema": 1', "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (changed(solved(), extra=1), "extra: Unexpected keyword argument"),
        (changed(solved()).replace(b'"reward": 1.0', b'"reward": NaN'), "finite number"),
    ],
)
def test_what_is_no_record_is_refused(line, reason):
    with pytest.raises(RecordError, match=reason) as refused:
        read_episode(line, HERE)
    assert str(refused.value).startswith(HERE)


@given(records=st.lists(walks(), min_size=1, max_size=4, unique_by=lambda r: (r.index, r.sample)))
def test_a_summary_comes_back(records):
    summary = Summary.of(CONDITIONS, figures(records))
    assert read_summary(summary_bytes(summary), "summary.json") == summary
    assert summary.figures == figures(records)


def test_a_summary_is_one_flat_object():
    summary = Summary.of(dataclasses.replace(CONDITIONS, step=5, adapter="5.0"), figures([solved()]))
    flat = json.loads(summary_bytes(summary))
    assert (flat["schema"], flat["policy"], flat["step"], flat["solve_rate"]) == (1, "oracle", 5, 1.0)
    rates = {"episodes", "solve_rate", "solve_rate_low", "solve_rate_high"}
    assert flat["by_size"][0].keys() == {"size", *rates}
    assert flat["by_shortest_path"][0].keys() == {"shortest_path", *rates}
    assert flat["stop_reasons"] == {"goal": 1}


@pytest.mark.parametrize(("name", "value"), [("solve_rate", 1.5), ("max_turns", 0), ("policy", None)])
def test_a_summary_that_cannot_be_is_refused(name, value):
    flat = json.loads(summary_bytes(Summary.of(CONDITIONS, figures([solved()]))))
    with pytest.raises(RecordError, match=f"summary.json: {name}"):
        read_summary(json.dumps({**flat, name: value}).encode(), "summary.json")
