"""Who copies which bytes: from the shards of trainer ranks to a version, and from a version to an engine's parameters.

Pure; no torch. A plan is a list of `Copy` (`psrl.weights.copies`), made once and used at each push or pull.

Shards are described as DTensor describes them: a mesh of ranks, and for each dimension of the mesh a placement, applied
from left to right. Sharding follows torch.chunk, so the last shards may be shorter or empty. What several ranks hold
alike they share out evenly: each byte of a version is put by exactly one rank.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from psrl.errors import StorageError
from psrl.weights.copies import Box, Copy, Interval, box_copies, clip, written_intervals
from psrl.weights.manifest import ITEM_BYTES, Manifest, TensorSpec


class Shard(msgspec.Struct, frozen=True):
    """Dimension `dim` is cut into as many chunks as the mesh dimension has ranks."""

    dim: int


class StridedShard(msgspec.Struct, frozen=True):
    """`dim` is cut into `split_factor` parts, of each of which every rank has a chunk (FSDP2 over tensor parallel)."""

    dim: int
    split_factor: int


class Replicate(msgspec.Struct, frozen=True):
    """Every rank of the mesh dimension has the same."""


Placement = Shard | StridedShard | Replicate


class Layout(msgspec.Struct, frozen=True):
    """How one tensor lies over ranks: `ranks` are the mesh's, row-major; there is one placement per mesh dimension."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    @classmethod
    def whole(cls, num_ranks: int) -> "Layout":
        """Every one of `num_ranks` ranks has all of it."""
        return cls((num_ranks,), tuple(range(num_ranks)), (Replicate(),))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The rank's place in the mesh."""
        index, place = self.ranks.index(rank), []
        for size in reversed(self.mesh):
            index, at = divmod(index, size)
            place.append(at)
        return tuple(reversed(place))


# -- shards of ranks --------------------------------------------------------------------------------------------------


