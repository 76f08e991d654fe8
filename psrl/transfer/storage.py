"""StorageActor: who may write where in a node's arena.

All its state is in the segment, which the node agent keeps: a restarted StorageActor takes the same segment, and what
was committed is found by a scan. It never touches rows' bytes: writers and readers do that where they are.
"""

import asyncio
import logging

from psrl._core import ArenaManager, QueueArena, RecordInfo, Segment
from psrl.actor import Actor, handler
from psrl.clock import now
from psrl.transfer.capacity import EXTENTS_PER_GRANT
from psrl.transfer.messages import (
    ClientReleased,
    Freed,
    FreeRecords,
    GetUsage,
    Granted,
    GrantExtents,
    NoRoom,
    QueueClient,
    RecordRef,
    RegisterClient,
    Registered,
    ReleaseClient,
    Scanned,
    ScanRecords,
    StoredRecord,
    Usage,
)

logger = logging.getLogger(__name__)

RECHECK_S = 0.05
"""Readers return leases without a message, so a waiting grant looks again after so long."""


class StorageActor(Actor):
    """The arena of one node."""

    def __init__(self, segment: Segment) -> None:
        """`segment` is laid out by psrl.transfer.segments.NodeSegments. Raises StorageError if it is not."""
        self._segment = segment
        self._arena = QueueArena.open(segment)
        self._manager = ArenaManager(self._arena)
        self._room = asyncio.Event()

    @handler(idempotent=True)
    async def register_client(self, message: RegisterClient) -> Registered:
        number, incarnation = self._manager.register_client(message.name)
        self._room.set()  # an earlier one of that name was released
        return Registered(QueueClient(number, incarnation), self._segment.name, self._segment.generation)

    @handler(idempotent=True)
    async def grant_extents(self, message: GrantExtents) -> Granted | NoRoom:
        client = (message.client.number, message.client.incarnation)
        deadline = now() + message.wait_s
        while True:
            grants = self._manager.grant(client, message.num_bytes, EXTENTS_PER_GRANT, list(message.held))
            if grants:
                return Granted(tuple(grants))
            left = deadline - now()
            if left <= 0:
                return NoRoom(message.num_bytes, self._manager.free_bytes(), self._arena.capacity)
            self._room.clear()
            try:
                async with asyncio.timeout(min(left, RECHECK_S)):
                    await self._room.wait()
            except TimeoutError:
                pass

    @handler(idempotent=True)
    async def free_records(self, message: FreeRecords) -> Freed:
        for record in message.records:
            self._manager.free(record.place)
        self._room.set()
        return Freed()

    @handler(idempotent=True)
    async def release_client(self, message: ReleaseClient) -> ClientReleased:
        """Prefer QueueController.release_client, which also frees rows that were never announced."""
        released = self._manager.release_client(message.client)
        self._room.set()
        if not released.known:
            return ClientReleased(None, 0, 0, ())
        logger.info(
            "released queue client %s: %d extents, %d leases", message.client, released.num_extents, released.num_leases
        )
        return ClientReleased(
            QueueClient(*released.client), released.num_extents, released.num_leases, _stored(released.records)
        )

    @handler(idempotent=True)
    async def scan_records(self, message: ScanRecords) -> Scanned:
        return Scanned(_stored(self._manager.scan()))

    @handler(idempotent=True)
    async def get_usage(self, message: GetUsage) -> Usage:
        return Usage(self._arena.capacity, self._manager.free_bytes(), self._arena.extent_bytes)


def _stored(records: list[RecordInfo]) -> tuple[StoredRecord, ...]:
    return tuple(
        StoredRecord(RecordRef(*info.ref), info.partition, info.key, tuple(info.fields), info.tag) for info in records
    )
