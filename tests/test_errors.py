"""Errors: both kinds at once, whole after a trip between processes, and helpful."""

import copy
import pickle

import pytest
from ray import cloudpickle

from skyrl_maze import errors
from skyrl_maze.errors import ConfigError, NotReadyError, SetupError, SkyRLMazeError, closest, exit_code

CLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SkyRLMazeError)
]
STANDARD = {
    "MazeError": ValueError,
    "ConfigError": ValueError,
    "RewardError": ValueError,
    "DatasetError": ValueError,
    "AdapterError": ValueError,
    "RecordError": ValueError,
    "ReportError": ValueError,
    "EndpointError": RuntimeError,
    "CheckpointError": ValueError,
    "ManifestError": ValueError,
    "SetupError": RuntimeError,
    "NotReadyError": RuntimeError,
    "LostNodeError": RuntimeError,
}


def test_every_error_is_also_a_standard_one():
    assert {kind.__name__ for kind in CLASSES} == {"SkyRLMazeError", *STANDARD}
    for name, standard in STANDARD.items():
        assert issubclass(getattr(errors, name), SkyRLMazeError)
        assert issubclass(getattr(errors, name), standard)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "travel",
    [
        lambda error: pickle.loads(pickle.dumps(error)),
        lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
        copy.copy,
    ],
    ids=["pickle", "cloudpickle", "copy"],
)
def test_an_error_survives_the_trip_to_another_process(kind, travel):
    message = "cannot do it:\n  - a, 'b', 50 %, ü"
    arrived = travel(kind(message))
    assert type(arrived) is kind
    assert str(arrived) == message
    assert arrived.args == (message,)


def test_errors_of_several_problems_list_each_on_a_line():
    error = ConfigError.from_problems(
        "2 settings cannot work:", (p for p in ["a=1: too low", "b=2: too high"])
    )
    assert type(error) is ConfigError
    assert str(error) == "2 settings cannot work:\n  - a=1: too low\n  - b=2: too high"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_of_one_problem_has_two_lines():
    assert str(ConfigError.from_problems("1 setting:", ["a"])) == "1 setting:\n  - a"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("keywrd", "; did you mean 'keyword'?"),
        ("tupel", "; did you mean 'tuple'?"),
        ("xyz", ""),
        ("", ""),
        (7, ""),
    ],
)
def test_closest_names_one_match_or_nothing(given, hint):
    assert closest(given, iter(["tuple", "keyword"])) == hint


def test_closest_of_nothing_is_nothing():
    assert closest("tuple", []) == ""


def test_an_exit_code_says_whether_another_try_may_help():
    assert [exit_code(kind("x")) for kind in (SkyRLMazeError, SetupError, NotReadyError)] == [2, 2, 75]
