"""QueueController: which fields of which rows are ready where. Metadata only.

The decisions are psrl.transfer.index; this actor tells storage what they put out of use. A restarted controller finds
its rows again by asking storage for a scan.
"""

import logging

from psrl.actor import Actor, handler
from psrl.errors import Revoked, UnknownKey
from psrl.transfer.index import Index
from psrl.transfer.messages import (
    Announced,
    AnnounceRows,
    Cleared,
    ClearKeys,
    ClientReleased,
    FreeRecords,
    Listing,
    ListKeys,
    Located,
    LocateRows,
    NotThere,
    PutRow,
    RecordRef,
    ReleaseClient,
    ScanRecords,
)
from psrl.transfer.storage import StorageActor

logger = logging.getLogger(__name__)


class QueueController(Actor):
    def __init__(self, storage: StorageActor) -> None:
        """`storage` is a ref."""
        self._storage = storage
        self._index = Index()
        self._to_free: dict[RecordRef, None] = {}  # out of use, not yet freed
        self._released: dict[int, int] = {}  # client number -> last incarnation that counts as dead

    async def started(self) -> None:
        scanned = await self._storage.scan_records(ScanRecords())
        for record in scanned.records:
            self._put(record.partition, PutRow(record.key, record.ref, record.fields, record.tag))
        await self._free()

    @handler(idempotent=True)
    async def announce_rows(self, message: AnnounceRows) -> Announced:
        client = message.client
        if client.incarnation <= self._released.get(client.number, 0):
            raise Revoked(f"queue client {client.number} was released: its process counts as dead")
        for row in message.rows:
            self._put(message.partition, row)
        await self._free()
        return Announced()

    @handler(idempotent=True)
    async def locate_rows(self, message: LocateRows) -> Located | NotThere:
        try:
            return Located(self._index.locate(message.partition, message.keys, message.fields))
        except UnknownKey as error:
            return NotThere(str(error))

    @handler(idempotent=True)
    async def list_keys(self, message: ListKeys) -> Listing:
        return Listing(self._index.tags(message.partition))

    @handler(idempotent=True)
    async def clear_keys(self, message: ClearKeys) -> Cleared:
        num_keys, records = self._index.clear(message.partition, message.keys)
        self._to_free.update(dict.fromkeys(records))
        await self._free()
        return Cleared(num_keys)

    @handler(idempotent=True)
    async def release_client(self, message: ReleaseClient) -> ClientReleased:
        """A client's process has ended. What it announced stays; what it wrote but never announced is freed."""
        released = await self._storage.release_client(message)
        if released.client is not None:
            self._released[released.client.number] = released.client.incarnation
        orphans = [record.ref for record in released.records if not self._index.uses(record)]
        self._to_free.update(dict.fromkeys(orphans))
        await self._free()
        return released

    def _put(self, partition: str, row: PutRow) -> None:
        self._to_free.update(dict.fromkeys(self._index.put(partition, row)))

    async def _free(self) -> None:
        """Tell storage. If that fails, the records stay noted for the next time, and the caller hears of it."""
        records = tuple(self._to_free)
        if not records:
            return
        await self._storage.free_records(FreeRecords(records))
        for record in records:
            self._to_free.pop(record, None)
