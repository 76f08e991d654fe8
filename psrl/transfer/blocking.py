"""BlockingTransferQueue: the queue for code that blocks, such as the trainer's main thread."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from numpy.typing import NDArray

from psrl.actor import BlockingRuntime
from psrl.transfer.client import Mode, TransferQueue
from psrl.transfer.jagged import Jagged
from psrl.transfer.meta import KVBatchMeta
from psrl.transfer.producer import Fields
from psrl.transfer.samplers import AnySampler, SequentialSampler

T = TypeVar("T")

_SEQUENTIAL = SequentialSampler()


class BlockingTransferQueue:
    """TransferQueue without await. `runtime` is the one whose loop `queue` belongs to; call from any other thread."""

    def __init__(self, queue: TransferQueue, runtime: BlockingRuntime, timeout_s: float = 120.0) -> None:
        """`timeout_s` is the deadline of each call, beyond what it may wait for rows; CallTimeout after it."""
        self._queue, self._runtime, self._timeout_s = queue, runtime, timeout_s

    def kv_put(
        self, key: str, partition_id: str, fields: Fields | None = None, tag: Mapping[str, Any] | None = None
    ) -> KVBatchMeta:
        return self._call(self._queue.kv_put(key, partition_id, fields, tag))

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Sequence[Fields] | None = None,
        tags: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> KVBatchMeta:
        return self._call(self._queue.kv_batch_put(keys, partition_id, fields, tags))

    @overload
    def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]]: ...
    @overload
    def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["jagged"],
        timeout_s: float = 0.0,
    ) -> dict[str, Jagged]: ...
    def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows", "jagged"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]] | dict[str, Jagged]:
        if layout == "rows":
            rows = self._queue.kv_batch_get(keys, partition_id, select_fields, timeout_s=timeout_s)
            return self._call(rows, timeout_s)
        packed = self._queue.kv_batch_get(keys, partition_id, select_fields, layout=layout, timeout_s=timeout_s)
        return self._call(packed, timeout_s)

    @overload
    def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]]: ...
    @overload
    def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["jagged"],
        timeout_s: float = 0.0,
    ) -> dict[str, Jagged]: ...
    def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Literal["rows", "jagged"] = "rows",
        timeout_s: float = 0.0,
    ) -> list[dict[str, NDArray[Any]]] | dict[str, Jagged]:
        fields = meta.fields if select_fields is None else select_fields
        if layout == "rows":
            return self.kv_batch_get(meta.keys, meta.partition_id, fields, timeout_s=timeout_s)
        return self.kv_batch_get(meta.keys, meta.partition_id, fields, layout=layout, timeout_s=timeout_s)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return self._call(self._queue.kv_list(partition_id))

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        return self._call(self._queue.kv_clear(keys, partition_id))

    def clear_partition(self, partition_id: str) -> int:
        return self._call(self._queue.clear_partition(partition_id))

    def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int | None,
        partition_id: str,
        mode: Mode = "fetch",
        task_name: str | None = None,
        sampler: AnySampler | str = _SEQUENTIAL,
        timeout_s: float = 0.0,
    ) -> KVBatchMeta:
        meta = self._queue.get_meta(data_fields, batch_size, partition_id, mode, task_name, sampler, timeout_s)
        return self._call(meta, timeout_s)

    def get_consumption_status(self, task_name: str, partition_id: str) -> dict[str, bool]:
        return self._call(self._queue.get_consumption_status(task_name, partition_id))

    def get_production_status(self, data_fields: Sequence[str], partition_id: str) -> dict[str, bool]:
        return self._call(self._queue.get_production_status(data_fields, partition_id))

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        return self._call(self._queue.check_consumption_status(task_name, partition_id))

    def check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        return self._call(self._queue.check_production_status(data_fields, partition_id))

    def reset_consumption(
        self, partition_id: str, task_name: str | None = None, keys: Sequence[str] | None = None
    ) -> int:
        return self._call(self._queue.reset_consumption(partition_id, task_name, keys))

    def close(self) -> None:
        """Write no more, see TransferQueue.close."""
        self._queue.close()

    def _call(self, call: Coroutine[Any, Any, T], wait_s: float = 0.0) -> T:
        return self._runtime.call(call, self._timeout_s + wait_s)
