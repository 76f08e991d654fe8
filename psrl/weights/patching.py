"""Patches in a server: made from two versions of its store, and applied to one of them while they arrive."""

import os
import time

import numpy as np
import numpy.typing as npt

from psrl._core import (
    PATCH_BLOCK_HEADER_BYTES,
    PATCH_HEADER_BYTES,
    WEIGHT_CHUNK_BYTES,
    WeightLease,
    WeightRelay,
    WeightStore,
    WeightTicket,
)
from psrl.errors import ChecksumMismatch, Revoked, StorageError
from psrl.weights.delta import (
    PatchHeader,
    delta_apply_block,
    delta_encode,
    layout_of,
)
from psrl.weights.manifest import Manifest
from psrl.weights.messages import Prepare

_POLL_S = 0.002

Bytes = npt.NDArray[np.uint8]


def make_patch(store: WeightStore, manifest: Manifest, base: WeightLease, newest: WeightLease) -> tuple[Bytes, float]:
    """The patch between two leased versions, and how long it took. Raises Revoked if one was taken back meanwhile."""
    started = time.perf_counter()
    patch = delta_encode(
        layout_of(manifest),
        newest.epoch,
        base.version,
        newest.version,
        manifest.digest,
        store.view(base),
        store.checksums(base.slot),
        store.view(newest),
        store.checksums(newest.slot),
        num_threads=os.cpu_count() or 1,
    )
    if not (store.valid(base) and store.valid(newest)):
        raise Revoked(f"weights: version {base.version} was taken back before the patch was made")
    return np.frombuffer(bytearray(patch), dtype=np.uint8), time.perf_counter() - started


class PatchApplier:
    """Fills a slot from the leased base by a patch that arrives from the front, block by block, and seals it."""

    def __init__(
        self,
        store: WeightStore,
        manifest: Manifest,
        message: Prepare,
        base: WeightLease,
        ticket: WeightTicket,
        patch: Bytes,
        relay: WeightRelay,
    ) -> None:
        self._store, self._manifest, self._message = store, manifest, message
        self._base, self._ticket, self._patch, self._relay = base, ticket, patch, relay
        self._stopped = False

    def stop(self) -> None:
        """Give up at the next block; from any thread."""
        self._stopped = True

    def run(self) -> float:
        """Blocks until the slot is sealed. How many seconds were spent applying.

        Raises StorageError if it was stopped or the patch is none for this base, ChecksumMismatch if what came out is
        not the version that was sealed at the source.
        """
        layout = layout_of(self._manifest)
        base, out = self._store.view(self._base), self._store.memory(self._ticket)
        base_sums = self._store.checksums(self._base.slot)
        self._wait(PATCH_HEADER_BYTES)
        header = PatchHeader.read(self._patch[:PATCH_HEADER_BYTES])
        if (header.base_hash, header.version, header.num_blocks) != (
            self._message.base,
            self._message.version,
            len(base_sums),
        ):
            raise StorageError(f"weights: the patch to version {self._message.version} is not what was announced")
        sums: list[int] = []
        spent, at = 0.0, PATCH_HEADER_BYTES
        for block in range(header.num_blocks):
            self._wait(at + PATCH_BLOCK_HEADER_BYTES)
            body_bytes = int(self._patch[at + 4 : at + 8].view("<u4")[0])
            end = at + PATCH_BLOCK_HEADER_BYTES + body_bytes
            self._wait(end)
            started = time.perf_counter()
            chunk = slice(block * WEIGHT_CHUNK_BYTES, (block + 1) * WEIGHT_CHUNK_BYTES)
            sums.append(delta_apply_block(layout, self._patch[at:end], base[chunk], base_sums[block], out[chunk]))
            spent += time.perf_counter() - started
            at = end
        if not self._store.valid(self._base):
            raise Revoked(f"weights: version {self._base.version} was taken back while the patch was applied to it")
        if np.array(sums, dtype="<u4").tobytes() != self._message.sums:
            raise ChecksumMismatch(f"weights: the patch makes another version than {self._message.version}")
        self._store.arrived(self._ticket, self._store.data_bytes, sums)
        self._store.seal(self._ticket, self._store.data_bytes)
        return spent

    def _wait(self, num_bytes: int) -> None:
        """Until the first `num_bytes` have arrived."""
        if num_bytes > self._patch.nbytes:
            raise StorageError(f"weights: the patch to version {self._message.version} is cut off")
        unit = -(-num_bytes // self._message.unit_bytes)
        while not self._stopped:
            if self._relay.have()[:unit].count(0) == 0:
                return
            time.sleep(_POLL_S)
        raise StorageError(f"weights: the transfer of version {self._message.version} was given up")
