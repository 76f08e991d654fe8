"""Frames over any asyncio stream socket: the Connection that Unix sockets use, and TCP can."""

import asyncio
from collections.abc import Callable
from typing import cast

from psrl.actor.transport import Connection, Receiver
from psrl.actor.wire import Frames
from psrl.errors import WireError

WRITE_BUFFER_BYTES = 1024 * 1024
FLUSH_TIMEOUT_S = 5.0


class FrameStream(asyncio.Protocol):
    """One socket. `accept` is called when it is open and may refuse by raising PermissionError."""

    def __init__(self, accept: Callable[[Connection, asyncio.Transport], Receiver], limit: int, peer: str) -> None:
        self._accept = accept
        self._frames = Frames(limit)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._lost: str | None = None
        self._paused = False
        self._resumed: list[asyncio.Future[None]] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self.peer = peer

    # What the socket says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        try:
            self._receiver = self._accept(self, self._transport)
        except PermissionError as error:
            self.abort(str(error))

    def data_received(self, data: bytes) -> None:
        if self._lost is not None:
            return
        assert self._receiver is not None
        try:
            for frame in self._frames.feed(data):
                self._receiver.on_frame(frame)
                if self.lost is not None:
                    return
        except WireError as error:
            self._receiver.on_malformed(error)
            self.close(str(error))

    def pause_writing(self) -> None:
        self._paused = True
        if self._receiver is not None:
            self._receiver.on_pressure(True)

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()
        if self._receiver is not None:
            self._receiver.on_pressure(False)

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the peer closed the connection" if error is None else f"the connection broke: {error}")
        if self._flushing is not None:
            self._flushing.cancel()
        if not self._closed.done():
            self._closed.set_result(None)

    # What its owner says.

    @property
    def lost(self) -> str | None:
        return self._lost

    def write(self, frame: bytes | bytearray) -> None:
        if self._lost is None and self._transport is not None:
            self._transport.write(frame)

    async def writable(self) -> None:
        if self._paused and self._lost is None:
            waiter = self._loop.create_future()
            self._resumed.append(waiter)
            await waiter

    def pause_reading(self, paused: bool) -> None:
        if self._transport is None or self._lost is not None:
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self, reason: str) -> None:
        self._end(reason)
        if self._transport is not None and not self._closed.done() and self._flushing is None:
            self._transport.close()
            self._flushing = self._loop.call_later(FLUSH_TIMEOUT_S, self._transport.abort)

    def abort(self, reason: str) -> None:
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        await asyncio.shield(self._closed)

    def _end(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        self._wake()
        if self._receiver is not None:
            self._receiver.on_lost(reason)

    def _wake(self) -> None:
        waiters, self._resumed = self._resumed, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
