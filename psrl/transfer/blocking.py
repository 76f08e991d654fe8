"""BlockingTransferQueue: the queue for code that blocks, such as the trainer's main thread."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from psrl.actor import BlockingRuntime
from psrl.transfer.client import Fields, TransferQueue
from psrl.transfer.meta import KVBatchMeta


class BlockingTransferQueue:
    """TransferQueue without await. `runtime` is the one whose loop `queue` belongs to; call from any other thread."""

    def __init__(self, queue: TransferQueue, runtime: BlockingRuntime, timeout_s: float = 120.0) -> None:
        """`timeout_s` is the deadline of each call; CallTimeout after it."""
        self._queue, self._runtime, self._timeout_s = queue, runtime, timeout_s

    def kv_put(
        self, key: str, partition_id: str, fields: Fields | None = None, tag: Mapping[str, Any] | None = None
    ) -> KVBatchMeta:
        return self._runtime.call(self._queue.kv_put(key, partition_id, fields, tag), self._timeout_s)

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Sequence[Fields] | None = None,
        tags: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> KVBatchMeta:
        return self._runtime.call(self._queue.kv_batch_put(keys, partition_id, fields, tags), self._timeout_s)

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None
    ) -> list[dict[str, NDArray[Any]]]:
        return self._runtime.call(self._queue.kv_batch_get(keys, partition_id, select_fields), self._timeout_s)

    def kv_batch_get_by_meta(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None
    ) -> list[dict[str, NDArray[Any]]]:
        return self._runtime.call(self._queue.kv_batch_get_by_meta(meta, select_fields), self._timeout_s)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return self._runtime.call(self._queue.kv_list(partition_id), self._timeout_s)

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        return self._runtime.call(self._queue.kv_clear(keys, partition_id), self._timeout_s)
