"""Samplers: which of the rows that are ready a draw takes. Pure values, which travel in the question itself.

    meta = await queue.get_meta(fields, "train", task_name="update", batch_size=64, sampler=GRPOGroupNSampler(8))

Contract. `sample(ready, batch_size)` gets the rows that have all fields asked for and that the task has not consumed,
in the order in which they came; it returns (sampled, consumed): the keys to hand out, and the keys that the task shall
not be offered again. Nothing sampled means: not yet, ask again when there is more. A sampler with a `draw_id` names a
draw that several processes share: the first one to ask draws, the others get the same; `share` cuts out the part of it
that this process gets.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

from psrl.errors import StorageError

Drawn = tuple[list[str], list[str]]
"""(sampled, consumed)"""

_NOT_YET: Drawn = ([], [])


class Candidate:
    """A row that may be drawn. `index` counts the rows of its partition in the order in which they came."""

    def __init__(self, key: str, index: int, encoded_tag: bytes = b"") -> None:
        self.key, self.index, self._encoded_tag = key, index, encoded_tag

    @cached_property
    def tag(self) -> Mapping[str, Any]:
        found: dict[str, Any] = msgspec.msgpack.decode(self._encoded_tag) if self._encoded_tag else {}
        return found

    def number(self, name: str) -> int:
        """What the tag says under `name`. Raises StorageError if that is no integer."""
        value = self.tag.get(name)
        if not isinstance(value, int):
            raise StorageError(f"key {self.key!r}: its tag has no integer {name!r}, which this sampler goes by")
        return value


class Sampler(Protocol):
    """What a sampler of one's own must have, see QueueController(samplers=...)."""

    @property
    def draw_id(self) -> str:
        """Names a draw that several processes share; empty: each draw is its asker's own."""

    def sample(self, ready: Sequence[Candidate], batch_size: int) -> Drawn:
        """(sampled, consumed), see above."""

    def share(self, sampled: list[str], batch_size: int) -> list[str]:
        """The part of a shared draw that the asker gets."""


class _Own(msgspec.Struct, frozen=True, tag=True):
    """Most draws: the asker's own, and all of it."""

    @property
    def draw_id(self) -> str:
        return ""

    def check(self, batch_size: int) -> None:
        """Raises ValueError if no draw of this size is possible."""

    def share(self, sampled: list[str], batch_size: int) -> list[str]:
        return sampled


class SequentialSampler(_Own, frozen=True, tag=True):
    """The first ones."""

    def sample(self, ready: Sequence[Candidate], batch_size: int) -> Drawn:
        return _same([row.key for row in ready[:batch_size]]) if len(ready) >= batch_size else _NOT_YET


class GRPOGroupNSampler(_Own, frozen=True, tag=True):
    """Whole groups of `n` rows, in order. Rows of a group have the same value in their tag under `by`; with an empty
    `by` they came one right after the other, as when one put writes all prompts' responses in order."""

    n: int
    by: str = ""

    def check(self, batch_size: int) -> None:
        if self.n < 1 or batch_size % self.n:
            raise ValueError(f"a batch of {batch_size} rows is not made of groups of {self.n}")

    def sample(self, ready: Sequence[Candidate], batch_size: int) -> Drawn:
        self.check(batch_size)
        keys: list[str] = []
        for group in self._by_tag(ready) if self.by else self._runs(ready):
            if len(keys) >= batch_size:
                break
            keys += [row.key for row in group]
        return _same(keys) if len(keys) == batch_size else _NOT_YET

    def _by_tag(self, ready: Sequence[Candidate]) -> list[list[Candidate]]:
        groups: dict[Any, list[Candidate]] = {}
        for row in ready:
            if self.by in row.tag:
                groups.setdefault(row.tag[self.by], []).append(row)
        return [group[: self.n] for group in groups.values() if len(group) >= self.n]

    def _runs(self, ready: Sequence[Candidate]) -> list[list[Candidate]]:
        groups, run = [], list[Candidate]()
        for row in ready:
            if run and row.index != run[-1].index + 1:
                run = []
            run.append(row)
            if len(run) == self.n:
                groups.append(run)
                run = []
        return groups


