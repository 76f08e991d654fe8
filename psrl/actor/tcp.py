"""Actors across nodes: TCP, between processes that prove to each other that they know the cluster token.

Nothing that a stranger sends is decoded: until the proof (psrl.actor.token) a connection may say a few dozen bytes of
fixed length within a deadline, and only so many such connections are held. The token authenticates both ends when the
connection opens; it neither hides nor seals what is said on it afterwards, so the network between the nodes is trusted.

A host that goes away without a word (power, cable, kernel) is noticed after `host_timeout_s`: by unanswered data
(TCP_USER_TIMEOUT), or by probes on an idle connection.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from psrl.actor.stream import BACKLOG, FrameStream, SocketListener
from psrl.actor.token import REFUSED, Half, Token, dialling, listening
from psrl.actor.transport import Accept, Address, Connection, Listener, NobodyListens, Receiver, Terms, Unreachable
from psrl.clock import now
from psrl.errors import ConfigError

_log = logging.getLogger("psrl.actor")

CONNECT_TIMEOUT_S = 3.0
HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 128
PATIENCE_S = 0.5  # how long a stranger may stay while others wait for its place
COMPLAINT_PERIOD_S = 10.0
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT)

_Info = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


class TcpAddress(Address, frozen=True, tag="tcp"):
    """A host name or an IPv4 or IPv6 address, and a port. Port 0 listens on any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"

    async def listen(self, accept: Accept, terms: Terms) -> Listener:
        token = terms.token
        if token is None:
            raise ConfigError(f"cannot listen on {self}: {_NO_TOKEN}")
        bound = await self._bind()
        return _TcpListener(bound, msgspec.structs.replace(self, port=bound.getsockname()[1]), accept, terms, token)

    async def dial(self, receiver: Receiver, terms: Terms) -> Connection:
        if terms.token is None:
            raise PermissionError(f"cannot dial {self}: {_NO_TOKEN}")
        async with asyncio.timeout(CONNECT_TIMEOUT_S + HANDSHAKE_TIMEOUT_S):
            dialled = await self._connect(terms)
            stream = _ProvenStream(
                lambda stream, transport: receiver, terms.max_frame_bytes, str(self), dialling(terms.token)
            )
            try:
                await asyncio.get_running_loop().create_connection(lambda: stream, sock=dialled)
                await stream.proven
            except BaseException:
                stream.abort("the handshake failed")
                dialled.close()
                raise
        return stream

    async def _bind(self) -> socket.socket:
        problem: OSError = OSError("the host has no address")
        try:
            places = await self._resolve()
        except socket.gaierror as error:
            raise ConfigError(f"cannot listen on {self}: its host is not known here: {error.strerror}") from None
        for family, place in places:
            bound = socket.socket(family, socket.SOCK_STREAM)
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                bound.bind(place)
                bound.listen(BACKLOG)
                bound.setblocking(False)
                return bound
            except OSError as error:
                bound.close()
                problem = error
        raise ConfigError(f"cannot listen on {self}: {_advice(problem)}") from problem

    async def _connect(self, terms: Terms) -> socket.socket:
        """Connected to the first of the host's addresses that takes it."""
        loop = asyncio.get_running_loop()
        problem: OSError = OSError("the host has no address")
        try:
            places = await self._resolve()
        except socket.gaierror as error:
            raise Unreachable(error.errno, f"the host {self.host} is not known here: {error.strerror}") from None
        for family, place in places:
            dialled = socket.socket(family, socket.SOCK_STREAM)
            dialled.setblocking(False)
            try:
                _tune(dialled, terms.host_timeout_s)
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.sock_connect(dialled, place)
                return dialled
            except OSError as error:  # TimeoutError too
                dialled.close()
                problem = error
            except BaseException:
                dialled.close()
                raise
        if isinstance(problem, ConnectionRefusedError):
            raise NobodyListens(problem.errno, f"nobody listens on {self}") from None
        if isinstance(problem, TimeoutError) or problem.errno in _UNREACHABLE:
            text = problem.strerror or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            raise Unreachable(problem.errno or errno.ETIMEDOUT, f"{self} cannot be reached: {text}") from None
        raise problem

    async def _resolve(self) -> list[_Info]:
        """Where the host is. Raises socket.gaierror when nobody knows it."""
        if not self.host:
            raise ConfigError("a TCP address needs a host; 0.0.0.0 or :: means every interface of this machine")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"{self}: a port is a number from 0 to {2**16 - 1}")
        stream = socket.SOCK_STREAM
        try:
            found = socket.getaddrinfo(self.host, self.port, type=stream, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:  # a name: asking for its addresses may take a while
            found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=stream)
        return [(family, cast("tuple[str, int]", place)) for family, _, _, _, place in found]


