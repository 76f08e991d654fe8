"""The trainer's end: from torch tensors to a sealed version in a slot.

One rank: `slot = publisher.write(epoch, version, tensors)`, then `Publish(version, slot)` to PSManager.
Several ranks: one calls `begin` and sends (slot, generation) to the others; each calls `put` with its tensors or
shards; barrier; each calls `checksum_share`; barrier; one calls `seal`.

Nothing is cast: a tensor must have the manifest's dtype. A copy is made of one tensor at a time, and only of one that
is not contiguous or not in host memory.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from psrl.errors import StorageError
from psrl.types import Epoch, Version
from psrl.weights.manifest import ITEM_BYTES, Manifest, TensorSpec, canonical_name
from psrl.weights.store import WeightStore, WeightTicket

Named = tuple[str, torch.Tensor]
Shard = tuple[str, torch.Tensor, int]
"""Name, a part of the tensor, and the byte of the whole (row-major) tensor that the part starts at."""


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
    """Equal for two tensors that are the same memory; None for an empty one, which shares nothing."""
    if tensor.numel() == 0:
        return None
    where = id(tensor) if tensor.is_meta else tensor.data_ptr()
    return (tensor.device, where, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


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

    def write(self, epoch: Epoch, version: Version, tensors: Iterable[Named | Shard]) -> int:
        """Fill a free slot and seal it; returns the slot. If anything fails the slot is free again.

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

    def put(self, ticket: WeightTicket, tensors: Iterable[Named | Shard]) -> None:
        """Copy tensors or shards in. Each byte once over all ranks; `seal` counts them.

        The second name of tied weights is skipped, after a look that both still have the same values.
        """
        ends_of_ties: dict[str, torch.Tensor] = {}
        for wrapped, tensor, *start in tensors:
            name = canonical_name(wrapped)
            if not start and (name in self._tied or name in self._tied.values()):
                self._require_tied(name, tensor, ends_of_ties)
            if name in self._tied:
                continue
            spec = self._require(name, tensor, whole=not start)
            offset = start[0] if start else 0
            data = _bytes_of(tensor)
            if offset < 0 or offset + data.nbytes > spec.nbytes:
                raise StorageError(f"weights: bytes {offset} + {data.nbytes} are outside of {name}'s {spec.nbytes}")
            if data.nbytes:
                self.store.put(ticket, spec.offset + offset, data)

    def checksum_share(self, ticket: WeightTicket, rank: int, num_ranks: int) -> None:
        """Compute this rank's share of the checksums, when all ranks have put everything."""
        first = self.store.num_chunks * rank // num_ranks
        end = self.store.num_chunks * (rank + 1) // num_ranks
        self.store.checksum(ticket, first, end - first)

    def seal(self, ticket: WeightTicket) -> None:
        """Close the slot, computing what checksums are missing. StorageError if a tensor is missing or came twice."""
        self.store.seal(ticket, self.manifest.payload_bytes)

    def _require(self, name: str, tensor: torch.Tensor, whole: bool) -> TensorSpec:
        spec = self._specs.get(name)
        if spec is None:
            raise StorageError(f"weights: tensor {name} is not in the manifest")
        if hasattr(tensor, "full_tensor"):
            raise StorageError(f"weights: {name} is a DTensor; give its local shard and byte offset, or gather it")
        if dtype_name(tensor.dtype) != spec.dtype or (whole and tuple(tensor.shape) != spec.shape):
            raise StorageError(
                f"weights: {name} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, "
                f"the manifest says {spec.dtype} {spec.shape}"
            )
        return spec

    def _require_tied(self, name: str, tensor: torch.Tensor, seen: dict[str, torch.Tensor]) -> None:
        key = self._tied.get(name, name)
        other = seen.setdefault(key, tensor)
        if other is not tensor and not torch.equal(other, tensor):
            raise StorageError(f"weights: {name} and {key} are tied, but their values differ")


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's elements in row-major order, uint8 [nbytes]; shares memory where it can."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data: npt.NDArray[np.uint8] = plain.view(torch.uint8).numpy()
    assert data.nbytes == tensor.numel() * ITEM_BYTES[dtype_name(tensor.dtype)]
    return data
