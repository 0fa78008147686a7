"""Episodes as ids: only appended, paid where the policy acted, and every kind of damage has a name."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_maze.pictures import PictureError
from skyrl_maze.trajectory import RULES, Picture, Trajectory, broken_rules

END, START, IMAGE, VIDEO = 2, 3, 7, 8
MERGE = 2
BANNED = frozenset({IMAGE, VIDEO})


def picture(name, height=1, width=1):
    """A picture of `height` by `width` tokens."""
    grid = (1, height * MERGE, width * MERGE)
    return Picture(f"data:{name}", grid, height * width, np.zeros((math.prod(grid), 3), np.float32))


@dataclass
class Turn:
    """What one turn was made of, to compare with what the trajectory holds."""

    sampled: list[int]
    reward: float
    shown: list[int]
    pictures: list[Picture]


words = st.lists(st.integers(10, 90), max_size=4)
pictures = st.lists(
    st.builds(picture, st.text("abc", min_size=1, max_size=2), st.integers(1, 3), st.integers(1, 3)),
    max_size=2,
)


@st.composite
def messages(draw):
    """Ids with one image token a picture, as a chat template writes them, and the pictures."""
    shown = draw(pictures)
    ids = [START]
    for _ in shown:
        ids += [*draw(words), IMAGE]
    return [*ids, *draw(words)], shown


@st.composite
def turns(draw, last):
    # An answer may be empty, end by itself, or be cut by the length.
    sampled = draw(words) + [END] * draw(st.integers(0, 1))
    ids, shown = ([], []) if last else draw(messages())
    return Turn(sampled, draw(st.integers(-64, 64)) / 64, ids, shown)


@st.composite
def episodes(draw):
    """A finished trajectory, its turns, the addresses shown, and where each turn began."""
    trajectory = Trajectory(IMAGE, BANNED)
    ids, shown = draw(messages())
    trajectory.open(ids, shown)
    count = draw(st.integers(1, 4))
    played = [draw(turns(last=i == count - 1)) for i in range(count)]
    begins = []
    for turn in played:
        begins.append(len(trajectory.response_ids))
        logprobs = draw(st.none() | st.just([-0.5] * len(turn.sampled)))
        trajectory.sample(turn.sampled, logprobs, trajectory.ids)
        trajectory.close_turn(END, len(turn.sampled))
        trajectory.reward(turn.reward)
        if turn.shown:
            expected = len(trajectory) + trajectory.expanded_length(turn.shown, turn.pictures)
            trajectory.observe(turn.shown, turn.pictures)
            assert len(trajectory) == expected
        shown = [*shown, *turn.pictures]
    return trajectory, played, [p.url for p in shown], begins


def sample_episode():
    """Two turns, three pictures of which the last two are equally large."""
    t = Trajectory(IMAGE, BANNED)
    t.open([START, 10, IMAGE, 11], [picture("a", 1, 2)])
    t.sample([20, 21, END], [-0.1, -0.2, -0.3], t.ids)
    t.close_turn(END, 3)
    t.reward(0.25)
    t.observe([START, IMAGE, 12, IMAGE, 13], [picture("b", 2, 2), picture("c", 2, 2)])
    t.sample([22, 23], [-0.4, -0.5], t.ids)
    t.close_turn(END, 2)
    t.reward(0.5)
    return t


URLS = ["data:a", "data:b", "data:c"]


def rules(trajectory, urls=URLS, merge=MERGE):
    return broken_rules(trajectory, urls, merge)


@settings(deadline=None)
@given(episode=episodes())
def test_an_episode_that_is_only_appended_breaks_no_rule(episode):
    trajectory, _, urls, _ = episode
    assert broken_rules(trajectory, urls, MERGE) == []


@settings(deadline=None)
@given(episode=episodes())
def test_every_picture_folds_to_one_token_and_unfolds_again(episode):
    trajectory, _, _, _ = episode
    coming = iter(trajectory.pictures)
    unfolded = []
    for token in trajectory.folded_ids:
        unfolded += [token] * (next(coming).tokens if token == IMAGE else 1)
    assert unfolded == trajectory.ids == trajectory.prompt_ids + trajectory.response_ids
    assert next(coming, None) is None
    assert trajectory.folded_ids.count(IMAGE) == len(trajectory.pictures)
    assert len(trajectory) == len(unfolded)


@settings(deadline=None)
@given(episode=episodes())
def test_each_turn_is_paid_on_its_last_sampled_token_or_else_where_it_closes(episode):
    trajectory, played, _, begins = episode
    assert sum(trajectory.rewards) == sum(turn.reward for turn in played)
    expected = [0.0] * len(trajectory.rewards)
    for turn, begin in zip(played, begins, strict=True):
        expected[begin + max(len(turn.sampled) - 1, 0)] = turn.reward
    assert trajectory.rewards == expected


@settings(deadline=None)
@given(episode=episodes())
def test_sampled_ids_stay_as_they_are_and_alone_carry_the_loss(episode):
    trajectory, played, _, begins = episode
    carried = [i for i, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mask]
    assert carried == [token for turn in played for token in turn.sampled]
    for turn, begin in zip(played, begins, strict=True):
        end = begin + len(turn.sampled)
        assert trajectory.response_ids[begin:end] == turn.sampled
        # Each turn is closed once, whether the policy did it or not.
        assert trajectory.response_ids[begin : end + 1].count(END) == 1


def test_an_episode_token_by_token():
    t = sample_episode()
    assert t.prompt_ids == [START, 10, IMAGE, IMAGE, 11]
    assert t.response_ids == [20, 21, END, START, *[IMAGE] * 4, 12, *[IMAGE] * 4, 13, 22, 23, END]
    assert t.loss_mask == [1, 1, 1, *[0] * 11, 1, 1, 0]
    assert t.logprobs == [-0.1, -0.2, -0.3, *[0.0] * 11, -0.4, -0.5, 0.0]
    assert t.rewards == [0.0, 0.0, 0.25, *[0.0] * 12, 0.5, 0.0]
    assert t.offsets == [2, 9, 14]
    assert t.folded_ids == [START, 10, IMAGE, 11, 20, 21, END, START, IMAGE, 12, IMAGE, 13, 22, 23, END]
    assert rules(t) == []


def test_an_empty_answer_is_paid_on_the_token_that_closes_it():
    t = Trajectory(IMAGE, BANNED)
    t.open([START], [])
    t.sample([], None, t.ids)
    t.close_turn(END, 0)
    t.reward(1.0)
    assert (t.response_ids, t.loss_mask, t.rewards) == ([END], [0], [1.0])


def test_an_empty_answer_never_pays_the_turn_before():
    # A template without a generation prompt writes nothing when the environment shows nothing.
    t = Trajectory()
    t.open([START], [])
    t.sample([20, END], None, t.ids)
    t.close_turn(END, 2)
    t.observe([], [])
    t.sample([], None, t.ids)
    t.close_turn(END, 0)
    t.reward(1.0)
    assert (t.response_ids, t.rewards) == ([20, END, END], [0.0, 0.0, 1.0])


@pytest.mark.parametrize(("ids", "shown"), [([START], 1), ([IMAGE], 0), ([IMAGE, IMAGE], 1), ([IMAGE], 2)])
@pytest.mark.parametrize("method", ["open", "observe"])
def test_ids_and_pictures_that_do_not_fit_are_refused_and_nothing_is_appended(method, ids, shown):
    t = Trajectory(IMAGE, BANNED)
    with pytest.raises(PictureError, match=f"wrote {ids.count(IMAGE)} image tokens for {shown} pictures"):
        getattr(t, method)(ids, [picture("a")] * shown)
    assert t == Trajectory(IMAGE, BANNED)


def test_a_model_without_pictures_takes_none_and_needs_no_merge_size():
    t = Trajectory()
    with pytest.raises(PictureError, match="wrote 0 image tokens for 1 pictures"):
        t.open([START, IMAGE], [picture("a")])
    t.open([START, IMAGE], [])
    t.sample([20, END], None, t.ids)
    assert broken_rules(t, [], None) == []


# ---- damage ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(episode=episodes(), data=st.data())
def test_a_changed_id_in_what_the_engine_was_given_is_found(episode, data):
    trajectory, _, urls, begins = episode
    place = data.draw(st.integers(0, len(trajectory.prompt_ids) + begins[-1] - 1))
    ids, i = trajectory.prompt_ids, place
    if place >= len(ids):
        ids, i = trajectory.response_ids, place - len(ids)
    ids[i] += 1000
    assert "prefix" in broken_rules(trajectory, urls, MERGE)


@pytest.mark.parametrize(
    "given",
    [[START, 10, IMAGE, 11], [], [START, 10, IMAGE, IMAGE, 11, 20], [START, 10, IMAGE, IMAGE], [0] * 99],
    ids=["not expanded", "nothing", "one too many", "one too few", "longer than the episode"],
)
def test_an_engine_that_was_given_something_else_is_found(given):
    t = sample_episode()
    t.engine_prompts[0] = (len(t.prompt_ids), np.asarray(given, dtype=np.int64))
    assert rules(t) == ["prefix"]


@settings(deadline=None)
@given(episode=episodes(), name=st.sampled_from(["loss_mask", "logprobs", "rewards", "response_ids"]))
def test_a_dropped_or_doubled_entry_is_found(episode, name):
    trajectory, _, urls, _ = episode
    row = getattr(trajectory, name)
    for damaged in (row[1:], row[:-1], [*row, row[-1]]):
        assert "lengths" in broken_rules(replace(trajectory, **{name: damaged}), urls, MERGE)


def test_an_episode_without_an_answer_is_found():
    t = Trajectory(IMAGE, BANNED)
    t.open([START], [])
    assert broken_rules(t, [], MERGE) == ["lengths"]


def other_grid(t, grid):
    t.pictures[1] = replace(t.pictures[1], grid=grid)


DAMAGE = {
    "an image token where text was": (lambda t: t.response_ids.__setitem__(-1, IMAGE), ["image_tokens"]),
    "text where an image token was": (
        lambda t: t.response_ids.__setitem__(4, 50),
        ["prefix", "image_tokens"],
    ),
    "a picture elsewhere": (lambda t: t.offsets.__setitem__(1, 10), ["image_tokens"]),
    "pictures swapped": (lambda t: t.pictures.__setitem__(slice(1, 3), t.pictures[:0:-1]), ["pictures"]),
    "pictures of other sizes swapped": (
        lambda t: t.pictures.__setitem__(slice(0, 2), t.pictures[1::-1]),
        ["image_tokens", "pictures"],
    ),
    "a picture missing": (lambda t: (t.pictures.pop(), t.offsets.pop()), ["image_tokens", "pictures"]),
    "only its offset left": (lambda t: t.pictures.pop(), ["image_tokens", "pictures"]),
    "a picture twice": (lambda t: t.pictures.__setitem__(2, t.pictures[1]), ["pictures"]),
    "a larger grid": (lambda t: other_grid(t, (1, 4, 8)), ["image_tokens", "pictures"]),
    "a grid of no patches": (lambda t: other_grid(t, (0, 4, 4)), ["image_tokens", "pictures"]),
    "a patch missing": (
        lambda t: t.pictures.__setitem__(1, replace(t.pictures[1], pixel_values=np.zeros((15, 3)))),
        ["pictures"],
    ),
    "a vision token sampled": (lambda t: t.response_ids.__setitem__(14, VIDEO), ["sampled_vision_token"]),
    "an image token sampled": (
        lambda t: t.response_ids.__setitem__(14, IMAGE),
        ["image_tokens", "sampled_vision_token"],
    ),
    "loss on a picture": (lambda t: t.loss_mask.__setitem__(4, 1), ["sampled_vision_token"]),
    "NaN logprob": (lambda t: t.logprobs.__setitem__(14, math.nan), ["finite"]),
    "infinite logprob": (lambda t: t.logprobs.__setitem__(14, -math.inf), ["finite"]),
    # vLLM's JSON writes null for NaN.
    "no logprob": (lambda t: t.logprobs.__setitem__(14, None), ["finite"]),
    "NaN reward": (lambda t: t.rewards.__setitem__(0, math.nan), ["finite"]),
    "infinite reward": (lambda t: t.rewards.__setitem__(0, math.inf), ["finite"]),
}


@pytest.mark.parametrize(("harm", "expected"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_reported_under_its_rule(harm, expected):
    t = sample_episode()
    harm(t)
    assert rules(t) == expected
    assert set(expected) <= set(RULES)


@pytest.mark.parametrize("urls", [[], URLS[:2], [*URLS, "data:d"], ["data:b", "data:a", "data:c"]])
def test_pictures_other_than_those_shown_are_found(urls):
    assert rules(sample_episode(), urls) == ["pictures"]


@pytest.mark.parametrize("merge", [None, 1, 4])
def test_a_merge_size_that_does_not_fit_the_grids_is_found(merge):
    assert rules(sample_episode(), merge=merge) == ["image_tokens"]
