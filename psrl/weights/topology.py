"""The way of a version through the nodes: who hands which part on to whom. Pure.

A version is cut into units of some MiB. Each source has a part of it, and each part has a `Route`: a tree with its
source at the root. `chain` is a line, near size/bandwidth for any number of nodes; `tree` is the binary one of a heap,
for few bytes over long distances; `star` is the dull twin. With several sources the routes begin at different nodes, so
that no node is everybody's last.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from psrl.errors import StorageError

NodeName = str
Kind = Literal["chain", "tree", "star"]
Range = tuple[int, int]
"""Offset and length in a version, in bytes."""
Unit = tuple[Range, ...]
"""What travels as one: some ranges, with one checksum over them in this order."""


class Route(msgspec.Struct, frozen=True):
    """The way of one source's part. `parents` has each node but the source, in the order in which they hang on it."""

    source: NodeName
    parents: tuple[tuple[NodeName, NodeName], ...]

    @classmethod
    def of(cls, kind: Kind, order: Sequence[NodeName]) -> "Route":
        """A route over `order`, whose first is the source."""
        if len(set(order)) != len(order):
            raise StorageError(f"weights: a node is twice in {', '.join(order)}")
        numbers = range(1, len(order))
        above = {
            "chain": [i - 1 for i in numbers],
            "tree": [(i - 1) // 2 for i in numbers],
            "star": [0 for _ in numbers],
        }
        return cls(order[0], tuple((order[i], order[parent]) for i, parent in zip(numbers, above[kind])))

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        return (self.source, *(node for node, _ in self.parents))

    def parent(self, node: NodeName) -> NodeName | None:
        """Who hands on to `node`; None for the source and for strangers."""
        return dict(self.parents).get(node)

    def children(self, node: NodeName) -> tuple[NodeName, ...]:
        return tuple(child for child, parent in self.parents if parent == node)

    def pass_by(self, node: NodeName, *, dead: bool) -> "Route":
        """The route without `node` as a relay: its children hang on its parent. Dead it is left out, slow it is last.

        The source cannot be passed by.
        """
        above = self.parent(node)
        if above is None:
            return self
        rest = tuple((child, above if parent == node else parent) for child, parent in self.parents if child != node)
        if dead:
            return Route(self.source, rest)
        return Route(self.source, (*rest, (node, rest[-1][0] if rest else self.source)))


def plan_routes(kind: Kind, sources: Sequence[NodeName], destinations: Iterable[NodeName]) -> tuple[Route, ...]:
    """One route for each source, over all other nodes; those of several sources start at different ones of them."""
    nodes = [*sources, *(node for node in destinations if node not in sources)]
    routes = []
    for index, source in enumerate(sources):
        others = [node for node in nodes if node != source]
        turn = len(others) * index // len(sources)
        routes.append(Route.of(kind, (source, *others[turn:], *others[:turn])))
    return tuple(routes)


def cut(ranges: Iterable[Range], unit_bytes: int) -> tuple[Unit, ...]:
    """Units of `unit_bytes` (the last may be smaller). Neighbours are joined first; a long range is cut."""
    units: list[Unit] = []
    unit: list[Range] = []
    room = unit_bytes
    for offset, length in _joined(ranges):
        while length:
            taken = min(length, room)
            unit.append((offset, taken))
            offset, length, room = offset + taken, length - taken, room - taken
            if room == 0:
                units.append(tuple(unit))
                unit, room = [], unit_bytes
    return (*units, tuple(unit)) if unit else tuple(units)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    joined: list[Range] = []
    for offset, length in sorted(ranges):
        if joined and sum(joined[-1]) > offset:
            raise StorageError(f"weights: byte {offset} of the version belongs to two sources' ranges")
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        elif length:
            joined.append((offset, length))
    return joined


def missing(shares: Mapping[NodeName, Iterable[Range]], wanted: Iterable[Range]) -> list[Range]:
    """Bytes of `wanted` that no source has. Raises StorageError when two have the same."""
    have = _joined(one for ranges in shares.values() for one in ranges)
    gaps: list[Range] = []
    at = 0
    for offset, length in _joined(wanted):
        stop = offset + length
        while at < len(have) and sum(have[at]) <= offset:
            at += 1
        index = at
        while offset < stop:
            start, end = (have[index][0], sum(have[index])) if index < len(have) else (stop, stop)
            if start > offset:
                gaps.append((offset, min(start, stop) - offset))
            offset, index = max(end, offset), index + 1
            if start >= stop:
                break
    return gaps
