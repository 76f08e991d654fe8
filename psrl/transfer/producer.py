"""Producer: how a process writes rows into its node's arena. Nobody sees them before they are announced."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psrl._core import PendingRecords, QueueArena, QueueRows, QueueWriter
from psrl.actor import within
from psrl.clock import now
from psrl.errors import ArenaFull
from psrl.transfer.messages import GrantExtents, NoRoom, QueueClient, RecordRef
from psrl.transfer.patience import Patience
from psrl.transfer.storage import StorageActor

Value = NDArray[Any] | np.generic | bytes
Fields = Mapping[str, Value]
"""Of one row. Torch tensors on the host may stand for arrays."""

Rows = Sequence[tuple[str, bytes, Fields]]
"""Key, encoded tag, fields."""

ROOM_WAIT_S = 5.0  # of one question for room


class Producer:
    """Writes for one client. Use from the event loop."""

    def __init__(
        self, arena: QueueArena, client: QueueClient, storage: StorageActor, timeout_s: float, patience: Patience
    ) -> None:
        """`timeout_s`: how long a write may wait for room."""
        self._client, self._storage, self._timeout_s, self._patience = client, storage, timeout_s, patience
        self._extent_bytes = arena.extent_bytes
        self._writer = QueueWriter(arena, (client.number, client.incarnation))
        self._asking = asyncio.Lock()  # one question for room at a time

    async def write(self, partition: str, rows: Rows) -> list[RecordRef]:
        """Write rows and commit them, all or none. Raises ArenaFull after the time-out, saying where the room is."""
        node = self._client.node
        return [RecordRef(node, *place) for place in (await self.begin(partition, rows)).commit()]

    async def begin(self, partition: str, rows: Rows) -> PendingRecords:
        """Write rows, uncommitted."""
        planned, pending = _planned(partition, rows), PendingRecords()
        self._writer.begin(planned, pending)
        if len(pending) < len(planned):
            await self._go_on(planned, pending)
        return pending

    async def _go_on(self, planned: QueueRows, pending: PendingRecords) -> None:
        """Get room for the rest, and write it."""
        deadline, wait_s, sizes = now() + self._timeout_s, 0.0, planned.num_bytes()
        while len(pending) < len(planned):
            left = sizes[len(pending) :]
            async with self._asking:
                held = tuple(self._writer.held())
                question = GrantExtents(self._client, left[0], self._extents(left), held, wait_s)
                storage = within(self._storage, wait_s + 10.0)
                answer = await self._patience.insist(partial(storage.grant_extents, question))
                if not isinstance(answer, NoRoom):
                    self._writer.add(list(answer.grants))
            if isinstance(answer, NoRoom) and (sum(sizes) > answer.usage.capacity or now() >= deadline):
                raise ArenaFull(self._complaint(left[0], sum(sizes), answer))
            self._writer.begin(planned, pending)
            wait_s = max(0.0, min(ROOM_WAIT_S, deadline - now()))

    def close(self) -> None:
        """Give up the unused rest of the extents in hand."""
        self._writer.seal()

    def _extents(self, sizes: list[int]) -> int:
        """So many rows in a row will fill, each of one extent at most."""
        number, room = 0, 0
        for size in sizes:
            if size > room:
                number, room = number + 1, self._extent_bytes
            room -= size
        return number

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


def _planned(partition: str, rows: Any) -> QueueRows:
    try:
        return QueueRows(partition, rows)
    except TypeError:  # tensors among them, or mappings that are no dicts
        return QueueRows(partition, [(key, tag, _plain(fields)) for key, tag, fields in rows])


def _plain(fields: Fields) -> dict[str, Value]:
    """Tensors as arrays over the same memory."""
    return {
        name: value if isinstance(value, np.ndarray | np.generic | bytes) else _array(name, value)
        for name, value in fields.items()
    }


def _array(name: str, value: Any) -> Any:
    if not hasattr(value, "detach"):
        return value
    try:
        return value.detach().numpy()
    except TypeError as error:  # of a device, or bfloat16
        raise TypeError(f"field {name} is a {value.dtype} tensor on {value.device}: {error}") from None
