"""Producer: how a process writes rows into its node's arena. Nobody sees them before they are announced."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psrl._core import PendingRecord, QueueArena, QueueWriter, record_bytes
from psrl.actor import within
from psrl.clock import now
from psrl.errors import ArenaFull
from psrl.transfer.messages import GrantExtents, NoRoom, QueueClient, RecordRef
from psrl.transfer.patience import Patience
from psrl.transfer.storage import StorageActor

Value = NDArray[Any] | np.generic | bytes
Fields = Mapping[str, Value]
"""Of one row. Torch tensors on the host may stand for arrays."""

ROOM_WAIT_S = 5.0  # of one question for room


class Producer:
    """Writes for one client. Use from the event loop."""

    def __init__(
        self, arena: QueueArena, client: QueueClient, storage: StorageActor, timeout_s: float, patience: Patience
    ) -> None:
        """`timeout_s`: how long a write may wait for room."""
        self._client, self._storage, self._timeout_s, self._patience = client, storage, timeout_s, patience
        self._writer = QueueWriter(arena, (client.number, client.incarnation))
        self._asking = asyncio.Lock()  # one question for room at a time

    async def write(self, partition: str, rows: Sequence[tuple[str, bytes, Fields]]) -> list[RecordRef]:
        """Write rows of (key, tag, fields) and commit them, all or none. Raises ArenaFull after the time-out, saying
        where the room is."""
        pending = [await self.begin(partition, key, tag, fields, rows) for key, tag, fields in rows]
        node = self._client.node
        return [RecordRef(node, *record.commit()) for record in pending]

    async def begin(
        self, partition: str, key: str, tag: bytes, fields: Fields, batch: Sequence[tuple[str, bytes, Fields]] = ()
    ) -> PendingRecord:
        """Write one row, uncommitted. `batch` is what it belongs to."""
        row = _plain(fields)
        pending = self._writer.begin(partition, key, tag, row)
        if pending is not None:
            return pending
        num_bytes, deadline, is_first = record_bytes(partition, key, tag, row), now() + self._timeout_s, True
        while True:
            wait_s = 0.0 if is_first else max(0.0, min(ROOM_WAIT_S, deadline - now()))
            async with self._asking:
                question = GrantExtents(self._client, num_bytes, tuple(self._writer.held()), wait_s)
                storage = within(self._storage, wait_s + 10.0)
                answer = await self._patience.insist(partial(storage.grant_extents, question))
                if not isinstance(answer, NoRoom):
                    self._writer.add(list(answer.grants))
            pending = self._writer.begin(partition, key, tag, row)
            if pending is not None:
                return pending
            if isinstance(answer, NoRoom):
                total = sum(record_bytes(partition, key, tag, _plain(fields)) for key, tag, fields in batch)
                if total > answer.usage.capacity or now() >= deadline:
                    raise ArenaFull(self._complaint(num_bytes, total, answer))
            is_first = False

    def close(self) -> None:
        """Give up the unused rest of the extents in hand."""
        self._writer.seal()

    def _complaint(self, num_bytes: int, batch_bytes: int, answer: NoRoom) -> str:
        usage = answer.usage
        if batch_bytes > usage.capacity:
            why = f"no room ever for {batch_bytes} bytes in one put: the arena has {usage.capacity}; put fewer rows"
        else:
            why = f"no room for {num_bytes} bytes within {self._timeout_s:g} s"
        return (
            f"{why}; {usage.free_bytes} of {usage.capacity} bytes on node {self._client.node} are in free extents (of "
            f"{usage.extent_bytes}), {usage.row_bytes} hold rows, {usage.leased_bytes} are cleared but looked at, "
            f"{usage.open_bytes} are open at writers. Clear rows, let go of arrays that were read, or raise "
            "transfer_queue.arena_bytes"
        )


def _plain(fields: Fields) -> dict[str, Value]:
    """Tensors as arrays over the same memory."""
    return {
        name: value if isinstance(value, np.ndarray | np.generic | bytes) else _array(value)
        for name, value in fields.items()
    }


def _array(value: Any) -> Any:
    return value.detach().numpy() if hasattr(value, "detach") else value
