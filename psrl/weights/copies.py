"""Copies between flat memories: runs of bytes at regular distances, and how boxes of tensors become such. Pure."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrl.errors import StorageError

Bytes = npt.NDArray[np.uint8]
Interval = tuple[int, int]
"""From, to (excluded)."""
Box = tuple[Interval, ...]
"""A rectangular part of a tensor: one interval for each of its dimensions."""


class Copy(NamedTuple):
    """`num` runs of `length` bytes, from `offset + i * stride` to `into + i * into_stride`."""

    offset: int
    into: int
    length: int
    num: int = 1
    stride: int = 0
    into_stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.length * self.num

    def runs(self, first: int, end: int) -> "Copy":
        """Its runs `first` to `end` alone."""
        return self._replace(
            offset=self.offset + first * self.stride, into=self.into + first * self.into_stride, num=end - first
        )


def clip(copy: Copy, first: int, end: int) -> Iterator[Copy]:
    """The part of a copy that reads bytes `first` to `end`. Runs must not overlap."""
    stride = copy.stride or max(copy.length, 1)
    # Runs that begin, and runs that end, within the bytes; there is at most one that only begins or only ends there.
    begin = min(max(-(-(first - copy.offset) // stride), 0), copy.num)
    stop = min(max((end - copy.offset - copy.length) // stride + 1, 0), copy.num)
    if begin < stop:
        yield copy.runs(begin, stop)
    for run in {begin - 1, stop} - {-1, copy.num} - set(range(begin, stop)):
        offset = copy.offset + run * copy.stride
        a, b = max(first, offset), min(end, offset + copy.length)
        if a < b:
            yield Copy(a, copy.into + run * copy.into_stride + a - offset, b - a)


def written_intervals(copies: Sequence[Copy]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and stop of each run that is written, sorted."""
    table = np.array(copies, dtype=np.int64).reshape(-1, 6)
    _, into, length, num, _, stride = table.T
    number = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    starts = np.repeat(into, num) + number * np.repeat(stride, num)
    stops = starts + np.repeat(length, num)
    order = np.argsort(starts, kind="stable")
    return starts[order], stops[order]


def box_copies(item: int, shape: Sequence[int], box: Box, into_shape: Sequence[int], into_box: Box) -> Iterator[Copy]:
    """Copies between equal boxes of two row-major tensors with elements of `item` bytes. As few as can be."""
    extents = [stop - start for start, stop in box]
    if 0 in extents:
        return
    # Dimensions that are whole on both sides join the one outside of them, so that few, long runs are left.
    dims: list[tuple[int, int, int, int, int]] = [(1, 0, 1, 0, 1)]  # size, start, size and start there, extent
    for size, (start, _), into_size, (into_start, _), extent in zip(shape, box, into_shape, into_box, extents):
        if extent == size == into_size:
            dims[-1] = tuple(value * extent for value in dims[-1])  # type: ignore[assignment]
        else:
            dims.append((size, start, into_size, into_start, extent))
    # Bytes between neighbours in each dimension.
    steps, into_steps = (
        [item * math.prod(dim[i] for dim in dims[n:]) for n in range(1, len(dims) + 1)] for i in (0, 2)
    )
    offset = sum(dim[1] * step for dim, step in zip(dims, steps))
    into = sum(dim[3] * step for dim, step in zip(dims, into_steps))
    length = dims[-1][4] * item
    *outer, (num, stride, into_stride) = [
        (1, 0, 0),
        *((dim[4], step, into_step) for dim, step, into_step in zip(dims[:-1], steps, into_steps)),
    ]
    for at in itertools.product(*(range(extent) for extent, _, _ in outer)):
        yield Copy(
            offset + sum(i * step for i, (_, step, _) in zip(at, outer)),
            into + sum(i * step for i, (_, _, step) in zip(at, outer)),
            length,
            num,
            stride,
            into_stride,
        )


def apply(copies: Iterable[Copy], source: Bytes, into: Bytes) -> None:
    """Do the copies. Raises StorageError for one that reaches outside."""
    for copy in copies:
        last = copy.num - 1
        ends = (copy.offset + last * copy.stride + copy.length, copy.into + last * copy.into_stride + copy.length)
        if ends[0] > source.nbytes or ends[1] > into.nbytes or min(copy) < 0:
            raise StorageError(f"weights: {copy} is outside of {source.nbytes} or {into.nbytes} bytes")
        shape = (copy.num, copy.length)
        np.lib.stride_tricks.as_strided(into[copy.into :], shape, (copy.into_stride, 1))[...] = (
            np.lib.stride_tricks.as_strided(source[copy.offset :], shape, (copy.stride, 1), writeable=False)
        )
