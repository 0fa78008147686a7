"""Runs and results on disk for the tests of the page, played by simple policies through the real rules."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyrl_maze.actions import STOP, Action, FailureReason, GoalRule, format_action
from skyrl_maze.episode import Episode
from skyrl_maze.evaluate import figures
from skyrl_maze.maze import Maze, Move
from skyrl_maze.records import Conditions, EpisodeRecord, Summary, TurnRecord
from skyrl_maze.results import step_folder, write_result
from skyrl_maze.reward import RewardWeights

MAX_TURNS = 18
Policy = Callable[[Episode, random.Random], tuple[str, Action | None]]


def answer(thought: str, action: Action) -> str:
    return f"<think>{thought}</think>\n<answer>{format_action(action, 'tuple')}</answer>"


def oracle(episode: Episode, _rng: random.Random) -> tuple[str, Action | None]:
    """The next move of a shortest path, and stop on the goal."""
    if episode.position == episode.maze.goal:
        return answer("The goal is reached.", STOP), STOP
    rest = Maze(episode.maze.walls, episode.position, episode.maze.goal).shortest_path()
    said = f"I stand at {episode.position}, the goal lies at {episode.maze.goal}, and {rest[0].word} is open."
    return answer(said, rest[0]), rest[0]


def wanderer(skill: float) -> Policy:
    """The oracle with probability `skill`, else any move, a stop or an answer that cannot be understood."""

    def act(episode: Episode, rng: random.Random) -> tuple[str, Action | None]:
        if rng.random() < skill:
            return oracle(episode, rng)
        action = rng.choice([*Move, *Move, *Move, STOP, None, None])
        if action is None:
            return "I would rather look around for a while before I say anything definite.", None
        return answer(f"Perhaps {action.word}?", action), action

    return act


def play(
    maze: Maze, policy: Policy, rng: random.Random, index: int = 0, sample: int = 0, error: str | None = None
) -> EpisodeRecord:
    """One episode under goal rule `stop`; with an `error` it breaks off after two turns."""
    episode = Episode(maze, "stop", MAX_TURNS, RewardWeights())
    turns: list[TurnRecord] = []
    while not episode.ended and not (error and len(turns) == 2):
        text, action = policy(episode, rng)
        failure = FailureReason.NO_ACTION if action is None else None
        turn = episode.take(action)
        word = None if action is None else action.word
        turns.append(TurnRecord(text, word, failure, turn.bumped, episode.position, turn.reward))
    success = str(episode.stop_reason) == "goal" and error is None
    return EpisodeRecord(
        index=index,
        sample=sample,
        maze=maze.to_text(),
        maze_key=maze.key,
        size=maze.size,
        shortest_path=len(maze.shortest_path()),
        goal_rule=GoalRule.STOP,
        max_turns=MAX_TURNS,
        stop_reason=episode.stop_reason,
        success=success,
        return_=sum(turn.reward for turn in turns),
        seconds=0.5,
        error=error,
        turns=tuple(turns),
    )


def play_all(
    mazes: Sequence[Maze], policy: Policy, seed: int, error_at: int | None = None
) -> list[EpisodeRecord]:
    """An episode in each maze; that at `error_at` fails."""
    rng = random.Random(seed)
    return [
        play(maze, policy, rng, index, error="the endpoint gave no answer" if index == error_at else None)
        for index, maze in enumerate(mazes)
    ]


def write(
    folder: Path, episodes: Sequence[EpisodeRecord], policy: str, step: int | None = None, **more: str
) -> None:
    """A result folder of these episodes."""
    names = {"mazes": "visgym-easy-64", "grammar": "tuple", "theme": "visgym", **more}
    rules: dict[str, Any] = {"goal_rule": GoalRule.STOP, "max_turns": MAX_TURNS, "temperature": 0.0}
    conditions = Conditions(policy=policy, step=step, **rules, **names)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_result(folder, Summary.of(conditions, figures(episodes)), episodes)


def write_run(root: Path, mazes: Sequence[Maze], skills: dict[int, float], seed: int = 0) -> None:
    """A run's folder with an evaluation after each of the steps, the policy being as skilled as said."""
    root.mkdir(parents=True)
    with (root / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step, skill in skills.items():
            episodes = play_all(
                mazes, wanderer(skill), seed + step, error_at=5 if step == min(skills) else None
            )
            write(step_folder(root, step), episodes, "simulated", step, adapter=f"{step}.0")
            rate = sum(episode.success for episode in episodes) / len(episodes)
            print(json.dumps({"step": step, "timing/step": 31.5, "eval/solve_rate": rate}), file=file)
