"""A replica's end: the newest version as torch tensors.

    with subscriber.pull(min_version=3, timeout_s=30) as pulled:
        engine.load(pulled.version, pulled.tensors)

By default the version is staged (`psrl.weights.stage`): copied to a buffer on the device, each chunk compared with its
checksum. What the body sees is whole, and no push can change it. The buffer is made once and used by all pulls:
`tensors` is the same mapping every time, good until the end of the `with` block.

With `views=True` nothing is copied: the tensors are the shared memory, compared in place and to be read only. A lease
that was taken back meanwhile is told at the end of the block, by Revoked: what was read may then be of two versions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from psrl.errors import Revoked, StorageError
from psrl.types import Epoch, Version
from psrl.weights.manifest import Manifest
from psrl.weights.stage import Device, Staging, manifest_tensors
from psrl.weights.store import WeightLease, WeightStore


@dataclass(frozen=True)
class Pulled:
    """One version. `tensors` has the names of the manifest; a tied weight's second name is in `manifest.tied`."""

    version: Version
    epoch: Epoch
    tensors: Mapping[str, torch.Tensor]
    num_revoked: int
    """Leases that were taken back before this one held."""
    transfer_s: float
    """How long its bytes were copied and compared."""


class WeightSubscriber:
    """Pulls versions that `manifest` describes. `client` is this process's name, under which its leases are counted.

    One pull at a time; not to be shared by threads, but for `cancel`.
    """

    def __init__(self, store: WeightStore, manifest: Manifest, client: str, device: Device | None = None) -> None:
        self.store = store
        self.manifest = manifest
        self.client = client
        self._staging = Staging(store, manifest, client, device)
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
            self._staging.start(min_version, timeout_s, min_epoch=min_epoch, in_place=views)
            staged = self._staging.wait()
            lease = staged.lease
            with self._tensors(lease, views) as tensors:
                yield Pulled(Version(lease.version), Epoch(lease.epoch), tensors, staged.num_revoked, staged.seconds)
        finally:
            self._open = False

    def cancel(self) -> None:
        """Break off a pull that another thread waits for; it raises StorageError."""
        self._staging.cancel()

    @contextmanager
    def _tensors(self, lease: WeightLease, views: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        if not views:
            yield self._staging.tensors
            return
        try:
            yield manifest_tensors(self.manifest, torch.from_numpy(self.store.view(lease)))
            if not self.store.valid(lease):
                raise Revoked(f"weights: version {lease.version} was taken back while it was read in place")
        finally:
            self.store.release(lease)
