"""Landing: host memory in which packed rows arrive; used again when nobody looks at it any more.

Fresh memory costs more than the bytes that are written to it: the kernel zeroes each page at its first touch. Memory
that other nodes put rows into is also made known to the link once, not for each batch.
"""

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psrl._core import LinkRegion
from psrl.actor.bulk import Bulk

MIN_BYTES = 1 << 20
KEEP_BYTES = 1 << 30
"""Memory that is kept though nobody uses it."""


class Landing:
    """Takes memory from the system as needed. With `bulk` each piece is a region of its endpoint."""

    def __init__(self, bulk: Bulk | None = None) -> None:
        self._bulk = bulk
        self._free: list[tuple[NDArray[np.uint8], LinkRegion | None]] = []

    def take(self, num_bytes: int) -> tuple[NDArray[np.uint8], LinkRegion | None]:
        """A buffer of so many bytes, and its region. It is free again when the last array over it is gone."""
        memory, region = self._find(num_bytes)
        lent = (ctypes.c_char * num_bytes).from_buffer(memory.data)
        weakref.finalize(lent, _give_back, weakref.ref(self), memory, region).atexit = False
        return np.frombuffer(memoryview(lent), np.uint8), region

    def _find(self, num_bytes: int) -> tuple[NDArray[np.uint8], LinkRegion | None]:
        fitting = [
            i for i, (memory, _) in enumerate(self._free) if num_bytes <= len(memory) <= 4 * max(num_bytes, MIN_BYTES)
        ]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i][0])))
        memory = np.empty(max(MIN_BYTES, _rounded(num_bytes)), np.uint8)
        return memory, None if self._bulk is None else self._bulk.endpoint.add_region(memory)

    def _returned(self, memory: NDArray[np.uint8], region: LinkRegion | None) -> None:
        self._free.append((memory, region))
        while sum(len(kept) for kept, _ in self._free) > KEEP_BYTES:
            _, dropped = self._free.pop(0)
            if dropped is not None and self._bulk is not None:
                self._bulk.endpoint.remove_region(dropped)


def _give_back(landing: "weakref.ref[Landing]", memory: NDArray[np.uint8], region: Any) -> None:
    owner = landing()
    if owner is not None:
        owner._returned(memory, region)


def _rounded(num_bytes: int) -> int:
    """Up to an eighth more, so that batches of about one size use the same memory."""
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step
