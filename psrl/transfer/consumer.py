"""Consumer: how a process reads records: as views of its node's arena, or packed; those of other nodes arrive by link.

A view holds a lease, so the bytes stay as they are until the array is gone, whoever clears the row meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psrl._core import Packing, QueueArena, QueueReader, QueueRecord
from psrl.errors import LinkError
from psrl.transfer.fetcher import Fetcher, Reading
from psrl.transfer.jagged import Jagged
from psrl.transfer.landing import Landing
from psrl.transfer.messages import Located, QueueClient, RecordRef

Row = dict[str, NDArray[Any]]


class Consumer:
    """Reads for one client what the controller located. UnknownKey where a record is gone meanwhile."""

    def __init__(self, arena: QueueArena, client: QueueClient, fetcher: Fetcher | None) -> None:
        """Without `fetcher`, rows of this node alone."""
        self._node = client.node
        self._reader = QueueReader(arena, (client.number, client.incarnation))
        self._fetcher = fetcher
        self._landing = Landing() if fetcher is None else fetcher.landing

    async def views(self, located: Located, fields: Sequence[str] | None) -> list[Row]:
        """Each row, in the order of `fields`: read-only views, of rows of other nodes arrays of one buffer."""
        names = [list(each) for each in located.names]
        if all(piece.record.node == self._node for pieces in located.rows for piece in pieces):
            elsewhere = {}
        else:
            elsewhere = await self._fetch_rows(located)
        rows = []
        for pieces in located.rows:
            row: Row = {}
            for piece in pieces:
                if piece.record.node == self._node:
                    found = self._reader.read(piece.record.place, names[piece.names])
                else:
                    arrays = elsewhere[piece.record]
                    found = {name: arrays[name] for name in names[piece.names]}
                row = {**row, **found} if row else found
            rows.append(row if fields is None else {name: row[name] for name in fields})
        return rows

    async def packed(self, located: Located, fields: Sequence[str] | None) -> dict[str, Jagged]:
        """One buffer for all rows; of a single row on this node its views."""
        if len(located.rows) == 1 and all(piece.record.node == self._node for piece in located.rows[0]):
            (row,) = await self.views(located, fields)
            return {name: _single(array) for name, array in row.items()}
        refs = dict.fromkeys(piece.record for pieces in located.rows for piece in pieces)
        readings, opened = await self._open(refs)
        places = {ref: number for number, ref in enumerate(refs)}
        names = [list(each) for each in located.names]
        rows = [[(places[piece.record], names[piece.names]) for piece in pieces] for pieces in located.rows]
        packing = Packing([opened[ref] for ref in refs], rows, None if fields is None else list(fields))
        if readings:
            parts = packing.parts(0, len(refs))
            buffer = await self._fetch(packing.num_bytes, readings, list(refs), parts)
        else:
            buffer, _ = self._landing.take(packing.num_bytes)
        packing.copy(buffer)
        return _columns(packing, buffer)

    async def _fetch_rows(self, located: Located) -> dict[RecordRef, Row]:
        """Of each record that is elsewhere, those of its fields that are wanted."""
        wanted: dict[RecordRef, set[str]] = {}
        for pieces in located.rows:
            for piece in pieces:
                if piece.record.node != self._node:
                    wanted.setdefault(piece.record, set()).update(located.names[piece.names])
        readings, opened = await self._open(wanted)
        parts, place = [], 0
        for number, (ref, names) in enumerate(wanted.items()):
            for name, _, _, offset, num_bytes in opened[ref].fields():
                if name in names:
                    parts.append((number, offset, num_bytes, place))
                    place += -(-num_bytes // 64) * 64
        buffer = await self._fetch(place, readings, list(wanted), np.array(parts, np.int64).reshape(-1, 4))
        rows: dict[RecordRef, Row] = {}
        found = iter(parts)
        for ref, names in wanted.items():
            row = rows[ref] = {}
            for name, dtype, shape, _, num_bytes in opened[ref].fields():
                if name in names:
                    at = next(found)[3]
                    row[name] = np.frombuffer(buffer[at : at + num_bytes], dtype).reshape(shape)
        return rows

    async def _open(self, refs: "dict[RecordRef, Any]") -> tuple[list[Reading], dict[RecordRef, QueueRecord]]:
        """All records: leased here, or on their nodes."""
        by_node: dict[int, list[RecordRef]] = {}
        for ref in refs:
            if ref.node != self._node:
                by_node.setdefault(ref.node, []).append(ref)
        readings: dict[int, Reading] = {}
        if by_node:
            if self._fetcher is None:
                raise LinkError(
                    f"rows are on node {min(by_node)}, and this queue was given no link (connect(bulk=...))"
                )
            readings = await self._fetcher.open(by_node)
        opened = {
            ref: record for node, reading in readings.items() for ref, record in zip(by_node[node], reading.records)
        }
        opened |= {ref: self._reader.open(ref.place) for ref in refs if ref.node == self._node}
        return list(readings.values()), opened

    async def _fetch(
        self, num_bytes: int, readings: list[Reading], refs: list[RecordRef], parts: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """`parts` count records as `refs` do; each node counts its own."""
        assert self._fetcher is not None
        nodes = np.array([ref.node for ref in refs], np.int64)
        asked = []
        for reading in readings:
            mine = nodes == reading.node
            number = np.cumsum(mine) - 1
            rows = parts[mine[parts[:, 0]]].copy()
            rows[:, 0] = number[rows[:, 0]]
            asked.append((reading, rows))
        return await self._fetcher.fetch(num_bytes, asked)


def _columns(packing: Packing, buffer: NDArray[np.uint8]) -> dict[str, Jagged]:
    """The packed fields in `buffer`, which they keep."""
    fields = {}
    for name, dtype, item, _, offsets, place, num_bytes in packing.columns():
        values: NDArray[Any] = np.frombuffer(buffer[place : place + num_bytes], dtype).reshape(-1, *item)
        fields[name] = Jagged(values, offsets)
    return fields


def _single(array: NDArray[Any]) -> Jagged:
    values = array.reshape(1) if array.ndim == 0 else array
    return Jagged(values, np.array([0, len(values)], np.int64))
