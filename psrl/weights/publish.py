"""The trainer's end: from torch tensors to a sealed version in a slot.

One process: `slot = publisher.write(epoch, version, tensors)`, then `Publish(version, slot)` to PSManager.
Several ranks: each says once what it holds, `publisher.shard(model.named_parameters(), rank, num_ranks)`; then all call
`slot = publisher.push(group, epoch, version, tensors)`: every rank copies its own shards straight into the slot, no
tensor is ever whole anywhere else, and the version is sealed if all went well, or the slot is free again.

Nothing is cast: a tensor must have the manifest's dtype. A copy is made of one tensor at a time, and only of one that
is not contiguous or not in host memory.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from psrl.errors import StorageError
from psrl.types import Epoch, Version
from psrl.weights.copies import Copy
from psrl.weights.manifest import ITEM_BYTES, Manifest, TensorSpec, canonical_name
from psrl.weights.reshard import Layout, Placement, Replicate, Shard, StridedShard, push_plan, shard_shape
from psrl.weights.store import WeightStore, WeightTicket

Named = tuple[str, torch.Tensor]


class Group(Protocol):
    """The ranks that push together; `psrl.train.ranks.Ranks` is one. Both methods are collective."""

    rank: int
    world_size: int

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank."""

    def problems(self, problem: str) -> list[str]:
        """What went wrong on each rank, on every rank; "" is nothing."""


