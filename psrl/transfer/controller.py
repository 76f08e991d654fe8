"""QueueController: which fields of which rows are ready where, and which task has consumed them. Metadata only.

The decisions are psrl.transfer.index and psrl.transfer.tasks; this actor tells storage what they put out of use, and
wakes those who wait for rows.

After a restart. Rows, fields and tags are found again by a scan of each node's arena; what a task drew by the notes
that the controller leaves there (a draw for which there was no room to note is offered again, with a warning now).
Put and clear calls that were under way are said again by their callers. Numbers of rows start anew, in the order in
which the rows were written; so GRPOGroupNSampler finds groups again by a tag, not by neighbourhood.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from psrl.actor import Actor, TcpAddress, handler
from psrl.clock import now
from psrl.errors import ActorError, Revoked, StorageError, UnknownKey
from psrl.transfer.index import Index
from psrl.transfer.messages import (
    NOTES,
    AnnounceAgain,
    Announced,
    AnnounceRows,
    AwaitRows,
    CheckRecords,
    Cleared,
    ClearKeys,
    ClientReleased,
    DrawRows,
    FreeRecords,
    GetConsumption,
    GetProduction,
    InsertRows,
    JoinNode,
    LeaveNode,
    Listing,
    ListKeys,
    ListNodes,
    ListUnconsumed,
    Located,
    LocateRows,
    NodeAt,
    Nodes,
    NotReady,
    NotThere,
    NumRows,
    PutRow,
    QueueClient,
    RecordRef,
    Refused,
    ReleaseClient,
    ResetConsumption,
    Rows,
    RowStatus,
    ScanRecords,
    StoredRecord,
    UndoDraw,
    WriteNote,
)
from psrl.transfer.patience import Patience
from psrl.transfer.samplers import Named, Sampler
from psrl.transfer.storage import StorageActor
from psrl.transfer.tasks import Changed, Draw, Tasks
from psrl.transfer.waiting import Waiting

logger = logging.getLogger(__name__)

RESTART_WAIT_S = 10.0
"""For a storage that is being restarted."""

RETRY_S = 1.0
JOIN_TIMEOUT_S = 20.0


class QueueController(Actor):
    def __init__(
        self,
        storage: StorageActor | Mapping[int, StorageActor],
        *,
        samplers: Mapping[str, Sampler] | None = None,
        restart_wait_s: float = RESTART_WAIT_S,
    ) -> None:
        """`storage` are refs, by node; a single one is node 0, and a dead one is waited for so long. `samplers` may be
        named in get_meta."""
        self._storages = dict(storage) if isinstance(storage, Mapping) else {0: storage}
        self._samplers = dict(samplers or {})
        self._nodes: dict[int, NodeAt] = {}  # those that have joined
        self._index = Index()
        self._tasks = Tasks(self._index)
        self._waiting = Waiting()
        self._patience = Patience(restart_wait_s)
        self._to_free: dict[RecordRef, None] = {}  # out of use, not yet freed
        self._freeing = asyncio.Event()
        self._dead: dict[tuple[int, int], int] = {}  # node, client number -> last incarnation that counts as dead

    async def started(self) -> None:
        self._take([record for node in self._storages for record in await self._scan(node)])
        self.spawn(self._free_for_ever(), "free")

    # Rows.

    @handler
    async def announce_rows(self, message: AnnounceRows) -> Announced:
        """Not idempotent for the mailbox: said again to a restarted controller, it needs announce_again."""
        self._announce(message, message.rows)
        return Announced()

    @handler(idempotent=True)
    async def announce_again(self, message: AnnounceAgain) -> Announced:
        """Rows that are not there any more were announced, and cleared or replaced, before."""
        rows = message.announced.rows
        if rows:
            storage = self._storages[rows[0].record.node]
            question = CheckRecords(tuple(row.record for row in rows))
            checked = await self._patience.insist(lambda: storage.check_records(question))
            self._announce(message.announced, [row for row, there in zip(rows, checked.there) if there])
        return Announced()

    @handler(idempotent=True)
    async def locate_rows(self, message: LocateRows) -> Located | NotThere:
        return self._locate(message)

    @handler
    async def await_rows(self, message: AwaitRows) -> Located | NotThere:
        deadline, rows = now() + message.wait_s, message.rows
        wanted = frozenset(rows.fields or ())
        while True:
            found = self._locate(rows)
            if isinstance(found, Located):
                return found
            known = self._index.rows(rows.partition)
            missing = {key for key in rows.keys if key not in known or not wanted <= known[key].fields}

            def completes(keys: Sequence[str], missing: set[str] = missing) -> bool:
                known = self._index.rows(rows.partition)
                missing.difference_update(
                    [key for key in keys if key in missing and key in known and wanted <= known[key].fields]
                )
                return not missing

            if not await self._waiting.change(rows.partition, completes, deadline):
                return self._locate(rows)

    @handler(idempotent=True)
    async def list_keys(self, message: ListKeys) -> Listing:
        return Listing(self._index.tags(message.partition))

    @handler(idempotent=True)
    async def insert_rows(self, message: InsertRows) -> Rows:
        keys = tuple(self._index.insert(message.partition, message.num_rows))
        return Rows(keys, (b"",) * len(keys))

    @handler(idempotent=True)
    async def clear_keys(self, message: ClearKeys) -> Cleared:
        keys = tuple(self._index.rows(message.partition)) if message.keys is None else message.keys
        cleared, records = self._index.clear(message.partition, keys)
        notes = self._tasks.rows_cleared(message.partition, cleared)
        if message.keys is None:
            self._tasks.partition_cleared(message.partition)
        self._to_free.update(dict.fromkeys((*records, *notes)))
        await self._free()
        return Cleared(len(cleared))

    @handler(idempotent=True)
    async def get_production(self, message: GetProduction) -> RowStatus:
        wanted = frozenset(message.fields)
        return RowStatus({key: wanted <= row.fields for key, row in self._index.rows(message.partition).items()})

    # Tasks.

    @handler
    async def draw_rows(self, message: DrawRows) -> Rows | NotReady | NotThere | Refused:
        """Not idempotent for the mailbox: a caller that is gone must not be given rows. `draw` makes it safe to ask
        again."""
        deadline, fields = now() + message.wait_s, frozenset(message.fields)
        try:
            sampler = self._sampler(message)
            while True:
                draw = self._tasks.draw(
                    message.partition, message.task, fields, message.batch_size, sampler, message.draw
                )
                if draw is not None:
                    await self._note(draw)
                    return self._rows(message.partition, sampler.share(draw.sampled, message.batch_size))

                def may_do(_: Sequence[str]) -> bool:
                    return self._tasks.num_ready(message.partition, message.task, fields) >= message.batch_size

                if not await self._waiting.change(message.partition, may_do, deadline):
                    return NotReady(
                        self._tasks.num_ready(message.partition, message.task, fields),
                        len(self._index.rows(message.partition)),
                    )
        except UnknownKey as error:
            return NotThere(str(error))
        except (StorageError, ValueError) as error:
            return Refused(str(error))

    @handler(idempotent=True)
    async def undo_draw(self, message: UndoDraw) -> NumRows:
        notes = self._tasks.undo((message.partition, message.task, message.draw))
        self._free_soon(notes)
        self._waiting.changed(message.partition, ())
        return NumRows(0)

    @handler(idempotent=True)
    async def list_unconsumed(self, message: ListUnconsumed) -> Rows:
        return self._rows(message.partition, self._tasks.unconsumed(message.partition, message.task))

    @handler(idempotent=True)
    async def get_consumption(self, message: GetConsumption) -> RowStatus:
        return RowStatus(self._tasks.consumed(message.partition, message.task))

    @handler(idempotent=True)
    async def reset_consumption(self, message: ResetConsumption) -> NumRows:
        number, changed = self._tasks.reset(message.partition, message.task, message.keys)
        await self._note_anew(changed)
        self._waiting.changed(message.partition, ())
        return NumRows(number)

    # Processes.

    @handler(idempotent=True)
    async def release_client(self, message: ReleaseClient) -> ClientReleased:
        """A client's process has ended. What it announced stays; what it wrote but never announced is freed."""
        known = ClientReleased(None, 0, 0, 0)
        for node, storage in self._storages.items():
            released = await self._patience.insist(partial(storage.release_client, message))
            if released.client is None:
                continue
            known = released
            self._dead[node, released.client.number] = released.client.incarnation
            orphans = [record.ref for record in await self._scan(node, released.client) if not self._index.uses(record)]
            self._to_free.update(dict.fromkeys(orphans))
        await self._free()
        return known

    # Nodes.

    @handler(idempotent=True, timeout_s=60.0)
    async def join_node(self, message: JoinNode) -> Nodes:
        at = message.at
        if self._nodes.get(at.node) != at:
            address = TcpAddress(at.host, at.port)
            storage = await self.runtime.connect(StorageActor, at.actor, address, timeout_s=JOIN_TIMEOUT_S)
            self._storages[at.node] = storage
            found = await self._scan(at.node)
            self._nodes[at.node] = at
            self._take([record for record in found if record.ref not in self._to_free])
        return Nodes(tuple(self._nodes.values()))

    @handler(idempotent=True)
    async def leave_node(self, message: LeaveNode) -> NumRows:
        """Returns how many rows have lost something."""
        node = message.node
        self._nodes.pop(node, None)
        self._storages.pop(node, None)
        for record in [record for record in self._to_free if record.node == node]:
            del self._to_free[record]
        number = 0
        for partition in self._index.partitions():
            lost, gone = self._index.drop_node(partition, node)
            number += len(lost) + len(gone)
            self._tasks.rows_lost(partition, lost)
            self._free_soon(self._tasks.rows_cleared(partition, gone))
        return NumRows(number)

    @handler(idempotent=True)
    async def list_nodes(self, message: ListNodes) -> Nodes:
        return Nodes(tuple(self._nodes.values()))

    # Inside.

    def _take(self, found: list[StoredRecord]) -> None:
        """What a scan found."""
        found.sort(key=lambda record: record.written_ns)
        for record in found:
            if record.partition != NOTES:
                self._put(record.partition, record.key, record.ref, record.fields, record.tag)
        for record in found:
            if record.partition == NOTES:
                self._read_note(record)

    def _announce(self, message: AnnounceRows, rows: Sequence[PutRow]) -> None:
        client, partition = message.client, message.partition
        if client.incarnation <= self._dead.get((client.node, client.number), 0):
            raise Revoked(f"queue client {client.number} was released: its process counts as dead")
        for row in rows:
            self._put(partition, row.key, row.record, message.names[row.names], row.tag)
        self._waiting.changed(partition, [row.key for row in rows])

    def _put(self, partition: str, key: str, record: RecordRef, names: tuple[str, ...], tag: bytes) -> None:
        unused = self._index.put(partition, key, record, names, tag)
        changed = self._tasks.row_put(partition, key)
        if unused:
            self._free_soon(unused)
        if changed.notes:
            self.spawn(self._note_anew(changed), "note anew")

    def _locate(self, rows: LocateRows) -> Located | NotThere:
        try:
            return self._index.locate(rows.partition, rows.keys, rows.fields)
        except UnknownKey as error:
            return NotThere(str(error))

    def _rows(self, partition: str, keys: Iterable[str]) -> Rows:
        rows = self._index.rows(partition)
        there = [key for key in keys if key in rows]
        return Rows(tuple(there), tuple(rows[key].tag for key in there))

    def _sampler(self, message: DrawRows) -> Sampler:
        if not isinstance(message.sampler, Named):
            return message.sampler
        sampler = self._samplers.get(message.sampler.name)
        if sampler is None:
            known = sorted(self._samplers) or "none"
            raise UnknownKey(f"no sampler {message.sampler.name!r}; the controller was given {known}")
        return sampler

    async def _note(self, draw: Draw) -> None:
        """Write the draw down where a restarted controller finds it, before anybody acts on it."""
        if self._tasks.is_noted(draw.key):
            return
        storage = next(iter(self._storages.values()))
        question = WriteNote("/".join(draw.key), msgspec.msgpack.encode(draw))
        note = (await self._patience.insist(lambda: storage.write_note(question))).record
        if note is None:
            logger.warning("queue: no room to note %s: its rows would be offered again after a restart", draw.key)
        elif not self._tasks.noted(draw.key, note):
            self._free_soon([note])

    async def _note_anew(self, changed: Changed) -> None:
        for draw in changed.draws:
            await self._note(draw)
        self._free_soon(changed.notes)

    def _read_note(self, record: StoredRecord) -> None:
        draw = msgspec.msgpack.decode(record.tag, type=Draw)
        if not self._tasks.restore(draw, record.ref):
            self._free_soon([record.ref])

    async def _scan(self, node: int, owner: QueueClient | None = None) -> list[StoredRecord]:
        found: list[StoredRecord] = []
        extent: int | None = 0
        while extent is not None:
            question = ScanRecords(extent, owner)
            page = await self._patience.insist(partial(self._storages[node].scan_records, question))
            found += page.records
            extent = page.next_extent
            for number, incarnation in enumerate(page.incarnations):
                self._dead[node, number] = incarnation - incarnation % 2
        return found

    def _free_soon(self, records: Iterable[RecordRef]) -> None:
        self._to_free.update(dict.fromkeys(records))
        self._freeing.set()

    async def _free_for_ever(self) -> None:
        while True:
            await self._freeing.wait()
            self._freeing.clear()
            try:
                await self._free()
            except ActorError as error:
                logger.warning("queue: storage cannot free %d records now: %s", len(self._to_free), error)
                await asyncio.sleep(RETRY_S)
                self._freeing.set()

    async def _free(self) -> None:
        """Tell storage. If that fails, the records stay noted for the next time, and the caller hears of it."""
        by_node: dict[int, list[RecordRef]] = {}
        for record in self._to_free:
            by_node.setdefault(record.node, []).append(record)
        for node, records in by_node.items():
            question = FreeRecords(tuple(records))
            await self._patience.insist(partial(self._storages[node].free_records, question))
            for record in records:
                self._to_free.pop(record, None)
