"""The table of exported metrics: names that say their unit, and what a record of the trainer becomes."""

import math
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from skyrl_maze.gauges import TABLE, readings

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def values(logs):
    return {(exported.name, exported.cause): value for exported, value in readings(logs)}


def test_a_name_says_its_unit_and_stands_for_one_thing():
    for exported in TABLE:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", exported.name)
        assert exported.unit.rstrip("s").replace(" ", "_") in exported.name
    assert len({(exported.name, exported.cause) for exported in TABLE}) == len(TABLE)
    assert len({exported.logged for exported in TABLE}) == len(TABLE)


def test_parts_of_a_metric_are_told_apart_by_their_cause_alone():
    for exported in TABLE:
        alike = [other for other in TABLE if other.name == exported.name]
        assert len({(other.unit, other.description) for other in alike}) == 1
        assert len(alike) == 1 or all(other.cause for other in alike)


def test_every_way_to_lose_an_episode_is_a_cause():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "skyrl_maze").glob("*.py"))
    kinds = set(re.findall(r'EpisodeError\(\s*"(\w+)"', sources))
    named = set(re.findall(r'"(lost_\w+|violations)"', sources)) | {f"lost_{kind}" for kind in kinds}
    assert len(named) > 5
    assert {f"generate/{name}" for name in named if name != "lost_episodes"} == {
        exported.logged for exported in TABLE if exported.cause
    }


def test_a_record_becomes_what_it_holds():
    found = values({"train/solve_rate": 0.25, "adapter/step": 3, "policy/grad_norm": 1.0, "step": 3})
    assert found == {("train_solve_ratio", None): 0.25, ("adapter_step", None): 3.0}


def test_a_cause_that_did_not_strike_in_a_step_is_zero_and_outside_a_step_nothing():
    found = values({"generate/masked_episodes": 2, "generate/lost_engine": 2})
    assert found[("lost_episodes", "engine")] == 2
    assert {value for (_, cause), value in found.items() if cause != "engine"} == {0}
    assert len(found) == 7
    assert values({"eval/errors": 1}) == {("eval_lost_episodes", None): 1}


@given(st.dictionaries(st.sampled_from([e.logged for e in TABLE]), st.floats() | st.booleans() | st.text()))
def test_what_is_no_finite_number_is_left_out(logs):
    found = {exported.logged: value for exported, value in readings(logs) if exported.logged in logs}
    assert found == {n: v for n, v in logs.items() if type(v) is float and math.isfinite(v)}


def test_the_page_holds_the_table():
    lines = {}
    for exported in TABLE:
        cause = "" if exported.cause is None else f'`{{cause="{exported.cause}"}}`'
        lines[f"| `{exported.series}`{cause} | {exported.unit} | `{exported.logged}` |"] = (
            exported.description
        )
    rows = re.findall(r"^(\| `ray_skyrl_maze_.*? \|) ([^|]*) \|$", PAGE, re.MULTILINE)
    assert [tuple(row) for row in rows] == list(lines.items())
