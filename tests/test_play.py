"""Playing a plan: all episodes once, in any order, and none lost by what happens to another."""

import asyncio

import pytest

from skyrl_maze import dataset
from skyrl_maze.errors import EndpointError, RecordError
from skyrl_maze.faults import EpisodeError
from skyrl_maze.pictures import take_out
from skyrl_maze.plan import plan_of
from skyrl_maze.play import play, play_episode
from skyrl_maze.policies import Baseline
from skyrl_maze.results import EpisodeLog, read_episodes

SETTINGS = {"any": 1}


def plan_for(count=4, **over):
    plan = plan_of(None, "visgym-easy-64", [], **over)
    object.__setattr__(plan, "mazes", plan.mazes[:count])
    return plan


class Scripted:
    """The oracle, until `trouble(situation)` raises."""

    def __init__(self, trouble=lambda situation: None):
        self.trouble, self.seen, self.at_once, self.most = trouble, [], 0, 0

    async def answer(self, situation):
        self.seen.append(situation)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0)
            self.trouble(situation)
            return await Baseline("oracle", 0).answer(situation)
        finally:
            self.at_once -= 1


def played(folder, plan, policy, concurrency=3, **options):
    with EpisodeLog(folder, SETTINGS) as log:
        return asyncio.run(play(plan, policy, log, concurrency, **options))


def test_every_episode_is_played_once_and_kept(tmp_path):
    policy, ended = Scripted(), []
    records = played(tmp_path / "x", plan_for(samples=2), policy, ended=ended.append)
    assert [(r.index, r.sample) for r in records] == [(i, s) for i in range(4) for s in range(2)]
    assert read_episodes(tmp_path / "x")[0] == records
    assert sorted(ended, key=lambda r: (r.index, r.sample)) == records
    assert all(r.success and r.seconds is not None for r in records)
    assert policy.most == 3


def test_a_model_sees_what_it_sees_in_training():
    policy = Scripted()
    asyncio.run(play_episode(plan_for(), (0, 0), policy))
    last = policy.seen[-1].messages
    emptied, pictures = take_out(last)
    assert [m["role"] for m in emptied] == ["user", "assistant"] * 13
    assert len(pictures) == 13
    assert all(url.startswith("data:image/png;base64,") for url in pictures)
    assert "The picture shows a maze of 9 by 9 cells" in emptied[0]["content"][1]["text"]
    assert emptied[2]["content"][1]["text"].startswith("You moved ")
    assert [s.turn for s in policy.seen] == list(range(13))


def test_an_episode_without_an_answer_costs_itself_alone(tmp_path):
    def trouble(situation):
        if situation.index == 2 and situation.turn == 3:
            raise EpisodeError("reply", "no text")

    records = played(tmp_path / "x", plan_for(), Scripted(trouble))
    assert [r.success for r in records] == [True, True, False, True]
    lost = records[2]
    assert (lost.error, len(lost.turns), lost.stop_reason) == ("reply: no text", 3, "running")


def test_a_dead_endpoint_ends_it_and_another_call_goes_on(tmp_path):
    def trouble(situation):
        if situation.index == 2:
            raise EndpointError("gone")

    with pytest.raises(EndpointError, match="gone"):
        played(tmp_path / "x", plan_for(), Scripted(trouble), concurrency=1)
    assert [r.index for r in read_episodes(tmp_path / "x")[0]] == [0, 1]
    policy = Scripted()
    records = played(tmp_path / "x", plan_for(), policy)
    assert [r.index for r in records] == [0, 1, 2, 3]
    assert {s.index for s in policy.seen} == {2, 3}


def test_an_interrupt_keeps_what_has_ended(tmp_path):
    def trouble(situation):
        if situation.index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        played(tmp_path / "x", plan_for(), Scripted(trouble), concurrency=1)
    assert [r.index for r in read_episodes(tmp_path / "x")[0]] == [0, 1, 2]


def test_a_finished_evaluation_is_not_played_again(tmp_path):
    first = played(tmp_path / "x", plan_for(), Scripted())
    policy = Scripted()
    assert played(tmp_path / "x", plan_for(), policy) == first
    assert policy.seen == []


def test_episodes_of_another_set_are_refused(tmp_path):
    played(tmp_path / "x", plan_for(), Scripted())
    plan = plan_for()
    object.__setattr__(plan, "mazes", tuple(dataset.load_set("visgym-hard-64")[:4]))
    with pytest.raises(RecordError, match="episode 0, sample 0 is of another set"):
        played(tmp_path / "x", plan, Scripted())
    with pytest.raises(RecordError, match="episode 2, sample 0 is of another set"):
        played(tmp_path / "x", plan_for(2), Scripted())
