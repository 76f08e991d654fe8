"""StorageActor: who may write where in a node's arena.

Its truth is in the segment, which the node agent keeps: a restarted StorageActor takes the same segment, and what was
committed is found by a scan. It never touches rows' bytes: writers and readers do that where they are.
"""

import asyncio
import logging

from psrl._core import (
    ArenaManager,
    PendingRecords,
    QueueArena,
    QueueReader,
    QueueRows,
    QueueWriter,
    RecordInfo,
    Segment,
)
from psrl.actor import Actor, handler
from psrl.actor.bulk import Bulk
from psrl.clock import now
from psrl.errors import ArenaFull, LinkError, UnknownKey
from psrl.transfer.capacity import EXTENTS_PER_GRANT
from psrl.transfer.messages import (
    NOTES,
    Checked,
    CheckRecords,
    ClientReleased,
    Freed,
    FreeRecords,
    GetUsage,
    Granted,
    GrantExtents,
    NoRoom,
    Noted,
    NotSent,
    NotThere,
    Opened,
    OpenRecords,
    QueueClient,
    RecordRef,
    RegisterClient,
    Registered,
    ReleaseClient,
    Scanned,
    ScanRecords,
    SendRecords,
    Sent,
    StoredRecord,
    Usage,
    WriteNote,
)
from psrl.transfer.sender import Sender

logger = logging.getLogger(__name__)

RECHECK_S = 0.05
"""Readers return leases without a message, so a waiting grant looks again after so long."""

SCAN_PAGE = 4096
"""Records in one answer to a scan, about: whole extents are told."""

NOTE_CLIENT = "storage notes"
SEND_CLIENT = "storage for other nodes"
NOTE_EXTENTS = 2
"""Kept free for notes once there are some: a draw from a full arena is what empties it."""


class StorageActor(Actor):
    """The arena of one node."""

    def __init__(self, segment: Segment, node: int = 0, bulk: Bulk | None = None) -> None:
        """`segment` is laid out by psrl.transfer.segments.NodeSegments. Raises StorageError if it is not.

        With `bulk`, rows are sent to other nodes over its endpoint.
        """
        self._segment, self._node = segment, node
        self._arena = QueueArena.open(segment)
        self._manager = ArenaManager(self._arena)
        self._room = asyncio.Event()
        self._notes: tuple[QueueWriter, tuple[int, int]] | None = None  # with its client
        self._left_notes: dict[tuple[str, bytes], RecordRef] = {}  # by key and text, of earlier processes of this node
        self._sender: Sender | None = None
        if bulk is not None:
            reader = QueueReader(self._arena, self._manager.register_client(SEND_CLIENT))
            self._sender = Sender(segment, reader, bulk)

    @handler(idempotent=True)
    async def register_client(self, message: RegisterClient) -> Registered:
        number, incarnation = self._manager.register_client(message.name)
        self._room.set()  # an earlier one of that name was released
        client = QueueClient(self._node, number, incarnation)
        return Registered(client, self._segment.name, self._segment.generation)

    @handler(idempotent=True)
    async def grant_extents(self, message: GrantExtents) -> Granted | NoRoom:
        client = (message.client.number, message.client.incarnation)
        deadline = now() + message.wait_s
        while True:
            keep = NOTE_EXTENTS if self._notes is not None else 0
            count = max(EXTENTS_PER_GRANT, message.num_extents)
            try:
                grants = self._manager.grant(client, message.num_bytes, count, list(message.held), keep)
            except ArenaFull:  # there can never be room; the writer sees why from the usage
                return NoRoom(self._usage())
            if grants:
                return Granted(tuple(grants))
            left = deadline - now()
            if left <= 0:
                return NoRoom(self._usage())
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
    async def check_records(self, message: CheckRecords) -> Checked:
        return Checked(tuple(self._manager.holds(record.place) for record in message.records))

    @handler(idempotent=True)
    async def release_client(self, message: ReleaseClient) -> ClientReleased:
        """Prefer QueueController.release_client, which also frees rows that were never announced."""
        released = self._manager.release_client(message.client)
        self._room.set()
        if not released.known:
            return ClientReleased(None, 0, 0, 0)
        logger.info(
            "released queue client %s: %d extents, %d leases", message.client, released.num_extents, released.num_leases
        )
        client = QueueClient(self._node, *released.client)
        return ClientReleased(client, released.num_extents, released.num_leases, released.num_records)

    @handler(idempotent=True)
    async def scan_records(self, message: ScanRecords) -> Scanned:
        owner = None if message.owner is None else (message.owner.number, message.owner.incarnation)
        found, after = self._manager.scan(message.first_extent, SCAN_PAGE, owner)
        is_last = after == self._arena.num_extents
        return Scanned(
            tuple(self._stored(info) for info in found),
            None if is_last else after,
            tuple(self._manager.incarnations()),
        )

    @handler(idempotent=True)
    async def write_note(self, message: WriteNote) -> Noted:
        if self._notes is None:
            self._open_notes()
        # A predecessor that was killed may have written it and not answered: its record is the answer.
        left = self._left_notes.pop((message.key, message.text), None)
        if left is not None and self._manager.holds(left.place):
            return Noted(left)
        refs = self._begin_note(message.key, message.text).commit()
        return Noted(RecordRef(self._node, *refs[0]) if refs else None)

    @handler
    async def open_records(self, message: OpenRecords) -> Opened | NotThere:
        try:
            reading, descriptions = self._to_others().open(message.records, message.hold_s)
        except UnknownKey as error:
            return NotThere(str(error))
        return Opened(reading, tuple(descriptions))

    @handler
    async def send_records(self, message: SendRecords) -> Sent | NotSent | NotThere:
        try:
            sent = await self._to_others().send(
                message.reading, message.parts, message.into, message.address, message.timeout_s
            )
        except UnknownKey as error:
            return NotThere(str(error))
        except LinkError as error:
            return NotSent(error.status, str(error))
        return Sent(sent)

    def _to_others(self) -> Sender:
        if self._sender is None:
            raise LinkError(f"the storage of node {self._node} was given no link: its rows stay on the node")
        return self._sender

    @handler(idempotent=True)
    async def get_usage(self, message: GetUsage) -> Usage:
        return self._usage()

    def _open_notes(self) -> None:
        client = self._manager.register_client(NOTE_CLIENT)
        self._notes = (QueueWriter(self._arena, client), client)
        after = 0
        while after < self._arena.num_extents:
            found, after = self._manager.scan(after, SCAN_PAGE, None)
            notes = [self._stored(info) for info in found if info.partition == NOTES]
            self._left_notes |= {(note.key, note.tag): note.ref for note in notes}

    def _begin_note(self, key: str, text: bytes) -> PendingRecords:
        """Empty if there is no room."""
        assert self._notes is not None
        writer, client = self._notes
        rows, pending = QueueRows(NOTES, [(key, text, {})]), PendingRecords()
        writer.begin(rows, pending)
        if not len(pending):
            writer.add(self._manager.grant(client, rows.num_bytes()[0], 1, writer.held()))
            writer.begin(rows, pending)
        return pending

    def _usage(self) -> Usage:
        found = self._manager.usage()
        return Usage(
            capacity=self._arena.capacity,
            extent_bytes=self._arena.extent_bytes,
            free_bytes=found.free,
            row_bytes=found.rows,
            open_bytes=found.open,
            leased_bytes=found.leased,
        )

    def _stored(self, info: RecordInfo) -> StoredRecord:
        ref = RecordRef(self._node, *info.ref)
        return StoredRecord(ref, info.partition, info.key, tuple(info.fields), info.tag, info.written_ns)
