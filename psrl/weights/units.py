"""The units of a transfer, as every node works them out from what it is told. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from psrl._core import WEIGHT_CHUNK_BYTES
from psrl.errors import StorageError
from psrl.weights.messages import Prepare
from psrl.weights.topology import Range, Unit, cut

MAX_UNITS = 1 << 22
"""Of a transfer: what every node keeps a row of."""


def pack_ranges(ranges: Iterable[Range]) -> bytes:
    return np.array(list(ranges), dtype="<u8").reshape(-1, 2).tobytes()


def unpack_ranges(packed: bytes) -> list[Range]:
    """Raises StorageError if these are no pairs of numbers."""
    if len(packed) % 16:
        raise StorageError(f"weights: {len(packed)} bytes are no ranges")
    return [(int(offset), int(length)) for offset, length in np.frombuffer(packed, dtype="<u8").reshape(-1, 2)]


@dataclass(frozen=True)
class Units:
    """`parts` are the first units of each source's part, in order. `chunk_bytes` as in csrc/weights/relay.h."""

    units: tuple[Unit, ...]
    parts: tuple[int, ...]
    chunk_bytes: int

    @classmethod
    def of(cls, message: Prepare, version_bytes: int, max_units: int = MAX_UNITS) -> "Units":
        """Raises StorageError for a message that makes no sense."""
        shares = [unpack_ranges(share.ranges) for share in message.shares]
        num_bytes = {"full": version_bytes, "delta": message.patch_bytes}.get(
            message.mode, sum(length for ranges in shares for _, length in ranges)
        )
        if message.unit_bytes <= 0 or not 0 <= num_bytes <= message.unit_bytes * max_units:
            raise StorageError(f"weights: {num_bytes} bytes in units of {message.unit_bytes} bytes")
        if message.mode == "shares":
            parts = [cut(ranges, message.unit_bytes) for ranges in shares]
            begins = np.cumsum([0, *(len(part) for part in parts)]).tolist()
            return cls(tuple(unit for part in parts for unit in part), tuple(begins[:-1]), 0)
        if message.mode == "delta":
            return cls(cut([(0, message.patch_bytes)], message.unit_bytes), (0,), 0)
        if WEIGHT_CHUNK_BYTES % message.unit_bytes:
            raise StorageError(f"weights: units of {message.unit_bytes} bytes do not fill {WEIGHT_CHUNK_BYTES}")
        return cls(cut([(0, version_bytes)], message.unit_bytes), (0,), WEIGHT_CHUNK_BYTES)

    @property
    def num(self) -> int:
        return len(self.units)

    def part(self, index: int) -> tuple[int, int]:
        """First unit and end of a source's part. Raises StorageError if there is no such part."""
        bounds = list(pairwise([*self.parts, self.num]))
        if not 0 <= index < len(bounds):
            raise StorageError(f"weights: no part {index} of {len(bounds)}")
        return bounds[index]

    @property
    def table(self) -> npt.NDArray[np.uint64]:
        """Rows (unit, offset, length)."""
        rows = [(number, offset, length) for number, unit in enumerate(self.units) for offset, length in unit]
        return np.array(rows, dtype=np.uint64).reshape(-1, 3)