class StalenessBufferSampler(_Own, frozen=True, tag=True):
    """The rows that may be trained at version `buffer`: at most `staleness` versions older, by the number in their tag
    under `version`. Oldest first, drawn by `inner`."""

    buffer: int
    staleness: int
    version: str = "version_tag"
    inner: SequentialSampler | GRPOGroupNSampler = SequentialSampler()

    def check(self, batch_size: int) -> None:
        self.inner.check(batch_size)

    def sample(self, ready: Sequence[Candidate], batch_size: int) -> Drawn:
        aged = [(self.buffer - row.number(self.version), row) for row in ready]
        fit = sorted((each for each in aged if 0 <= each[0] <= self.staleness), key=lambda each: -each[0])
        return self.inner.sample([row for _, row in fit], batch_size)


class RankAwareSampler(msgspec.Struct, frozen=True, tag=True):
    """All ranks of data-parallel group `dp_rank` get the same rows for their batch number `batch_index`."""

    dp_rank: int
    batch_index: int
    inner: SequentialSampler | GRPOGroupNSampler | StalenessBufferSampler = SequentialSampler()

    @property
    def draw_id(self) -> str:
        return f"rank {self.dp_rank} batch {self.batch_index}"

    def check(self, batch_size: int) -> None:
        self.inner.check(batch_size)
        if self.dp_rank < 0 or self.batch_index < 0:
            raise ValueError(f"dp_rank {self.dp_rank} and batch_index {self.batch_index} count from 0")

    def sample(self, ready: Sequence[Candidate], batch_size: int) -> Drawn:
        return self.inner.sample(ready, batch_size)

    def share(self, sampled: list[str], batch_size: int) -> list[str]:
        return sampled


class SeqlenBalancedSampler(msgspec.Struct, frozen=True, tag=True):
    """Whole groups of `n`, divided among `dp_size` ranks so that each has about as many tokens. `batch_size` is that of
    one rank; a row's length is the number in its tag under `length`."""

    dp_size: int
    dp_rank: int
    batch_index: int
    n: int = 1
    by: str = ""
    length: str = "total_lengths"

    @property
    def draw_id(self) -> str:
        return f"balanced batch {self.batch_index}"

    def check(self, batch_size: int) -> None:
        GRPOGroupNSampler(self.n).check(batch_size)
        if not 0 <= self.dp_rank < self.dp_size or self.batch_index < 0:
            raise ValueError(f"dp_rank {self.dp_rank} of {self.dp_size}, batch_index {self.batch_index}")

    def sample(self, ready: Sequence[Candidate], batch_size: int) -> Drawn:
        keys, consumed = GRPOGroupNSampler(self.n, self.by).sample(ready, batch_size * self.dp_size)
        if not keys:
            return _NOT_YET
        rows = {row.key: row for row in ready}
        groups = [keys[i : i + self.n] for i in range(0, len(keys), self.n)]
        weights = [sum(rows[key].number(self.length) for key in group) for group in groups]
        shares = balanced(weights, self.dp_size)
        return [key for share in shares for i in share for key in groups[i]], consumed

    def share(self, sampled: list[str], batch_size: int) -> list[str]:
        return sampled[self.dp_rank * batch_size : (self.dp_rank + 1) * batch_size]


class Named(msgspec.Struct, frozen=True, tag=True):
    """The sampler that the controller was given under this name."""

    name: str


AnySampler = (
    SequentialSampler | GRPOGroupNSampler | StalenessBufferSampler | RankAwareSampler | SeqlenBalancedSampler | Named
)


def balanced(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices in `num_parts` parts of equal number and about equal weight, each in ascending order.

    Largest differencing: begin with parts of one index each, made of neighbours in weight; again and again put the two
    most uneven divisions together, heavy parts of one to light parts of the other.
    """
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    divisions = [
        [(weights[i], [i]) for i in order[start : start + num_parts]] for start in range(0, len(order), num_parts)
    ]
    while len(divisions) > 1:
        divisions.sort(key=lambda parts: parts[0][0] - parts[-1][0])
        first, second = divisions.pop(), divisions.pop()
        merged = [(a + b, [*i, *j]) for (a, i), (b, j) in zip(first, reversed(second))]
        divisions.append(sorted(merged, key=lambda part: -part[0]))
    return [sorted(indices) for _, indices in divisions[0]] if divisions else [[] for _ in range(num_parts)]


def _same(keys: list[str]) -> Drawn:
    return keys, keys
