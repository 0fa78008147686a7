"""Faults: which are tried again and how often, what one episode may cost, and how many may be lost."""

import asyncio
import math
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from skyrl_maze.errors import ConfigError, SkyRLMazeError
from skyrl_maze.faults import (
    PICTURE_WAYS,
    EpisodeError,
    FaultInjector,
    RolloutConfig,
    RolloutError,
    Tally,
    answered,
    cause_of,
    is_passing,
    logged_only,
    retrying,
)

AT_ONCE = {"retry_wait_s": 0}


def test_the_defaults_and_all_ways_of_pictures_have_no_problems():
    assert RolloutConfig().problems() == []
    assert [RolloutConfig(pictures=way).problems() for way in PICTURE_WAYS] == [[]] * 3


BOUNDS = {
    "retries": (0, 100),
    "retry_wait_s": (0, 60),
    "request_timeout_s": (0.001, 86_400),
    "env_timeout_s": (0.001, 86_400),
    "max_failed_share": (0, 1),
    "fault_rate": (0, 1),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_number_out_of_its_bounds_is_named_with_them(name):
    low, high = BOUNDS[name]
    for bad in (low - 0.0005, high + 1, math.nan, math.inf, -math.inf):
        assert RolloutConfig(**{name: bad}).problems() == [f"{name}={bad}: must be from {low} to {high}"]
    for good in (low, high):
        assert RolloutConfig(**{name: good}).problems() == []


@pytest.mark.parametrize(
    ("way", "hint"), [("file", "; did you mean 'files'?"), ("png", ""), ("", ""), (None, "")]
)
def test_another_way_of_pictures_is_named_with_a_hint(way, hint):
    (problem,) = RolloutConfig(pictures=way).problems()
    assert problem == f"pictures={way!r}{hint}; allowed: auto, files, tensors"


def test_all_problems_are_found_at_once():
    bad = RolloutConfig(pictures="no", **dict.fromkeys(BOUNDS, math.nan))
    assert [problem.partition("=")[0] for problem in bad.problems()] == ["pictures", *BOUNDS]


def test_a_generator_config_without_the_section_has_the_defaults():
    assert RolloutConfig.of(object()) == RolloutConfig.of(SimpleNamespace()) == RolloutConfig()
    assert RolloutConfig.of(SimpleNamespace(rollouts=None)) == RolloutConfig()


def test_the_section_of_a_generator_config_is_taken_over():
    given = RolloutConfig(pictures="tensors", retries=7, fault_rate=0.25)
    assert RolloutConfig.of(SimpleNamespace(rollouts=given)) is given
    assert RolloutConfig.of(SimpleNamespace(rollouts=SimpleNamespace(**vars(given)))) == given
    assert RolloutConfig.of(OmegaConf.create({"rollouts": vars(given)})) == given


@pytest.mark.parametrize("passing", [True, False])
def test_an_episode_error_survives_pickling(passing):
    error = pickle.loads(pickle.dumps(EpisodeError("engine", "it fell over", passing)))
    assert type(error) is EpisodeError
    assert (error.kind, error.message, error.passing) == ("engine", "it fell over", passing)
    assert str(error) == "engine: it fell over"
    assert isinstance(error, SkyRLMazeError)


def test_a_rollout_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RolloutError("3 of 4 episodes were lost")))
    assert type(error) is RolloutError
    assert str(error) == "3 of 4 episodes were lost"


def test_a_cause_is_one_line():
    assert cause_of(OSError("\n\n  no room \nleft")) == "OSError: no room"
    assert cause_of(ValueError()) == "ValueError: no message"
    assert cause_of(ValueError("x" * 300)) == "ValueError: " + "x" * 200
    assert cause_of(EpisodeError("reply", "no ids")) == "EpisodeError: reply: no ids"


@pytest.mark.parametrize("message", ["<Env at 0x7f{}> is closed", "10.0.0.{}:8000 refused", "took 1.{} s"])
def test_equal_causes_count_as_one_whatever_numbers_they_name(message):
    tally = Tally(episodes=2)
    for number in (17, 23):
        tally.lost("lost_engine", cause_of(OSError(message.format(number))))
    with pytest.raises(RolloutError, match="2 x OSError"):
        tally.check(0.5)


def tally_of(lost, episodes):
    tally = Tally(episodes=episodes)
    for _ in range(lost):
        tally.lost("engine_errors", "engine: busy")
    return tally


def test_counts_are_metrics_and_the_two_looked_for_are_always_there():
    assert Tally().metrics() == {"generate/masked_episodes": 0, "generate/retries": 0}
    assert tally_of(2, 4).metrics() == {
        "generate/engine_errors": 2,
        "generate/masked_episodes": 2,
        "generate/retries": 0,
    }


@given(lost=st.integers(0, 200), living=st.integers(2, 200))
@example(lost=29, living=71)  # 0.29 * 100 is a little less than 29
def test_a_share_exactly_at_the_limit_passes_and_one_more_does_not(lost, living):
    episodes = lost + living
    limit = lost / episodes
    tally_of(lost, episodes).check(limit)
    with pytest.raises(RolloutError):
        tally_of(lost + 1, episodes).check(limit)


@pytest.mark.parametrize("episodes", [1, 8])
@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0])
def test_to_lose_all_is_never_allowed_and_to_lose_none_always(episodes, limit):
    tally_of(0, episodes).check(limit)
    with pytest.raises(RolloutError, match=f"{episodes} of {episodes} episodes were lost"):
        tally_of(episodes, episodes).check(limit)