def chunk(size: int, num_chunks: int, index: int) -> Interval:
    """The part `index` of torch.chunk(size, num_chunks); empty if torch would give fewer."""
    step = -(-size // num_chunks)
    return min(index * step, size), min((index + 1) * step, size)


def local_intervals(shape: Sequence[int], layout: Layout, rank: int) -> tuple[tuple[Interval, ...], ...]:
    """For each dimension of the tensor the intervals that `rank` holds, in the order in which its shard has them."""
    held: list[tuple[Interval, ...]] = [((0, size),) if size else () for size in shape]
    for size, at, placement in zip(layout.mesh, layout.coordinate(rank), layout.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim
        if not 0 <= dim < len(shape):
            raise StorageError(f"weights: a tensor of shape {tuple(shape)} cannot be sharded over dimension {dim}")
        extent = sum(stop - start for start, stop in held[dim])
        if isinstance(placement, Shard):
            wanted = [chunk(extent, size, at)]
        else:
            parts = [chunk(extent, placement.split_factor, part) for part in range(placement.split_factor)]
            cuts = [(start, chunk(stop - start, size, at)) for start, stop in parts]
            wanted = [(start + first, start + end) for start, (first, end) in cuts]
        held[dim] = tuple(piece for part in wanted for piece in _within(held[dim], *part))
    return tuple(held)


def _within(intervals: Sequence[Interval], first: int, end: int) -> Iterator[Interval]:
    """Positions `first` to `end` of the joined intervals."""
    passed = 0
    for start, stop in intervals:
        a, b = max(first, passed), min(end, passed + stop - start)
        if a < b:
            yield start + a - passed, start + b - passed
        passed += stop - start


def shard_shape(shape: Sequence[int], layout: Layout, rank: int) -> tuple[int, ...]:
    """The shape of the rank's shard."""
    held = local_intervals(shape, layout, rank)
    return tuple(sum(stop - start for start, stop in intervals) for intervals in held)


def push_plan(manifest: Manifest, layouts: Mapping[str, Layout], rank: int) -> dict[str, list[Copy]]:
    """What `rank` puts: for each tensor that it has part of, copies from its (contiguous) shard to the version.

    `layouts` has the tensors that the rank holds, shards or not. Over all ranks each byte is put once: those that hold
    the same share it, in order of the manifest, so that all put about as many bytes.
    """
    held: list[tuple[TensorSpec, tuple[int, ...], Layout, list[Copy]]] = []
    totals: dict[tuple[object, ...], int] = {}
    for spec in manifest.tensors:
        layout = layouts.get(spec.name)
        if layout is None:
            continue
        intervals = local_intervals(spec.shape, layout, rank)
        shape = tuple(sum(stop - start for start, stop in parts) for parts in intervals)
        held.append((spec, shape, layout, list(_from_shard(spec, shape, intervals))))
        group = _replicas(layout)
        totals[group] = totals.get(group, 0) + math.prod(shape) * ITEM_BYTES[spec.dtype]
    plan: dict[str, list[Copy]] = {}
    passed = dict.fromkeys(totals, 0)
    for spec, shape, layout, copies in held:
        group, item = _replicas(layout), ITEM_BYTES[spec.dtype]
        size, start = math.prod(shape) * item, passed[group]
        passed[group] += size
        index, num = _replica_index(layout, rank)
        first, end = (min(max(totals[group] * i // num - start, 0), size) // item * item for i in (index, index + 1))
        mine = copies if (first, end) == (0, size) else [part for c in copies for part in clip(c, first, end)]
        if mine:
            plan[spec.name] = mine
    return plan


def _replicas(layout: Layout) -> tuple[object, ...]:
    """Equal for tensors that the same ranks hold alike."""
    return layout.mesh, layout.ranks, tuple(isinstance(placement, Replicate) for placement in layout.placements)


def _replica_index(layout: Layout, rank: int) -> tuple[int, int]:
    """Which of the ranks that hold the same `rank` is, and how many they are."""
    index, num = 0, 1
    for size, at, placement in zip(layout.mesh, layout.coordinate(rank), layout.placements, strict=True):
        if isinstance(placement, Replicate):
            index, num = index * size + at, num * size
    return index, num


def _from_shard(spec: TensorSpec, shape: tuple[int, ...], held: Sequence[Sequence[Interval]]) -> Iterator[Copy]:
    """Copies from a shard of `shape` to the tensor's place in the version."""
    starts = [list(itertools.accumulate((stop - start for start, stop in parts), initial=0)) for parts in held]
    numbers = [range(len(parts)) for parts in held]
    for chosen in itertools.product(*numbers):
        there = tuple(parts[i] for parts, i in zip(held, chosen))
        here = tuple((start[i], start[i + 1]) for start, i in zip(starts, chosen))
        for copy in box_copies(ITEM_BYTES[spec.dtype], shape, here, spec.shape, there):
            yield copy._replace(into=copy.into + spec.offset)


# -- what an engine needs ---------------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True):
    """A box of tensor `source` of one manifest that fills a box of `target` of another. None is all of it."""

    source: str
    target: str
    box: Box | None = None
    into: Box | None = None


class Coverage(msgspec.Struct, frozen=True):
    """What parts leave over: tensors that nothing reads, and tensors that are not written, or not wholly."""

    unread: tuple[str, ...]
    unwritten: tuple[str, ...]

    def require_complete(self, source: str, target: str) -> None:
        """Raises StorageError that names what is left over on either side."""
        found = [
            f"{len(names)} tensors of {whose} are {what}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            for whose, what, names in (
                (source, "never read", self.unread),
                (target, "not written whole", self.unwritten),
            )
            if names
        ]
        if found:
            raise StorageError(f"weights: {'; '.join(found)}")


def pull_plan(source: Manifest, target: Manifest, parts: Iterable[Part]) -> tuple[list[Copy], Coverage]:
    """Copies from a version of `source` to memory laid out as `target`, and what is left over.

    Raises StorageError for an unknown tensor, boxes that don't fit, or bytes that would be written twice.
    """
    here, there = source.by_name(), target.by_name()
    copies: list[Copy] = []
    read: set[str] = set()
    for part in parts:
        spec, into = here.get(part.source), there.get(part.target)
        if spec is None or into is None:
            raise StorageError(f"weights: no tensor {part.source if spec is None else part.target}")
        if spec.dtype != into.dtype:
            raise StorageError(f"weights: {spec.name} is {spec.dtype}, {into.name} {into.dtype}")
        box, into_box = part.box or whole(spec.shape), part.into or whole(into.shape)
        for name, shape, piece in ((spec.name, spec.shape, box), (into.name, into.shape, into_box)):
            if len(piece) != len(shape) or any(not 0 <= a <= b <= size for (a, b), size in zip(piece, shape)):
                raise StorageError(f"weights: {piece} is no part of {name}, which has shape {shape}")
        if [b - a for a, b in box] != [b - a for a, b in into_box]:
            raise StorageError(f"weights: {box} of {spec.name} does not fit into {into_box} of {into.name}")
        read.add(spec.name)
        copies += [
            copy._replace(offset=copy.offset + spec.offset, into=copy.into + into.offset)
            for copy in box_copies(ITEM_BYTES[spec.dtype], spec.shape, box, into.shape, into_box)
        ]
    unread = tuple(spec.name for spec in source.tensors if spec.nbytes and spec.name not in read)
    return copies, Coverage(unread, _unwritten(target, copies))


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def dim_slice(shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
    """Rows (dim 0), columns (dim 1), ... `start` to `stop`."""
    return tuple((start, stop) if i == dim else (0, size) for i, size in enumerate(shape))


def _unwritten(target: Manifest, copies: Sequence[Copy]) -> tuple[str, ...]:
    """Tensors that are not written whole. Raises StorageError if bytes are written twice."""
    starts, stops = written_intervals(copies)
    if (starts[1:] < stops[:-1]).any():
        at = int(starts[1:][starts[1:] < stops[:-1]][0])
        name = next(spec.name for spec in reversed(target.tensors) if spec.offset <= at and spec.nbytes)
        raise StorageError(f"weights: bytes of {name} would be written twice")
    sums = np.concatenate(([0], np.cumsum(stops - starts)))
    specs = [spec for spec in target.tensors if spec.nbytes]
    first = np.searchsorted(starts, [spec.offset for spec in specs])
    end = np.searchsorted(starts, [spec.offset + spec.nbytes for spec in specs])
    return tuple(spec.name for spec, n in zip(specs, sums[end] - sums[first]) if n != spec.nbytes)
