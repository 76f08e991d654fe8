"""A replica's end: the newest version as torch tensors.

    with subscriber.pull(min_version=3, timeout_s=30) as pulled:
        engine.load(pulled.version, pulled.tensors)

By default the version is copied to a private buffer, each chunk compared with its checksum, and the lease looked at
again afterwards; what the body sees is whole, and no push can change it. The buffer is made once and used by all
pulls, so the tensors are good until the end of the `with` block.

With `views=True` nothing is copied: the tensors are the shared memory, compared in place and to be read only. A lease
that was taken back meanwhile is told at the end of the block, by Revoked: what was read may then be of two versions.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from psrl._core import WEIGHT_CHUNK_BYTES
from psrl.errors import Revoked, StorageError
from psrl.types import Epoch, Version
from psrl.weights.manifest import Manifest
from psrl.weights.store import WeightLease, WeightStore

_POLL_S = 0.005


@dataclass(frozen=True)
class Pulled:
    """One version. `tensors` has the names of the manifest; a tied weight's second name is in `manifest.tied`."""

    version: Version
    epoch: Epoch
    tensors: dict[str, torch.Tensor]
    num_revoked: int
    """Leases that were taken back before this one held."""


class WeightSubscriber:
    """Pulls versions that `manifest` describes. `client` is this process's name, under which its leases are counted.

    One pull at a time; not to be shared by threads.
    """

    def __init__(self, store: WeightStore, manifest: Manifest, client: str) -> None:
        if store.data_bytes != manifest.total_bytes:
            raise StorageError(
                f"weights: the store's versions have {store.data_bytes} bytes, the manifest {manifest.total_bytes}"
            )
        self.store = store
        self.manifest = manifest
        self.client = client
        self._digest = manifest.digest
        self._staging: torch.Tensor | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._open = False

    @contextmanager
    def pull(
        self, min_version: Version, timeout_s: float, *, min_epoch: Epoch = Epoch(0), views: bool = False
    ) -> Iterator[Pulled]:
        """The newest version, waiting up to `timeout_s` for one of at least `min_version` (of at least `min_epoch`).

        A lease that is revoked on the way is replaced by one on the newest version, within `timeout_s`. Raises
        StorageError when the time is over or the slot holds another manifest, ChecksumMismatch for damaged bytes.
        """
        if self._open:
            raise StorageError("weights: a pull is still open; its tensors would change under it")
        self._open = True
        try:
            lease, num_revoked = self._acquire_whole(min_version, min_epoch, time.perf_counter() + timeout_s, views)
            pulled = Pulled(Version(lease.version), Epoch(lease.epoch), self._staged, num_revoked)
            if views:
                with self._in_place(lease) as tensors:
                    yield replace(pulled, tensors=tensors)
            else:
                self.store.release(lease)
                yield pulled
        finally:
            self._open = False

    @contextmanager
    def _in_place(self, lease: WeightLease) -> Iterator[dict[str, torch.Tensor]]:
        try:
            yield self._tensors(torch.from_numpy(self.store.view(lease)))
            if not self.store.valid(lease):
                raise Revoked(f"weights: version {lease.version} was taken back while it was read in place")
        finally:
            self.store.release(lease)

    def _acquire_whole(self, min_version: int, min_epoch: int, deadline: float, views: bool) -> tuple[WeightLease, int]:
        """A lease whose bytes were compared: in place (views), or in the private copy, which is then ready."""
        num_revoked = 0
        while True:
            lease = self.store.acquire(self.client, min_version, min_epoch)
            if lease is not None:
                try:
                    self._require_manifest(lease)
                    if views:
                        self.store.verify(lease)
                    else:
                        self._copy(lease)
                    return lease, num_revoked
                except Revoked:
                    num_revoked += 1
                    self.store.release(lease)
                except BaseException:
                    self.store.release(lease)
                    raise
            if time.perf_counter() >= deadline:
                raise StorageError(self._too_late(min_version, min_epoch, num_revoked))
            if lease is None:
                time.sleep(_POLL_S)

    def _copy(self, lease: WeightLease) -> None:
        if self._staging is None:
            self._staging = torch.empty(self.store.data_bytes, dtype=torch.uint8)
            self._staged = self._tensors(self._staging)
        into = self._staging.numpy()
        for chunk in range(self.store.num_chunks):
            start = chunk * WEIGHT_CHUNK_BYTES
            self.store.copy_chunks(lease, chunk, 1, into[start : start + WEIGHT_CHUNK_BYTES])

    def _tensors(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The manifest's tensors as views of `flat`, uint8 [total_bytes]."""
        return {
            spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            for spec in self.manifest.tensors
        }

    def _require_manifest(self, lease: WeightLease) -> None:
        if lease.manifest_hash != self._digest:
            raise StorageError(
                f"weights: version {lease.version} has manifest {lease.manifest_hash.hex()}, "
                f"{self.client} expects {self._digest.hex()}: trainer and replica have different models"
            )

    def _too_late(self, min_version: int, min_epoch: int, num_revoked: int) -> str:
        newest = self.store.newest()
        have = "none" if newest is None else f"version {newest.version} of epoch {newest.epoch}"
        return (
            f"weights: {self.client} got no version >= {min_version} of epoch >= {min_epoch} in time; "
            f"the newest is {have}, {num_revoked} leases were revoked"
        )
