"""TransferQueue: how a process writes rows and reads them.

A put copies the row into this process's own extents of the node's arena, makes it visible there by one flag, and tells
the controller where it is. A get asks the controller for places and returns views of shared memory; each holds a lease,
so the bytes stay as they are until the array is gone, whoever clears the row meanwhile.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from psrl._core import PendingRecord, QueueArena, QueueReader, QueueWriter, record_bytes
from psrl.actor import Runtime, within
from psrl.clock import now
from psrl.errors import ArenaFull, StorageError, UnknownKey
from psrl.transfer.controller import QueueController
from psrl.transfer.messages import (
    AnnounceRows,
    ClearKeys,
    GrantExtents,
    ListKeys,
    LocateRows,
    NoRoom,
    NotThere,
    PutRow,
    QueueClient,
    RecordRef,
    RegisterClient,
    ReleaseClient,
)
from psrl.transfer.meta import KVBatchMeta
from psrl.transfer.segments import Segments
from psrl.transfer.storage import StorageActor

Value = NDArray[Any] | np.generic | bytes
Fields = Mapping[str, Value]

DEFAULT_PUT_TIMEOUT_S = 60.0
ROOM_WAIT_S = 5.0  # of one question for room
NUM_LOOKS = 3  # a row that is put again while it is read is looked up again

_NO_FIELDS: Fields = {}


class TransferQueue:
    """Use from the runtime's event loop. Keys and partitions are created by the first put."""

    def __init__(
        self,
        controller: QueueController,
        storage: StorageActor,
        arena: QueueArena,
        client: QueueClient,
        put_timeout_s: float,
    ) -> None:
        """Use connect()."""
        self._controller, self._storage, self._client = controller, storage, client
        self._put_timeout_s = put_timeout_s
        place = (client.number, client.incarnation)
        self._writer = QueueWriter(arena, place)
        self._reader = QueueReader(arena, place)
        self._asking = asyncio.Lock()  # one question for room at a time

    @classmethod
    async def connect(
        cls,
        runtime: Runtime,
        controller: QueueController,
        storage: StorageActor,
        segments: Segments,
        *,
        client: str,
        put_timeout_s: float = DEFAULT_PUT_TIMEOUT_S,
    ) -> Self:
        """Register as `client`, a name that no other living process uses. Raises StorageError or an ActorError."""
        await controller.release_client(ReleaseClient(client))  # an earlier life, whose death nobody told yet
        registered = await storage.register_client(RegisterClient(client))
        segment = await asyncio.to_thread(segments.fetch, registered.segment)
        if segment.generation != registered.generation:
            raise StorageError(f"segment {registered.segment} is not the one that {storage!r} uses")
        return cls(controller, storage, QueueArena.open(segment), registered.client, put_timeout_s)

    async def kv_put(
        self, key: str, partition_id: str, fields: Fields | None = None, tag: Mapping[str, Any] | None = None
    ) -> KVBatchMeta:
        """Write fields of one row, see kv_batch_put."""
        return await self.kv_batch_put([key], partition_id, [fields or _NO_FIELDS], [tag])

    async def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Sequence[Fields] | None = None,
        tags: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> KVBatchMeta:
        """Write fields of rows: NumPy arrays of any shape and plain dtype, scalars, or bytes (read back as uint8 [N]).

        A field that a row has already is replaced, other fields stay; so does the tag unless one is given. All rows
        become visible, or none. Raises ArenaFull when there is no room for them within put_timeout_s.
        """
        columns = [_NO_FIELDS] * len(keys) if fields is None else fields
        labels: Sequence[Mapping[str, Any] | None] = [None] * len(keys) if tags is None else tags
        if not len(keys) == len(columns) == len(labels):
            raise ValueError(f"{len(keys)} keys with {len(columns)} rows of fields and {len(labels)} tags")
        for key, row, tag in zip(keys, columns, labels):
            if not row and not tag:
                raise ValueError(f"key {key!r}: a put needs fields or a tag")
        encoded = [msgspec.msgpack.encode(tag) if tag else b"" for tag in labels]

        deadline = now() + self._put_timeout_s
        pending = [
            await self._write(partition_id, key, tag, row, deadline) for key, tag, row in zip(keys, encoded, columns)
        ]
        rows = tuple(
            PutRow(key, RecordRef(*record.commit()), tuple(row), tag)
            for key, record, row, tag in zip(keys, pending, columns, encoded)
        )
        await self._controller.announce_rows(AnnounceRows(self._client, partition_id, rows))
        return KVBatchMeta(
            keys=list(keys),
            tags=[dict(tag or {}) for tag in labels],
            partition_id=partition_id,
            fields=list(dict.fromkeys(name for row in columns for name in row)),
        )

    async def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None
    ) -> list[dict[str, NDArray[Any]]]:
        """Read-only views, one dict for each key in order; None selects what each row has.

        Raises UnknownKey if any key or field is not there: never fewer rows than asked for.
        """
        question = LocateRows(partition_id, tuple(keys), None if select_fields is None else tuple(select_fields))
        for look in range(1, NUM_LOOKS + 1):
            located = await self._controller.locate_rows(question)
            if isinstance(located, NotThere):
                raise UnknownKey(located.what)
            try:
                rows = []
                for pieces in located.rows:
                    row: dict[str, NDArray[Any]] = {}
                    for piece in pieces:
                        row.update(self._reader.read(piece.record.place, list(piece.fields)))
                    rows.append(row if select_fields is None else {name: row[name] for name in select_fields})
                return rows
            except UnknownKey:  # cleared or put again since the answer: the controller knows which
                if look == NUM_LOOKS:
                    raise
        raise AssertionError("unreachable")

    async def kv_batch_get_by_meta(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None
    ) -> list[dict[str, NDArray[Any]]]:
        """kv_batch_get of a batch; its own fields if none are selected."""
        fields = meta.fields if select_fields is None else select_fields
        return await self.kv_batch_get(meta.keys, meta.partition_id, fields)

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """partition -> key -> tag, of one partition or all."""
        listing = await self._controller.list_keys(ListKeys(partition_id))
        return {
            partition: {key: msgspec.msgpack.decode(tag) if tag else {} for key, tag in tags.items()}
            for partition, tags in listing.partitions.items()
        }

    async def kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Remove rows; returns how many there were. Clearing again, or what never was, is no error."""
        return (await self._controller.clear_keys(ClearKeys(partition_id, tuple(keys)))).num_keys

    def close(self) -> None:
        """Write no more: gives up the unused extents. Views already handed out stay valid."""
        self._writer.seal()

    async def _write(self, partition: str, key: str, tag: bytes, fields: Fields, deadline: float) -> PendingRecord:
        row = dict(fields)
        while True:
            pending = self._writer.begin(partition, key, tag, row)
            if pending is not None:
                return pending
            await self._get_room(record_bytes(partition, key, tag, row), deadline)

    async def _get_room(self, num_bytes: int, deadline: float) -> None:
        async with self._asking:
            wait_s = max(0.0, min(ROOM_WAIT_S, deadline - now()))
            question = GrantExtents(self._client, num_bytes, tuple(self._writer.held()), wait_s)
            answer = await within(self._storage, wait_s + 10.0).grant_extents(question)
        if not isinstance(answer, NoRoom):
            self._writer.add(list(answer.grants))
        elif now() >= deadline:
            raise ArenaFull(
                f"no room for {num_bytes} bytes within {self._put_timeout_s:g} s: {answer.free_bytes} of "
                f"{answer.capacity} bytes are in free extents; raise transfer_queue.arena_bytes"
            )