def describe(named: Iterable[Named], floating: torch.dtype | None = None) -> Manifest:
    """The manifest of a model's state dict (parameters and buffers), tied tensors once.

    `floating` is the dtype in which floating-point tensors will be published, None as they are. Tensors on the meta
    device will do; they count as tied only if they are one object.
    """
    listed: list[tuple[str, str, tuple[int, ...]]] = []
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for wrapped, tensor in named:
        name = canonical_name(wrapped)
        place = _place(tensor)
        if place is not None and place in first:
            tied[name] = first[place]
            continue
        if place is not None:
            first[place] = name
        dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
        listed.append((name, dtype_name(dtype), tuple(tensor.shape)))
    return Manifest.of(listed, tied)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Equal for two tensors that are the same memory; None for an empty one, which shares nothing.

    A shard may be empty on one rank alone, so there it is the storage that tells, and the whole tensor's shape.
    """
    if tensor.numel() == 0:
        return None
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        where: object = (local.untyped_storage()._cdata, local.storage_offset())
    else:
        where = id(tensor) if tensor.is_meta else tensor.data_ptr()
    return (tensor.device, where, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def layout_of(tensor: torch.Tensor, num_ranks: int) -> Layout:
    """How a tensor lies over the ranks; all of it everywhere if it is no DTensor. StorageError for partial sums."""
    if not isinstance(tensor, DTensor):
        return Layout.whole(num_ranks)
    mesh = tensor.device_mesh.mesh
    placements = tuple(_placement(placement) for placement in tensor.placements)
    return Layout(tuple(mesh.shape), tuple(mesh.flatten().tolist()), placements)


def _placement(placement: object) -> Placement:
    dim, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", None)
    if dim is None and type(placement).__name__ == "Replicate":
        return Replicate()
    if dim is None:
        raise StorageError(f"weights: a tensor placed as {placement} cannot be published; reduce it first")
    return Shard(dim) if factor is None else StridedShard(dim, factor)


class _Held(NamedTuple):
    """What this rank holds of a tensor, and which of it this rank puts: uint64 [N, 6], rows as in `Copy`."""

    shape: tuple[int, ...]
    copies: npt.NDArray[np.uint64]


class WeightPublisher:
    """Writes versions that `manifest` describes into the slots of `store`."""

    def __init__(self, store: WeightStore, manifest: Manifest) -> None:
        if store.data_bytes != manifest.total_bytes:
            raise StorageError(
                f"weights: the store's versions have {store.data_bytes} bytes, the manifest {manifest.total_bytes}"
            )
        self.store = store
        self.manifest = manifest
        self._specs = manifest.by_name()
        self._tied = dict(manifest.tied)
        self._held = {
            spec.name: _Held(spec.shape, _table([Copy(0, spec.offset, spec.nbytes)])) for spec in manifest.tensors
        }

    def shard(self, named: Iterable[Named], rank: int, num_ranks: int) -> None:
        """Plan what this rank puts. `named` are its tensors: DTensors, or whole ones that every rank has.

        Only their placement counts, not their values or dtype. Raises StorageError naming what is left over on either
        side.
        """
        layouts = {canonical_name(name): layout_of(tensor, num_ranks) for name, tensor in named}
        unknown = [name for name in layouts if name not in self._specs and name not in self._tied]
        lacking = [name for name in self._specs if name not in layouts]
        if unknown or lacking:
            raise StorageError(
                f"weights: rank {rank} has {_some(unknown)} that the manifest lacks, and lacks {_some(lacking)}"
            )
        plan = push_plan(self.manifest, layouts, rank)
        self._held = {
            spec.name: _Held(shard_shape(spec.shape, layouts[spec.name], rank), _table(plan.get(spec.name, [])))
            for spec in self.manifest.tensors
        }

    def push(self, group: Group, epoch: Epoch, version: Version, tensors: Iterable[Named]) -> int:
        """Fill a free slot together and seal it; returns the slot. All ranks call it; all get it, or all an error.

        If a rank fails, or dies and so ends the others' collectives, no version was written: rank 0 frees the slot, or,
        when it is rank 0 that died, the next epoch takes it over.
        """
        ticket: WeightTicket | None = None

        def begin() -> None:
            nonlocal ticket
            if group.rank == 0:
                ticket = self.begin(epoch, version)

        try:
            _together(group, begin)
            numbers = group.broadcast(msgspec.msgpack.encode((ticket.slot, ticket.generation)) if ticket else None)
            mine = WeightTicket(*msgspec.msgpack.decode(numbers, type=tuple[int, int]))
            _together(group, lambda: self.put(mine, tensors))
            _together(group, lambda: self.checksum_share(mine, group.rank, group.world_size))
            _together(group, lambda: self.seal(mine) if group.rank == 0 else None)
        except BaseException:
            if ticket:
                self.store.abandon(ticket.slot)
            raise
        return mine.slot

    def write(self, epoch: Epoch, version: Version, tensors: Iterable[Named]) -> int:
        """Fill a free slot alone and seal it; returns the slot. If anything fails the slot is free again.

        Raises StaleMessage for an older epoch; StorageError when `version` is not the next one or the tensors are not
        exactly those of the manifest.
        """
        ticket = self.begin(epoch, version)
        try:
            self.put(ticket, tensors)
            self.seal(ticket)
        except BaseException:  # also when interrupted: a slot left open is lost to the next version
            self.store.abandon(ticket.slot)
            raise
        return ticket.slot

    def begin(self, epoch: Epoch, version: Version) -> WeightTicket:
        return self.store.begin(epoch, version, self.manifest.digest)

    def put(self, ticket: WeightTicket, tensors: Iterable[Named]) -> None:
        """Copy in what this rank puts: of whole tensors if it has not planned to `shard`, of DTensors or their local
        parts if it has. Raises StorageError unless they are what was planned.

        The second name of tied weights is skipped, after a look that both still have the same values.
        """
        ends_of_ties: dict[str, torch.Tensor] = {}
        given: set[str] = set()
        for wrapped, tensor in tensors:
            name = canonical_name(wrapped)
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if name in self._tied or name in self._tied.values():
                self._require_tied(name, tensor, ends_of_ties)
            if name in self._tied:
                continue
            held = self._require(name, tensor)
            if name in given:
                raise StorageError(f"weights: tensor {name} was put twice")
            given.add(name)
            if len(held.copies):
                self.store.put_copies(ticket, _bytes_of(tensor), held.copies)
        if lacking := [name for name in self._held if name not in given]:
            raise StorageError(f"weights: {_some(lacking)} is missing")

    def checksum_share(self, ticket: WeightTicket, rank: int, num_ranks: int) -> None:
        """Compute this rank's share of the checksums, when all ranks have put everything."""
        first = self.store.num_chunks * rank // num_ranks
        end = self.store.num_chunks * (rank + 1) // num_ranks
        self.store.checksum(ticket, first, end - first)

    def seal(self, ticket: WeightTicket) -> None:
        """Close the slot, computing what checksums are missing. StorageError if a tensor is missing or came twice."""
        self.store.seal(ticket, self.manifest.payload_bytes)

    def _require(self, name: str, tensor: torch.Tensor) -> _Held:
        spec = self._specs.get(name)
        if spec is None:
            raise StorageError(f"weights: tensor {name} is not in the manifest")
        held = self._held[name]
        if dtype_name(tensor.dtype) != spec.dtype or tuple(tensor.shape) != held.shape:
            raise StorageError(
                f"weights: {name} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, "
                f"the manifest says {spec.dtype} {spec.shape}{_of_which(spec, held)}"
            )
        return held

    def _require_tied(self, name: str, tensor: torch.Tensor, seen: dict[str, torch.Tensor]) -> None:
        key = self._tied.get(name, name)
        other = seen.setdefault(key, tensor)
        if other is not tensor and not torch.equal(other, tensor):
            raise StorageError(f"weights: {name} and {key} are tied, but their values differ")


def _of_which(spec: TensorSpec, held: _Held) -> str:
    return "" if held.shape == spec.shape else f", of which this rank has {held.shape}"


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}" if names else "nothing"


def _table(copies: list[Copy]) -> npt.NDArray[np.uint64]:
    return np.array(copies, dtype=np.uint64).reshape(-1, 6)


def _together(group: Group, work: Callable[[], None]) -> None:
    """Do it on every rank; if it fails on one, raise on all. A barrier."""
    error: Exception | None = None
    try:
        work()
    except Exception as raised:
        error = raised
    problems = group.problems("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if problems:
        raise StorageError(f"weights: nothing was published: {'; '.join(problems)}")


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's elements in row-major order, uint8 [nbytes]; shares memory where it can."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data: npt.NDArray[np.uint8] = plain.view(torch.uint8).numpy()
    assert data.nbytes == tensor.numel() * ITEM_BYTES[dtype_name(tensor.dtype)]
    return data
