"""Frames over any asyncio stream socket: the Connection and the Listener that Unix sockets and TCP use."""

import asyncio
import logging
import socket
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import cast

from psrl.actor.transport import Address, Connection, Receiver
from psrl.actor.wire import Frames
from psrl.errors import WireError

_log = logging.getLogger("psrl.actor")

WRITE_BUFFER_BYTES = 1024 * 1024
FLUSH_TIMEOUT_S = 5.0
BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1


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
        self._takes_nothing = False  # reading is paused, also in the middle of what has come
        self._resumed: list[asyncio.Future[None]] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self.peer = peer
        self.write: Callable[[bytes], None] = _discard

    # What the socket says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.write = self._transport.write
        try:
            self._receiver = self._accept(self, self._transport)
        except PermissionError as error:
            self.abort(str(error))

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self._early(data)
            return
        try:
            frames = iter(self._frames.feed(data))
            for frame in frames:
                receiver.on_frame(frame)
                if self._receiver is None:
                    return
                if self._takes_nothing:
                    self._frames.put_back(frames)
        except WireError as error:
            receiver.on_malformed(error)
            self.close(str(error))

    def _early(self, data: bytes) -> None:
        """Data while there is no receiver: before there is one, or after all was lost."""

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

    async def writable(self) -> None:
        if self._paused and self._lost is None:
            waiter = self._loop.create_future()
            self._resumed.append(waiter)
            await waiter

    def pause_reading(self, paused: bool) -> None:
        if self._transport is None or self._lost is not None or paused == self._takes_nothing:
            return
        self._takes_nothing = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
            self._loop.call_soon(self.data_received, b"")  # what had come already

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
        self.write = _discard
        self._wake()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_lost(reason)

    def _wake(self) -> None:
        waiters, self._resumed = self._resumed, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _discard(frame: bytes) -> None:
    """Writes to a connection that is gone."""


class SocketListener:
    """Owns a bound socket. Accepts by itself: asyncio's server drops what arrives while it closes."""

    def __init__(self, bound: socket.socket, address: Address) -> None:
        self.address = address
        self._bound = bound
        self._opening: set[asyncio.Task[None]] = set()
        self._streams: weakref.WeakSet[FrameStream] = weakref.WeakSet()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound, self._on_readable)

    @abstractmethod
    def _stream(self, accepted: socket.socket) -> FrameStream:
        """The stream of a new connection."""

    def _has_room(self) -> bool:
        """Whether to accept now. If not, `_pause` was called."""
        return True

    def stop_accepting(self) -> None:
        if self._bound.fileno() >= 0:
            self._loop.remove_reader(self._bound)
            self._bound.close()

    async def close(self) -> None:
        self.stop_accepting()
        if self._opening:
            await asyncio.wait(self._opening)
        await asyncio.gather(*(stream.closed() for stream in self._streams))

    def _on_readable(self) -> None:
        if not self._has_room():
            return
        try:
            accepted, _ = self._bound.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, most likely: let some go, then look again
            _log.error("cannot accept on %s: %s", self.address, error)
            self._pause(ACCEPT_PAUSE_S)
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._open(accepted), name=f"accept {self.address}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._bound)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._bound.fileno() >= 0:
            self._loop.add_reader(self._bound, self._on_readable)

    async def _open(self, accepted: socket.socket) -> None:
        stream = self._stream(accepted)
        await self._loop.connect_accepted_socket(lambda: stream, accepted)
        self._streams.add(stream)
