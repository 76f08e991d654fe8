"""Waiting: consumers that the controller wakes when rows change, so nobody polls."""

import asyncio
from collections.abc import Callable, Sequence

from psrl.clock import now


class Waiting:
    """Who waits for a change in which partition. Belongs to the event loop it is used on."""

    def __init__(self) -> None:
        self._waiters: dict[str, dict[asyncio.Future[None], Callable[[Sequence[str]], bool]]] = {}

    async def change(self, partition: str, concerns: Callable[[Sequence[str]], bool], deadline: float) -> bool:
        """Wait until rows changed and `concerns(keys)` says it matters. False: the deadline came first."""
        left = deadline - now()
        if left <= 0:
            return False
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(partition, {})
        waiters[waiter] = concerns
        try:
            async with asyncio.timeout(left):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            waiters.pop(waiter, None)
            if not waiters and self._waiters.get(partition) is waiters:
                del self._waiters[partition]

    def changed(self, partition: str, keys: Sequence[str]) -> None:
        """These rows of the partition changed: wake those whom it concerns, first come first."""
        for waiter, concerns in self._waiters.get(partition, {}).items():
            if not waiter.done() and concerns(keys):
                waiter.set_result(None)
