"""Plays every maze of a plan with one policy, several at once, and keeps each episode as it ends."""

import asyncio
import time
from collections.abc import Callable, Iterator

from skyrl_maze.actions import GoalRule
from skyrl_maze.env import MazeEnv
from skyrl_maze.errors import RecordError, SkyRLMazeError
from skyrl_maze.faults import EpisodeError
from skyrl_maze.plan import Plan
from skyrl_maze.policies import Policy, Situation
from skyrl_maze.records import EpisodeRecord
from skyrl_maze.results import EpisodeLog

Place = tuple[int, int]  # (index of the maze, sample)


async def play_episode(plan: Plan, place: Place, policy: Policy) -> EpisodeRecord:
    """One episode to its end; an answer that does not come is an error in its record.

    Raises:
        EndpointError: no episode can be played.
    """
    index, sample = place
    started_s = time.monotonic()
    env = MazeEnv(plan.env, {"maze": plan.mazes[index].to_text(), "max_turns": plan.max_turns})
    messages, about = env.init([])
    position, done, error = about["position"], False, None
    while not done:
        situation = Situation(
            messages=messages,
            maze=env.maze,
            position=position,
            goal_rule=GoalRule(plan.env.goal_rule),
            grammar=plan.env.grammar,
            index=index,
            sample=sample,
            turn=env.turns,
        )
        try:
            text = await policy.answer(situation)
        except EpisodeError as lost:
            error = str(lost)
            break
        step = env.step(text)
        position, done = step["metadata"]["position"], step["done"]
        messages += [{"role": "assistant", "content": text}, *step["observations"]]
    record = env.record().played_as(index, sample, round(time.monotonic() - started_s, 3))
    return record if error is None else record.failed(error)


async def play(
    plan: Plan,
    policy: Policy,
    log: EpisodeLog,
    concurrency: int,
    ended: Callable[[EpisodeRecord], None] = lambda _record: None,
) -> list[EpisodeRecord]:
    """Play all episodes that `log` does not hold yet; return all, in the order of (index, sample).

    Args:
        concurrency: episodes at once.
        ended: is told of each that ends.

    Raises:
        EndpointError: the endpoint cannot be played with; what has ended is kept.
        RecordError, SetupError: an episode cannot be kept, or the log holds others than the plan's.
    """
    records = {(record.index, record.sample): record for record in log.done}
    _refuse_strangers(plan, log.done)
    waiting = (place for place in _places(plan) if place not in records)

    async def work() -> None:
        for place in waiting:  # shared: each takes the next that nobody has taken
            record = await play_episode(plan, place, policy)
            log.append(record)
            records[place] = record
            ended(record)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(plan.mazes) * plan.samples)):
                group.create_task(work())
    except* SkyRLMazeError as errors:
        first = _first(errors)
    else:
        return [records[place] for place in _places(plan)]
    raise first


def _places(plan: Plan) -> Iterator[Place]:
    return ((index, sample) for index in range(len(plan.mazes)) for sample in range(plan.samples))


def _refuse_strangers(plan: Plan, done: list[EpisodeRecord]) -> None:
    for record in done:
        known = record.index < len(plan.mazes) and record.sample < plan.samples
        if not known or record.maze_key != plan.mazes[record.index].key:
            raise RecordError(
                f"cannot continue: episode {record.index}, sample {record.sample} is of another set; "
                "give another --out"
            )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
