"""Interleaved rounds, and the ratios that come of them.

Every round does each action once, so that all see the same machine. A ratio is taken within a round; what is told is
its median over the rounds, with the smallest and the largest.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

Times = dict[str, list[float]]
"""Seconds of each action, by round."""
Row = dict[str, Any]
"""One line of a result. With `ratio`, `spread`, `rounds`, and the `limit` that it is set against."""


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long it takes. By `time.process_time` it is this process's turns that count, not those of others."""
    started = clock()
    action()
    return clock() - started


def interleaved(
    actions: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """After one round that does not count. Each round begins with another action."""
    times: Times = {name: [] for name in actions}
    for action in actions.values():
        action()
    for turn in range(rounds):
        for name in in_turn(list(actions), turn):
            times[name].append(seconds(actions[name], clock))
    return times


def in_turn(every: Sequence[T], turn: int) -> list[T]:
    first = turn % len(every)
    return [*every[first:], *every[:first]]


def share(ours: Sequence[float], limit: Sequence[float], name: str) -> Row:
    """What part of the limit's rate we reach: 1 is all of it, less is slower."""
    return _ratio([theirs / mine for mine, theirs in zip(ours, limit, strict=True)], name, "share of")


def multiple(ours: Sequence[float], limit: Sequence[float], name: str) -> Row:
    """How many times the limit's time we take: 1 is the limit, more is slower."""
    return _ratio([mine / theirs for mine, theirs in zip(ours, limit, strict=True)], name, "times")


def _ratio(ratios: list[float], limit: str, measure: str) -> Row:
    return {
        "ratio": round(statistics.median(ratios), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "rounds": len(ratios),
        "measure": measure,
        "limit": limit,
    }


def median_ms(times: Sequence[float]) -> float:
    return round(1e3 * statistics.median(times), 3)


def gbytes_per_s(num_bytes: int, times: Sequence[float]) -> float:
    return round(num_bytes / statistics.median(times) / 1e9, 4)


def quantiles_us(times: Sequence[float]) -> Row:
    ordered = sorted(1e6 * taken for taken in times)
    return {
        "p50_us": round(statistics.median(ordered), 2),
        "p10_us": round(ordered[len(ordered) // 10], 2),
        "p90_us": round(ordered[len(ordered) * 9 // 10], 2),
        "count": len(ordered),
    }
