"""From episodes to figures: how many mazes were solved, how surely, and how well.

Pure and without chance: the same episodes in any order give the same figures to the last bit.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from skyrl_maze.episode import StopReason
from skyrl_maze.errors import RecordError
from skyrl_maze.records import EpisodeRecord, Figures, PathRate, SizeRate

CONFIDENCE = 0.95


def wilson_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The score interval of a share, (low, high), for trials that are independent of each other.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), 209-212;
    the `wilson` method of statsmodels' `proportion_confint`.

    Raises:
        RecordError: there is no trial, or there are not 0 to `trials` successes.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise RecordError(
            f"no interval of {successes} successes in {trials} trials: give 1 trial or more, and from 0 to "
            "all of them successes"
        )
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, denominator = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / denominator
    half = z / denominator * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # The bounds touch 0 and 1 exactly, which rounding would miss.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def spl(record: EpisodeRecord) -> float:
    """Success weighted by path length, `success * shortest / max(moves, shortest)`.

    Anderson et al., "On evaluation of embodied navigation agents" (2018), arXiv:1807.06757. Moves into a wall
    count as moves.
    """
    return record.success * record.shortest_path / max(record.moves, record.shortest_path)


def figures(records: Sequence[EpisodeRecord]) -> Figures:
    """All figures of an evaluation.

    `solve_rate` is the share of all episodes that were solved; one with an error counts as unsolved. Its
    interval takes the episodes as independent, so with several samples of one maze it is too narrow.
    `spl` is a mean over all episodes. `mean_excess_steps` is moves minus shortest path, of the solved ones,
    and None if none is. `turns`, `parse_failures`, `wall_bumps` and `stop_reasons` are counts over all.

    Raises:
        RecordError: there is no episode, or one of them is there twice.
    """
    if not records:
        raise RecordError("cannot evaluate no episodes: there must be at least one")
    places = Counter((record.index, record.sample) for record in records)
    if twins := [place for place, count in places.items() if count > 1]:
        index, sample = twins[0]
        raise RecordError(f"cannot evaluate: maze {index}, sample {sample} is there twice; keep one")
    solved = [record for record in records if record.success]
    excess = [record.moves - record.shortest_path for record in solved]
    ended = Counter(record.stop_reason for record in records)
    return Figures(
        **_rate(records),
        errors=sum(record.error is not None for record in records),
        spl=math.fsum(map(spl, records)) / len(records),
        mean_excess_steps=sum(excess) / len(excess) if excess else None,
        turns=sum(len(record.turns) for record in records),
        parse_failures=sum(record.parse_failures for record in records),
        wall_bumps=sum(record.wall_bumps for record in records),
        stop_reasons={str(reason): ended[reason] for reason in StopReason if ended[reason]},
        by_size=tuple(
            SizeRate(size=size, **_rate(group)) for size, group in _groups(records, lambda r: r.size)
        ),
        by_shortest_path=tuple(
            PathRate(shortest_path=length, **_rate(group))
            for length, group in _groups(records, lambda r: r.shortest_path)
        ),
    )


def _rate(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    solved = sum(record.success for record in records)
    low, high = wilson_interval(solved, len(records))
    return {
        "episodes": len(records),
        "solve_rate": solved / len(records),
        "solve_rate_low": low,
        "solve_rate_high": high,
    }


def _groups(
    records: Sequence[EpisodeRecord], key: Callable[[EpisodeRecord], int]
) -> list[tuple[int, list[EpisodeRecord]]]:
    return [
        (value, [record for record in records if key(record) == value])
        for value in sorted(set(map(key, records)))
    ]


def metrics(found: Figures) -> dict[str, float]:
    """The figures as the trainer logs them, under `eval/`; those that are None are left out."""
    names = (
        *("solve_rate", "solve_rate_low", "solve_rate_high", "spl", "mean_excess_steps"),
        *("errors", "turns", "parse_failures", "wall_bumps"),
    )
    return {f"eval/{name}": float(value) for name in names if (value := getattr(found, name)) is not None}
