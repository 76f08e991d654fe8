"""Bulk data between nodes for asyncio: awaitable operations of one link endpoint.

The endpoint has a thread of its own that moves the bytes; what ended there reaches the loop by a descriptor. An
operation raises LinkError, with its `status`, unless it went well, no later than its timeout. Whoever cancels one
leaves it to its end: its memory must stay until the timeout that it was given.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from psrl._core import LinkEndpoint, LinkEvent, LinkRegion
from psrl.errors import LinkError

CLOSE_TIMEOUT_S = 2.0

OnNotice = Callable[[int, bytes], None]
OnConnected = Callable[[int, str], None]
OnLost = Callable[[int, str], None]


def _ignore(peer: int, what: Any) -> None:
    pass


class Bulk:
    """One endpoint on the running loop; leaving `async with` closes it. Callbacks run on the loop and must not block.

    `on_notice(peer, notice)`: the data it was sent with is there. `on_connected(peer, name)`: a peer has connected to
    us. `on_lost(peer, why)`: a peer is gone, also one that we connected to; its operations have ended.
    """

    def __init__(
        self,
        endpoint: LinkEndpoint,
        on_notice: OnNotice = _ignore,
        on_connected: OnConnected = _ignore,
        on_lost: OnLost = _ignore,
    ) -> None:
        self.endpoint = endpoint
        self._on_notice, self._on_connected, self._on_lost = on_notice, on_connected, on_lost
        self._waiting: dict[int, asyncio.Future[LinkEvent]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(endpoint.fd, self._on_readable)
        self._open = True

    async def connect(self, address: str, *, timeout_s: float) -> int:
        """The peer's number."""
        return (await self._end(self.endpoint.connect(address, timeout_s))).peer

    async def put(
        self,
        peer: int,
        into: bytes,
        source: LinkRegion,
        pieces: npt.ArrayLike,
        notice: bytes = b"",
        *,
        timeout_s: float,
    ) -> None:
        """Copy pieces (local offset, remote offset, length) into a window of the peer, then tell it the notice."""
        await self._end(self.endpoint.put(peer, into, source, pieces, notice, timeout_s))

    async def pull(
        self, peer: int, source: bytes, into: LinkRegion, pieces: npt.ArrayLike, *, timeout_s: float
    ) -> None:
        """Copy pieces (local offset, remote offset, length) from a window of the peer."""
        await self._end(self.endpoint.pull(peer, source, into, pieces, timeout_s))

    async def notify(self, peer: int, notice: bytes, *, timeout_s: float) -> None:
        """Tell the peer something, after everything that was put there before."""
        await self._end(self.endpoint.notify(peer, notice, timeout_s))

    async def flush(self, peer: int, *, timeout_s: float) -> None:
        """Wait until all that was begun with this peer before has ended, well or not."""
        await self._end(self.endpoint.flush(peer, timeout_s))

    async def close(self, *, timeout_s: float) -> bool:
        """End what is under way and say goodbye; False: not every peer did in time. Idempotent."""
        said_goodbye = await asyncio.to_thread(self.endpoint.close, timeout_s)
        if self._open:
            self._open = False
            self._loop.remove_reader(self.endpoint.fd)
            self._on_readable()
        return said_goodbye

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(timeout_s=CLOSE_TIMEOUT_S)

    async def _end(self, op: int) -> LinkEvent:
        if not self._open:  # nobody reads the events any more
            raise LinkError("this endpoint is closed", "closed")
        ended: asyncio.Future[LinkEvent] = self._loop.create_future()
        self._waiting[op] = ended
        event = await ended
        if event.status != "ok":
            raise LinkError(event.data.decode(errors="replace"), event.status)
        return event

    def _on_readable(self) -> None:
        for event in self.endpoint.poll():
            match event.kind:
                case "done":
                    ended = self._waiting.pop(event.op)
                    if not ended.done():  # else its caller was cancelled
                        ended.set_result(event)
                case "notice":
                    self._loop.call_soon(self._on_notice, event.peer, event.data)
                case "connected":
                    self._loop.call_soon(self._on_connected, event.peer, event.data.decode(errors="replace"))
                case "lost":
                    self._loop.call_soon(self._on_lost, event.peer, event.data.decode(errors="replace"))
