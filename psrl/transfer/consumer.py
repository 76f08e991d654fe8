"""Consumer: how a process reads records: as views of its node's arena, or packed.

A view holds a lease, so the bytes stay as they are until the array is gone, whoever clears the row meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psrl._core import Packing, QueueArena, QueueReader, QueueRecord
from psrl.transfer.jagged import Jagged
from psrl.transfer.messages import Located, QueueClient

Row = dict[str, NDArray[Any]]


class Consumer:
    """Reads for one client what the controller located. UnknownKey where a record is gone meanwhile."""

    def __init__(self, arena: QueueArena, client: QueueClient) -> None:
        self._node = client.node
        self._reader = QueueReader(arena, (client.number, client.incarnation))

    def views(self, located: Located, fields: Sequence[str] | None) -> list[Row]:
        """Read-only views of each row, in the order of `fields`."""
        names = [list(each) for each in located.names]
        rows = []
        for pieces in located.rows:
            row: Row = {}
            for piece in pieces:
                row.update(self._reader.read(piece.record.place, names[piece.names]))
            rows.append(row if fields is None else {name: row[name] for name in fields})
        return rows

    def packed(self, located: Located, fields: Sequence[str] | None) -> dict[str, Jagged]:
        """One buffer for all rows; of a single row its views."""
        if len(located.rows) == 1:
            (row,) = self.views(located, fields)
            return {name: _single(array) for name, array in row.items()}
        records: list[QueueRecord] = []
        rows: list[list[tuple[int, list[str]]]] = []
        names = [list(each) for each in located.names]
        for pieces in located.rows:
            row_pieces = []
            for piece in pieces:
                row_pieces.append((len(records), names[piece.names]))
                records.append(self._reader.open(piece.record.place))
            rows.append(row_pieces)
        packing = Packing(records, rows, None if fields is None else list(fields))
        buffer = np.empty(packing.num_bytes, np.uint8)
        packing.copy(buffer)
        return columns_of(packing, buffer)


def columns_of(packing: Packing, buffer: NDArray[np.uint8]) -> dict[str, Jagged]:
    """The packed fields in `buffer`, which they keep."""
    fields = {}
    for name, dtype, item, _, offsets, place, num_bytes in packing.columns():
        values: NDArray[Any] = np.frombuffer(buffer[place : place + num_bytes], dtype).reshape(-1, *item)
        fields[name] = Jagged(values, offsets)
    return fields


def _single(array: NDArray[Any]) -> Jagged:
    values = array.reshape(1) if array.ndim == 0 else array
    return Jagged(values, np.array([0, len(values)], np.int64))