def test_the_message_lists_the_causes_by_count_and_names_the_setting():
    tally = Tally(episodes=100)
    for cause in ["f", *["e"] * 2, *["d"] * 3, *["c"] * 3, *["b"] * 3, *["engine: busy"] * 4]:
        tally.lost("engine", cause)
    with pytest.raises(RolloutError) as caught:
        tally.check(0.1)
    assert str(caught.value) == (
        "16 of 100 episodes were lost, generator.rollouts.max_failed_share allows 10% and never all: "
        "4 x engine: busy; 3 x d; 3 x c; 3 x b; 2 x e; and 1 other causes"
    )


# ---- what is tried again --------------------------------------------------------------------------


class StatusError(Exception):
    """As aiohttp's ClientResponseError, which carries the status of the answer."""

    def __init__(self, status):
        super().__init__(status)
        self.status = status


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionError(), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError("no route"), True),
        *((StatusError(status), True) for status in (408, 425, 429, 500, 502, 503, 504)),
        *((StatusError(status), False) for status in (400, 401, 403, 404, 413, 422, 499)),
        (StatusError(None), True),
        (StatusError("404"), True),
        (EpisodeError("engine", "m", passing=True), True),
        (EpisodeError("engine", "m", passing=False), False),
        (EpisodeError("timeout", "m"), False),
    ],
    ids=repr,
)
def test_what_may_go_away_by_itself(error, passing):
    assert is_passing(error) is passing


def attempts(config, errors, tally):
    """What comes of a call that fails with `errors`, one after the other, and how often it is made."""
    made = []

    async def play():
        async for attempt in retrying(config, tally):
            with attempt:
                made.append(attempt)
                if len(made) <= len(errors):
                    raise errors[len(made) - 1]
                return "done"

    try:
        return asyncio.run(play()), len(made)
    except Exception as error:
        return error, len(made)


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_a_passing_fault_is_tried_again_and_the_last_is_raised_as_it_is(retries):
    tally, errors = Tally(), [ConnectionError(i) for i in range(9)]
    result, made = attempts(RolloutConfig(retries=retries, **AT_ONCE), errors, tally)
    assert result is errors[retries]
    assert made == retries + 1
    assert tally.counts["retries"] == retries
    assert tally.metrics()["generate/retries"] == retries


def test_a_call_that_works_again_is_not_repeated():
    tally = Tally()
    errors = [StatusError(503), EpisodeError("timeout", "m", passing=True)]
    assert attempts(RolloutConfig(retries=5, **AT_ONCE), errors, tally) == ("done", 3)
    assert tally.counts == {"retries": 2}
    assert attempts(RolloutConfig(**AT_ONCE), [], Tally()) == ("done", 1)


@pytest.mark.parametrize("error", [StatusError(400), EpisodeError("environment", "m")], ids=repr)
def test_a_lasting_fault_ends_it_at_once(error):
    tally = Tally()
    assert attempts(RolloutConfig(retries=5, **AT_ONCE), [ConnectionError(), error], tally) == (error, 2)
    assert tally.counts["retries"] == 1


def test_a_cancelled_call_is_not_tried_again():
    tally = Tally()
    with pytest.raises(asyncio.CancelledError):
        attempts(RolloutConfig(retries=5, **AT_ONCE), [asyncio.CancelledError()], tally)
    assert tally.counts["retries"] == 0


async def never():
    await asyncio.get_running_loop().create_future()


async def failing(error):
    raise error


def test_an_answer_in_time_is_returned():
    assert asyncio.run(answered(asyncio.sleep(0, "hello"), 60, "the engine")) == "hello"


def test_no_answer_in_time_is_a_passing_fault():
    with pytest.raises(EpisodeError, match=r"^timeout: the engine did not answer in 0\.001 s$") as caught:
        asyncio.run(answered(never(), 0.001, "the engine"))
    assert (caught.value.kind, caught.value.passing) == ("timeout", True)


@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("v"), EpisodeError("reply", "m")])
def test_what_the_call_raises_itself_comes_through(error):
    with pytest.raises(type(error)) as caught:
        asyncio.run(answered(failing(error), 60, "the engine"))
    assert caught.value is error


def test_who_is_cancelled_while_waiting_stays_cancelled():
    async def play():
        task = asyncio.ensure_future(answered(never(), 60, "the engine"))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(play())


# ---- faults on purpose, and faults that cost nothing ----------------------------------------------


def failures(rate, seed=0, calls=5000):
    injector, failed = FaultInjector(rate, seed), []
    for call in range(calls):
        try:
            injector.may_fail(ConfigError)
        except ConfigError:
            failed.append(call)
    return failed


def test_faults_come_as_often_as_asked_and_in_the_same_order_for_a_seed():
    assert failures(0.0) == []
    assert failures(1.0) == list(range(5000))
    assert 0.27 < len(failures(0.3)) / 5000 < 0.33
    assert failures(0.3) == failures(0.3) != failures(0.3, seed=1)


def test_a_fault_in_cleaning_up_is_said_and_nothing_more():
    said = []
    with logged_only("closing an environment", said.append):
        raise OSError("gone")
    with logged_only("closing an environment", said.append):
        pass
    assert said == ["closing an environment failed: OSError: gone"]
