"""TransferQueue: how a process writes rows, reads them, and draws batches.

A put copies the row into this process's own extents of the node's arena, makes it visible there by one flag, and tells
the controller where it is. A get asks the controller for places and returns views of shared memory.

Whoever asks waits in the controller, with a deadline, until others have put what is asked for. When the controller or
storage dies, calls are said again to the next one, for at most `restart_wait_s`.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, overload

import msgspec
from numpy.typing import NDArray

from psrl._core import QueueArena
from psrl.actor import Runtime, within
from psrl.actor.bulk import Bulk
from psrl.clock import now
from psrl.errors import ActorDied, ActorError, NotReady, StorageError, UnknownKey
from psrl.transfer import messages as m
from psrl.transfer.consumer import Consumer
from psrl.transfer.controller import QueueController
from psrl.transfer.fetcher import Fetcher
from psrl.transfer.jagged import Jagged
from psrl.transfer.meta import KVBatchMeta
from psrl.transfer.patience import Patience
from psrl.transfer.producer import Fields, Producer
from psrl.transfer.samplers import AnySampler, Named, SequentialSampler
from psrl.transfer.segments import Segments
from psrl.transfer.storage import StorageActor
from psrl.transfer.tasks import OWN

Mode = Literal["insert", "fetch", "force_fetch"]
Tag = Mapping[str, Any]

DEFAULT_PUT_TIMEOUT_S = 60.0
DEFAULT_RESTART_WAIT_S = 10.0
CALL_TIMEOUT_S = 30.0
NUM_LOOKS = 3  # a row that is put again while it is read is looked up again

_NO_FIELDS: Fields = {}
_SEQUENTIAL = SequentialSampler()


class TransferQueue:
    """Use from the runtime's event loop. Keys and partitions are created by the first put."""

    def __init__(
        self,
        controller: QueueController,
        client: m.QueueClient,
        producer: Producer,
        consumer: Consumer,
        patience: Patience,
    ) -> None:
        """Use connect()."""
        self._controller, self._client = controller, client
        self._producer, self._consumer = producer, consumer
        self._patience = patience
        self._draws = itertools.count()

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
        restart_wait_s: float = DEFAULT_RESTART_WAIT_S,
        bulk: Bulk | None = None,
    ) -> Self:
        """Register as `client`, a name that no other living process uses, with the StorageActor of this node.

        Rows of other nodes are had over `bulk`, this process's link endpoint. Raises StorageError or an ActorError.
        """
        patience = Patience(restart_wait_s)
        # An earlier life, whose death nobody told yet.
        await patience.insist(lambda: controller.release_client(m.ReleaseClient(client)))
        registered = await patience.insist(lambda: storage.register_client(m.RegisterClient(client)))
        segment = await asyncio.to_thread(segments.fetch, registered.segment)
        if segment.generation != registered.generation:
            raise StorageError(f"segment {registered.segment} is not the one that {storage!r} uses")
        arena, me = QueueArena.open(segment), registered.client
        producer = Producer(arena, me, storage, put_timeout_s, patience)
        fetcher = None if bulk is None else Fetcher(runtime, controller, bulk, patience)
        return cls(controller, me, producer, Consumer(arena, me, fetcher), patience)

    # Rows by key.

    async def kv_put(
        self, key: str, partition_id: str, fields: Fields | None = None, tag: Tag | None = None
    ) -> KVBatchMeta:
        """Write fields of one row, see kv_batch_put."""
        return await self.kv_batch_put([key], partition_id, [fields or _NO_FIELDS], [tag])

    async def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Sequence[Fields] | None = None,
        tags: Sequence[Tag | None] | None = None,
    ) -> KVBatchMeta:
        """Write fields of rows: NumPy arrays of any shape and plain dtype, scalars, or bytes (read back as uint8 [N]).

        A field that a row has already is replaced, other fields stay; so does the tag unless one is given. All rows
        become visible, or none. Raises ArenaFull when there is no room for them within put_timeout_s; after an
        ActorError it is not known whether they are visible.
        """
        _several(keys, "keys")
        if len(set(keys)) != len(keys):
            raise ValueError("a put has each key once")
        if isinstance(fields, Mapping) or isinstance(tags, Mapping):
            raise TypeError("fields and tags have one dict for each key")
        columns = [_NO_FIELDS] * len(keys) if fields is None else fields
        labels: Sequence[Tag | None] = [None] * len(keys) if tags is None else tags
        if not len(keys) == len(columns) == len(labels):
            raise ValueError(f"{len(keys)} keys with {len(columns)} rows of fields and {len(labels)} tags")
        for key, row, tag in zip(keys, columns, labels):
            if not row and not tag:
                raise ValueError(f"key {key!r}: a put needs fields or a tag")
        if partition_id == m.NOTES:
            raise ValueError("this partition is the queue's own")
        encoded = [_encoded(key, tag) for key, tag in zip(keys, labels)]

        records = await self._producer.write(partition_id, list(zip(keys, encoded, columns)))
        numbers: dict[tuple[str, ...], int] = {}
        rows = tuple(
            m.PutRow(key, record, numbers.setdefault(tuple(row), len(numbers)), tag)
            for key, record, row, tag in zip(keys, records, columns, encoded)
        )
        await self._announce(m.AnnounceRows(self._client, partition_id, rows, tuple(numbers)))
        return KVBatchMeta(
            keys=list(keys),
            tags=[dict(tag or {}) for tag in labels],
            partition_id=partition_id,
            fields=list(dict.fromkeys(name for names in numbers for name in names)),
        )

    @overload
    async def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]]: ...
    @overload
    async def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["jagged"],
        timeout_s: float = 0.0,
    ) -> dict[str, Jagged]: ...
    async def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows", "jagged"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]] | dict[str, Jagged]:
        """Fields of rows, in the order of `keys`; None selects what each row has.

        `rows`: a dict for each row, of read-only views. `jagged`: for each field one packed buffer; all rows must have
        the same fields. Waits up to `timeout_s` for what is not there yet, then raises UnknownKey naming it: never
        fewer rows than asked for. LinkError if rows are on a node that cannot be reached.
        """
        if layout not in ("rows", "jagged"):
            raise ValueError(f"layout is rows or jagged, not {layout!r}")
        _several(keys, "keys")
        _several(select_fields or (), "select_fields")
        question = m.LocateRows(partition_id, tuple(keys), None if select_fields is None else tuple(select_fields))
        deadline = now() + timeout_s
        for look in range(1, NUM_LOOKS + 1):
            located = await self._locate(question, deadline)
            try:
                if layout == "rows":
                    return await self._consumer.views(located, select_fields)
                return await self._consumer.packed(located, select_fields)
            except UnknownKey:  # cleared or put again since the answer: the controller knows which
                if look == NUM_LOOKS:
                    raise
        raise AssertionError("unreachable")

    @overload
    async def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]]: ...
    @overload
    async def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["jagged"],
        timeout_s: float = 0.0,
    ) -> dict[str, Jagged]: ...
    async def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows", "jagged"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]] | dict[str, Jagged]:
        """kv_batch_get of a batch; its own fields if none are selected."""
        fields = meta.fields if select_fields is None else select_fields
        if layout == "rows":
            return await self.kv_batch_get(meta.keys, meta.partition_id, fields, timeout_s=timeout_s)
        return await self.kv_batch_get(meta.keys, meta.partition_id, fields, layout=layout, timeout_s=timeout_s)

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """partition -> key -> tag, of one partition or all."""
        listing = await self._patience.insist(lambda: self._controller.list_keys(m.ListKeys(partition_id)))
        return {
            partition: {key: _decoded(tag) for key, tag in tags.items()}
            for partition, tags in listing.partitions.items()
        }

    async def kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Remove rows; unknown keys are passed over. Returns how many there were. Views in use stay valid."""
        _several(keys, "keys")
        question = m.ClearKeys(partition_id, tuple(keys))
        return (await self._patience.insist(lambda: self._controller.clear_keys(question))).num_keys

    async def clear_partition(self, partition_id: str) -> int:
        """Remove all its rows, and what tasks did with them. Returns how many there were."""
        question = m.ClearKeys(partition_id, None)
        return (await self._patience.insist(lambda: self._controller.clear_keys(question))).num_keys

    # Batches for tasks.

    async def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int | None,
        partition_id: str,
        mode: Mode = "fetch",
        task_name: str | None = None,
        sampler: AnySampler | str = _SEQUENTIAL,
        timeout_s: float = 0.0,
    ) -> KVBatchMeta:
        """Which rows to work on.

        `fetch`: draw `batch_size` rows that have all `data_fields` and that `task_name` has not consumed, by the
        sampler (or the controller's own of that name); they count as consumed. Waits up to `timeout_s` until there are
        enough, then raises NotReady. `force_fetch`: all rows that the task has not consumed, ready or not. `insert`:
        `batch_size` new rows without fields, to be put later.
        """
        _several(data_fields, "data_fields")
        fields = list(dict.fromkeys(data_fields))
        if mode == "insert":
            if batch_size is None or batch_size < 1:
                raise ValueError("insert needs a batch_size")
            return await self._insert(partition_id, batch_size, fields)
        if task_name is None:
            raise ValueError(f"{mode} needs the name of the task that consumes")
        if mode == "force_fetch":
            unconsumed = m.ListUnconsumed(partition_id, task_name)
            rows = await self._patience.insist(lambda: self._controller.list_unconsumed(unconsumed))
            return _meta(rows, partition_id, fields)
        if mode != "fetch" or batch_size is None or batch_size < 1:
            raise ValueError(f"mode is insert, fetch or force_fetch, not {mode!r}; batch_size {batch_size}")
        chosen = Named(sampler) if isinstance(sampler, str) else sampler
        if not isinstance(chosen, Named):
            chosen.check(batch_size)
        return await self._draw(fields, batch_size, partition_id, task_name, chosen, timeout_s)

    async def get_consumption_status(self, task_name: str, partition_id: str) -> dict[str, bool]:
        """Of each row: has the task consumed it?"""
        question = m.GetConsumption(partition_id, task_name)
        return (await self._patience.insist(lambda: self._controller.get_consumption(question))).done

    async def get_production_status(self, data_fields: Sequence[str], partition_id: str) -> dict[str, bool]:
        """Of each row: has it all these fields?"""
        _several(data_fields, "data_fields")
        question = m.GetProduction(partition_id, tuple(data_fields))
        return (await self._patience.insist(lambda: self._controller.get_production(question))).done

    async def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Are there rows, all consumed by the task?"""
        status = await self.get_consumption_status(task_name, partition_id)
        return bool(status) and all(status.values())

    async def check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Are there rows, all with these fields?"""
        status = await self.get_production_status(data_fields, partition_id)
        return bool(status) and all(status.values())

    async def reset_consumption(
        self, partition_id: str, task_name: str | None = None, keys: Sequence[str] | None = None
    ) -> int:
        """Offer consumed rows again: to one task or all, those keys or all. Returns how many."""
        _several(keys or (), "keys")
        question = m.ResetConsumption(partition_id, task_name, None if keys is None else tuple(keys))
        return (await self._patience.insist(lambda: self._controller.reset_consumption(question))).num_rows

    def close(self) -> None:
        """Write no more: gives up the unused extents. Views already handed out stay valid."""
        self._producer.close()

    # Inside.

    async def _announce(self, message: m.AnnounceRows) -> None:
        try:
            await self._controller.announce_rows(message)
        except ActorDied:
            again = m.AnnounceAgain(message)
            await self._patience.insist(lambda: self._controller.announce_again(again))

    async def _locate(self, question: m.LocateRows, deadline: float) -> m.Located:
        try:
            located = await self._controller.locate_rows(question)
        except ActorDied:
            located = await self._patience.insist(lambda: self._controller.locate_rows(question))
        if isinstance(located, m.NotThere) and deadline > now():
            located = await self._patience.insist(lambda: self._await_rows(question, deadline))
        if isinstance(located, m.NotThere):
            raise UnknownKey(located.what)
        return located

    async def _await_rows(self, question: m.LocateRows, deadline: float) -> m.Located | m.NotThere:
        wait_s = max(0.0, deadline - now())
        return await within(self._controller, wait_s + CALL_TIMEOUT_S).await_rows(m.AwaitRows(question, wait_s))

    async def _insert(self, partition_id: str, batch_size: int, fields: list[str]) -> KVBatchMeta:
        question = m.InsertRows(partition_id, batch_size)
        return _meta(await self._patience.insist(lambda: self._controller.insert_rows(question)), partition_id, fields)

    async def _draw(
        self, fields: list[str], batch_size: int, partition: str, task: str, sampler: AnySampler, timeout_s: float
    ) -> KVBatchMeta:
        deadline = now() + timeout_s
        client = self._client
        draw = f"{OWN}{client.node}.{client.number}.{client.incarnation}.{next(self._draws)}"

        async def ask() -> m.Rows | m.NotReady | m.NotThere | m.Refused:
            wait_s = max(0.0, deadline - now())
            question = m.DrawRows(partition, task, tuple(fields), batch_size, sampler, draw, wait_s)
            return await within(self._controller, wait_s + CALL_TIMEOUT_S).draw_rows(question)

        try:
            drawn = await self._patience.insist(ask)
        except asyncio.CancelledError:
            with contextlib.suppress(ActorError):
                await self._controller.undo_draw(m.UndoDraw(partition, task, draw))
            raise
        match drawn:
            case m.Rows():
                return _meta(drawn, partition, fields)
            case m.NotReady():
                raise NotReady(
                    f"task {task!r} asked for {batch_size} rows of partition {partition!r} with {fields}, and "
                    f"{drawn.num_ready} of its {drawn.num_rows} rows were ready after {timeout_s:g} s"
                )
            case m.NotThere():
                raise UnknownKey(drawn.what)
        raise StorageError(drawn.what)


def _meta(rows: m.Rows, partition_id: str, fields: list[str]) -> KVBatchMeta:
    return KVBatchMeta(list(rows.keys), [_decoded(tag) for tag in rows.tags], partition_id, fields)


def _several(names: Sequence[str], what: str) -> None:
    """A single string is a sequence of strings too, and never what was meant."""
    if isinstance(names, str):
        raise TypeError(f"{what} is a list of strings, not {names!r}")


def _encoded(key: str, tag: Tag | None) -> bytes:
    try:
        return msgspec.msgpack.encode(tag) if tag else b""
    except (TypeError, msgspec.MsgspecError) as error:
        raise TypeError(f"key {key!r}: its tag holds more than plain values: {error}") from None


def _decoded(tag: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(tag) if tag else {}
