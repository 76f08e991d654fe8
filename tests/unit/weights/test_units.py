import msgspec
import numpy as np
import pytest

from psrl._core import WEIGHT_CHUNK_BYTES
from psrl.errors import StorageError
from psrl.weights.messages import Prepare, Share
from psrl.weights.units import Units, pack_ranges, unpack_ranges

FULL = Prepare(1, "full", 0, 1, bytes(16), b"", WEIGHT_CHUNK_BYTES // 4, 10.0)


def test_a_version_is_cut_within_chunks() -> None:
    units = Units.of(FULL, WEIGHT_CHUNK_BYTES + 5)
    assert units.num == 5
    assert units.units[-1] == ((WEIGHT_CHUNK_BYTES, 5),)
    assert units.part(0) == (0, 5)
    assert units.table.tolist()[1] == [1, WEIGHT_CHUNK_BYTES // 4, WEIGHT_CHUNK_BYTES // 4]


def test_shares_are_parts_of_their_own() -> None:
    message = msgspec.structs.replace(
        FULL,
        mode="shares",
        unit_bytes=10,
        shares=(Share("a", pack_ranges([(0, 15), (30, 10)])), Share("b", b""), Share("c", pack_ranges([(15, 4)]))),
    )
    units = Units.of(message, 100)
    assert [units.part(i) for i in range(3)] == [(0, 3), (3, 3), (3, 4)]
    assert units.units[1] == ((10, 5), (30, 5))
    assert units.chunk_bytes == 0
    with pytest.raises(StorageError, match="no part 3"):
        units.part(3)


def test_a_patch_is_cut_by_itself() -> None:
    units = Units.of(msgspec.structs.replace(FULL, mode="delta", patch_bytes=WEIGHT_CHUNK_BYTES // 4 + 1), 10**9)
    assert (units.num, units.chunk_bytes) == (2, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"unit_bytes": 0}, "units of 0"),
        ({"unit_bytes": -1}, "units of -1"),
        ({"unit_bytes": 3}, "do not fill"),
        ({"mode": "delta", "patch_bytes": 2**50, "unit_bytes": 1}, "in units of 1 "),
        ({"mode": "delta", "patch_bytes": -1}, "-1 bytes in units"),
    ],
)
def test_nonsense_is_refused(change: dict, says: str) -> None:
    with pytest.raises(StorageError, match=says):
        Units.of(msgspec.structs.replace(FULL, **change), 100)


def test_ranges_travel_packed() -> None:
    ranges = [(0, 5), (2**40, 7)]
    assert unpack_ranges(pack_ranges(ranges)) == ranges
    assert pack_ranges([]) == b""
    assert np.frombuffer(pack_ranges(ranges), "<u8").tolist() == [0, 5, 2**40, 7]
    with pytest.raises(StorageError, match="no ranges"):
        unpack_ranges(b"123")
