"""The typed face of the C++ core. Errors are those of psrl.errors. Blocking calls release the GIL."""

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def memory_available() -> int:
    """Bytes this process may still touch: the tightest of MemAvailable and all memory cgroups above it."""

def crc32c(data: Buffer, seed: int = 0) -> int:
    """CRC-32C of a contiguous buffer; `seed` is the result so far when it goes on."""

class Segment:
    """Shared memory as a sealed, pre-faulted memfd; mapped until the last view of it is gone."""

    @staticmethod
    def create(name: str, size: int, config_key: str = "transfer_queue.arena_bytes") -> Segment:
        """`size` zeroed bytes. StorageError says needed and available bytes, and `config_key` as what to lower."""

    @staticmethod
    def attach(fd: int, read_only: bool = False) -> Segment:
        """Map the segment behind `fd`; the descriptor stays the caller's. StorageError if it is not one."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def generation(self) -> int:
        """Random, below 2**63; tells one life of a name from the next."""

    @property
    def memory_kind(self) -> str: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def fd(self) -> int: ...
    def view(self, offset: int, length: int, writable: bool = False) -> npt.NDArray[np.uint8]:
        """Bytes of the data as uint8 [length], without a copy."""
