"""Stretches of time as sorted, disjoint (start, end) pairs. Pure."""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Overlapping and touching ones become one; empty ones vanish."""
    merged: Intervals = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Where both are; both must be disjoint and sorted."""
    common: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def total(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)
