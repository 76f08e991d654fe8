"""Sender: how a node's rows go to other nodes. Who wants them is in psrl.transfer.fetcher.

fetcher (consumer's process)                 sender (in the StorageActor of the rows' node)
OpenRecords(records)                 -->     leases them
                                     <--     Opened(descriptions)
lays out its buffer, advertises it
SendRecords(parts, window)           -->     puts the parts straight out of the arena
                                     <--     Sent: all is there; the leases are given back
withdraws the window
"""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np

from psrl._core import QueueReader, QueueRecord, Segment
from psrl.actor.bulk import Bulk
from psrl.errors import LinkError, StorageError, UnknownKey
from psrl.transfer.messages import RecordRef

CONNECT_TIMEOUT_S = 10.0


class Sender:
    """Belongs to the event loop it is used on."""

    def __init__(self, segment: Segment, reader: QueueReader, bulk: Bulk) -> None:
        self._segment, self._reader, self._bulk = segment, reader, bulk
        self._region = bulk.endpoint.add_region(segment)
        self._readings: dict[int, tuple[list[QueueRecord], asyncio.TimerHandle]] = {}
        self._numbers = itertools.count()
        self._peers: dict[str, int] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    def open(self, records: Sequence[RecordRef], hold_s: float) -> tuple[int, list[bytes]]:
        """Lease records. Raises UnknownKey if one is gone; then none is leased."""
        opened = [self._reader.open(record.place) for record in records]
        reading = next(self._numbers)
        timer = asyncio.get_running_loop().call_later(hold_s, self._readings.pop, reading, None)
        self._readings[reading] = (opened, timer)
        return reading, [record.description() for record in opened]

    async def send(self, reading: int, parts: bytes, into: bytes, address: str, timeout_s: float) -> int:
        """Put parts of what was opened, and give the leases back. Returns the bytes. Raises UnknownKey if it is not
        open (any more), LinkError if the other end cannot be reached."""
        opened, timer = self._readings.pop(reading, (None, None))
        if opened is None or timer is None:
            raise UnknownKey(f"reading {reading} is not open: it was held too long, or by an earlier life of storage")
        timer.cancel()
        pieces = self._pieces(opened, np.frombuffer(parts, np.int64).reshape(-1, 4))
        peer = await self._peer(address)
        # The bytes must stay until the operation has ended, whoever stops waiting for it.
        putting = asyncio.ensure_future(self._bulk.put(peer, into, self._region, pieces, timeout_s=timeout_s))
        putting.add_done_callback(lambda done: _seen(done, opened))
        try:
            await asyncio.shield(putting)
        except LinkError as error:
            if error.status in ("peer_lost", "closed"):
                self._peers.pop(address, None)
            raise
        return int(pieces[:, 2].sum())

    def _pieces(
        self, opened: list[QueueRecord], parts: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
    ) -> "np.ndarray[tuple[int, int], np.dtype[np.uint64]]":
        places = np.array([record.place_in(self._segment) for record in opened], np.int64)
        lengths = np.array([record.length for record in opened], np.int64)
        record, offset, length, place = parts.T
        if len(parts) and (parts.min() < 0 or record.max() >= len(opened) or (length > lengths[record] - offset).any()):
            raise StorageError("a part lies outside of its record")
        return np.stack([places[record] + offset, place, length], axis=1).astype(np.uint64)

    async def _peer(self, address: str) -> int:
        async with self._connecting.setdefault(address, asyncio.Lock()):
            if address not in self._peers:
                self._peers[address] = await self._bulk.connect(address, timeout_s=CONNECT_TIMEOUT_S)
            return self._peers[address]


def _seen(done: "asyncio.Future[None]", opened: list[QueueRecord]) -> None:
    """Lets the leases go with the callback, and takes note of an error that nobody waits for."""
    if not done.cancelled():
        done.exception()