class _ProvenStream(FrameStream):
    """A FrameStream that begins when both sides have proved the token; `proven` then holds its result."""

    def __init__(
        self,
        accept: Callable[[Connection, asyncio.Transport], Receiver],
        limit: int,
        peer: str,
        half: Half,
        *,
        refusal: bytes = b"",
        on_settled: Callable[["_ProvenStream", str | None], None] | None = None,
    ) -> None:
        super().__init__(accept, limit, peer)
        self.proven: asyncio.Future[None] = self._loop.create_future()
        self._half, self._refusal, self._on_settled = half, refusal, on_settled
        self._said = bytearray()  # of the message that is being received
        self._expected = 0
        self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._late)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(*next(self._half))

    def _early(self, data: bytes) -> None:
        if self.proven.done():
            return
        if len(self._said) + len(data) > self._expected:
            self._refuse("it said more than a handshake has")
            return
        self._said += data
        if len(self._said) == self._expected:
            said = bytes(self._said)
            self._said.clear()
            try:
                self._send(*self._half.send(said))
            except StopIteration as end:
                self._prove(end.value)
            except PermissionError as error:
                self._refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        # A stranger that only looked says nothing worth a complaint.
        self._settle(ConnectionError(f"{self.peer}: {self._lost}"), None)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._settle(ConnectionError(f"{self.peer}: {reason}"), None)

    def _send(self, message: bytes, expected: int) -> None:
        assert self._transport is not None
        self._expected = expected
        if message:
            self._transport.write(message)

    def _prove(self, last: bytes) -> None:
        self._send(last, 0)
        self._settle(None, None)
        super().connection_made(cast(asyncio.Transport, self._transport))

    def _refuse(self, reason: str) -> None:
        self._settle(PermissionError(f"{self.peer} is not trusted: {reason}"), reason)
        self._send(self._refusal, 0)
        self.close(reason)

    def _late(self) -> None:
        reason = f"it did not end the handshake within {HANDSHAKE_TIMEOUT_S:g} s"
        self._settle(TimeoutError(f"{self.peer}: {reason}"), reason)
        super().abort(reason)

    def _settle(self, error: OSError | None, complaint: str | None) -> None:
        """The handshake is over; the first one to say so counts."""
        if self.proven.done():
            return
        self._timer.cancel()
        if error is None:
            self.proven.set_result(None)
        else:
            self.proven.set_exception(error)
            self.proven.exception()  # nobody waits for it on the listening side
        if self._on_settled is not None:
            self._on_settled(self, complaint)


class _TcpListener(SocketListener):
    """Holds at most MAX_STRANGERS connections that have not proved the token."""

    def __init__(self, bound: socket.socket, address: TcpAddress, accept: Accept, terms: Terms, token: Token) -> None:
        super().__init__(bound, address)
        self._accept, self._terms, self._token = accept, terms, token
        self._strangers: dict[_ProvenStream, float] = {}  # since when, oldest first
        self._complaints = _Complaints(str(address))

    def stop_accepting(self) -> None:
        super().stop_accepting()
        for stranger in list(self._strangers):
            stranger.abort("the listener closes")

    def _has_room(self) -> bool:
        """With too many strangers: the next one waits, and the oldest goes when its time is over."""
        if len(self._strangers) < MAX_STRANGERS:
            return True
        oldest, since = next(iter(self._strangers.items()))
        left = since + PATIENCE_S - now()
        if left > 0:
            self._pause(left)
            return False
        oldest.abort("others wait")
        self._complaints.add(f"{oldest.peer} was slow to prove the cluster token while others waited")
        return True

    def _stream(self, accepted: socket.socket) -> FrameStream:
        _tune(accepted, self._terms.host_timeout_s)
        stream = _ProvenStream(
            lambda stream, transport: self._accept(stream),
            self._terms.max_frame_bytes,
            _name_of(accepted),
            listening(self._token),
            refusal=REFUSED,
            on_settled=self._settled,
        )
        self._strangers[stream] = now()
        return stream

    def _settled(self, stream: _ProvenStream, complaint: str | None) -> None:
        del self._strangers[stream]
        self._resume()
        if complaint is not None:
            self._complaints.add(f"{stream.peer} was turned away: {complaint}")


class _Complaints:
    """Warnings about strangers: one line now and then, whatever they do."""

    def __init__(self, where: str) -> None:
        self._where, self._next, self._num_untold = where, 0.0, 0

    def add(self, text: str) -> None:
        if now() < self._next:
            self._num_untold += 1
            return
        more = f" ({self._num_untold} more since the last such line)" if self._num_untold else ""
        _log.warning("%s: %s%s", self._where, text, more)
        self._next, self._num_untold = now() + COMPLAINT_PERIOD_S, 0


_NO_TOKEN = "TCP needs the cluster token, and this runtime was given none (Runtime(token=...))"


def _tune(sock: socket.socket, host_timeout_s: float) -> None:
    """Small frames go at once, and a host that is gone is noticed."""
    probe_s = max(1, int(host_timeout_s / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(host_timeout_s * 1000))


def _name_of(accepted: socket.socket) -> str:
    with contextlib.suppress(OSError):  # gone already
        host, port = accepted.getpeername()[:2]
        return str(TcpAddress(host, port))
    return "a stranger"


def _advice(problem: OSError) -> str:
    match problem.errno:
        case errno.EADDRINUSE:
            return "another process has this port. Choose another one, or 0 for any that is free"
        case errno.EADDRNOTAVAIL:
            return "no interface of this machine has that address. Choose one that has, or 0.0.0.0 for all"
        case errno.EACCES:
            return "this user may not have that port. Choose one from 1024 on"
        case number:
            return problem.strerror or (os.strerror(number) if number else str(problem))
