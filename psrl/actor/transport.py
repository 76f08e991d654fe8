"""The seam between actors and sockets.

An Address knows how to listen and to dial; what it yields is a Connection that carries whole frames, in order, both
ways. The side above is a Receiver: `on_frame` for each frame, then `on_lost` exactly once. All of it happens on the
loop's thread. A new transport is a new Address; nothing above learns its name.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from psrl.actor.token import Token
from psrl.errors import WireError

DEFAULT_HOST_TIMEOUT_S = 10.0


class Terms(NamedTuple):
    """What a runtime asks of its connections. Addresses travel; this stays in the process."""

    max_frame_bytes: int
    token: Token | None = None  # a transport that leaves the machine needs one
    host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S  # a host that answers nothing for so long is gone


class Receiver(Protocol):
    """Who gets what arrives on one connection."""

    def on_frame(self, frame: bytes) -> None:
        """One whole frame. Raises WireError when it makes no sense; `on_malformed` follows."""

    def on_malformed(self, error: WireError) -> None:
        """What arrived makes no sense, or is over the limit. Last chance to write; the connection closes after it."""

    def on_lost(self, reason: str) -> None:
        """The connection is gone; nothing comes after this."""

    def on_pressure(self, paused: bool) -> None:
        """The peer reads slower than we write (True), or caught up (False)."""


class Connection(Protocol):
    """One open connection. Writing never blocks; `writable` is where a writer waits for a slow peer.

    `write` queues one frame, length included. It does nothing when the connection is gone.
    """

    peer: str
    write: Callable[[bytes], None]

    @property
    def lost(self) -> str | None:
        """Why the connection is gone, or None while it is open."""

    async def writable(self) -> None:
        """Returns when the write buffer is below its mark, or all is lost. The caller brings the deadline."""

    def pause_reading(self, paused: bool) -> None:
        """Stop (or go on) taking bytes from the peer."""

    def close(self, reason: str) -> None:
        """Flush what is queued, then close. `on_lost(reason)` follows."""

    def abort(self, reason: str) -> None:
        """Close at once. `on_lost(reason)` follows."""

    async def closed(self) -> None:
        """Returns when the socket is gone. The caller brings the deadline."""


class Listener(Protocol):
    """An address that is being listened on. `address` is where peers reach it, with the real port."""

    @property
    def address(self) -> "Address": ...

    def stop_accepting(self) -> None: ...

    async def close(self) -> None:
        """Give the address back and wait until every accepted connection is gone. The caller brings the deadline."""


Accept = Callable[[Connection], Receiver]


class Address(msgspec.Struct, frozen=True, tag=True):
    """Where a runtime can be reached. A plain value: it may travel in messages and specs."""

    @abstractmethod
    async def listen(self, accept: Accept, terms: Terms) -> Listener:
        """Serve this address; `accept` makes the receiver of each new connection, or raises PermissionError.

        Raises ConfigError when the address cannot be had, saying why.
        """

    @abstractmethod
    async def dial(self, receiver: Receiver, terms: Terms) -> Connection:
        """Open a connection. Raises NobodyListens when the peer is certainly not there, Unreachable when its host
        does not answer, PermissionError when it is not to be trusted, another OSError when it may work later."""


class NobodyListens(OSError):
    """There is no process behind the address now."""


class Unreachable(OSError):
    """The host behind the address does not answer, after some patience."""
