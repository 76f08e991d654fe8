"""Patience: to ask again while who should answer is being restarted."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from psrl.clock import now
from psrl.errors import ActorDied

T = TypeVar("T")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.5


class Patience:
    """How long a call may be said again, in seconds from its first failure."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    async def insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The first answer. Raises the last ActorDied when the wait is over; other errors at once."""
        try:
            return await ask()
        except ActorDied:
            if self.wait_s <= 0:
                raise
        pause, deadline = FIRST_PAUSE_S, now() + self.wait_s
        while True:
            await asyncio.sleep(pause)
            try:
                return await ask()
            except ActorDied:
                if now() >= deadline:
                    raise
            pause = min(2 * pause, LAST_PAUSE_S)
