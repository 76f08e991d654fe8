"""A version on the device that will use it, before it is used.

    staging.start(min_version=3, timeout_s=30)      at once; a native thread copies, and never takes the GIL
    staging.progress()                              bytes so far
    staged = staging.wait()                         whole and compared with its checksums; staging.tensors are it
    ... copy from staging.tensors ...               until the next start

The buffer is made once, so the tensors are the same objects in every version: what reads them can be worked out once
and repeated (`psrl.weights.device_copies`). On the CPU the device is the host itself, by the same code.
"""

import torch

from psrl._core import Device, HostRegistration, StagedWeights, StageProgress, WeightStager
from psrl.errors import StorageError
from psrl.types import Epoch, Version
from psrl.weights.manifest import Manifest
from psrl.weights.store import WeightStore

__all__ = ["Device", "HostRegistration", "StageProgress", "StagedWeights", "Staging"]

_LOOK_S = 0.1  # how often a wait lets Python handle signals


def manifest_tensors(manifest: Manifest, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The manifest's tensors as views of `flat`, uint8 [total_bytes]."""
    return {
        spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in manifest.tensors
    }


class Staging:
    """One buffer on a device and the thread that fills it with versions that `manifest` describes.

    `client` is this process's name, under which its leases are counted. A segment that was registered with `device`
    (HostRegistration) is copied several times faster to a GPU.
    """

    def __init__(self, store: WeightStore, manifest: Manifest, client: str, device: Device | None = None) -> None:
        if store.data_bytes != manifest.total_bytes:
            raise StorageError(
                f"weights: the store's versions have {store.data_bytes} bytes, the manifest {manifest.total_bytes}"
            )
        self.device = device or Device("cpu")
        where = torch.device(self.device.name)
        buffer = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=where)
        if where.type == "cuda":
            torch.cuda.synchronize(where)  # what used this memory before may still be under way
        self.tensors = manifest_tensors(manifest, buffer)
        """By the manifest's names. Of no version but between `wait` and the next `start`."""
        self._stager = WeightStager(store, manifest.digest, client, self.device, buffer.data_ptr(), buffer)

    def start(
        self, min_version: Version, timeout_s: float, *, min_epoch: Epoch = Epoch(0), in_place: bool = False
    ) -> None:
        """Begin to stage the newest version, as soon as it is at least `min_version` (of at least `min_epoch`).

        `in_place`: compare the bytes where they are, and keep the lease on them; nothing is copied.
        """
        self._stager.start(min_version, min_epoch, timeout_s, in_place)

    def wait(self) -> StagedWeights:
        """What was staged. Raises StorageError when the time was over, the slot has another manifest, or after
        `cancel`; ChecksumMismatch for damaged bytes. Broken off itself, it cancels."""
        try:
            while True:
                staged = self._stager.wait(_LOOK_S)
                if staged is not None:
                    return staged
        except BaseException:
            self._stager.cancel()
            raise

    def cancel(self) -> None:
        """End what runs, after the chunk in flight. From any thread."""
        self._stager.cancel()

    def progress(self) -> StageProgress:
        return self._stager.progress()
