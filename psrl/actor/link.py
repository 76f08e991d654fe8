"""A link: this process's connection to one other runtime, and the calls that wait on it.

One connection carries all calls to that runtime. It is opened by the first call and opened again by the next call
after it broke. When it breaks, waiting calls fail at once with ActorDied; those of idempotent handlers are sent again
with the same request id as long as somebody listens there and their deadline has not passed. Nobody listening, or a
host that cannot be reached, is death, at once.
"""

import asyncio
import enum
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from psrl.actor.alarm import Alarm
from psrl.actor.handler import Handler, Handlers
from psrl.actor.ref import Send
from psrl.actor.transport import Address, Connection, NobodyListens, Terms, Unreachable
from psrl.actor.wire import (
    PROTOCOL,
    Call,
    Cancel,
    Codec,
    Failure,
    Find,
    Gone,
    Hello,
    Reply,
    error_of,
    tag_of,
)
from psrl.clock import now
from psrl.errors import ActorDied, CallTimeout, WireError

_log = logging.getLogger("psrl.actor")

HANDSHAKE_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.005, 0.2


class Late(enum.Enum):
    """What a waiting call gets when its deadline is over."""

    LATE = enum.auto()


Answer = Reply | Failure | Late | None
"""What a waiting call gets; None when the connection was lost first."""


class _Line:
    """One connection of a link: receives what the peer sends and hands it to whoever waits."""

    def __init__(self, link: "Link") -> None:
        self._link = link
        self.connection: Connection | None = None
        self.greeted: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self.limit = 0  # bytes a frame, known when the peer has greeted
        self.is_paused = False  # the peer reads slower than we write
        self.lost: str | None = None
        self._waiting: dict[int, tuple[asyncio.Future[Answer], float]] = {}  # by request id, with the deadline
        self._alarm = Alarm(self._sweep)
        self._bye: str | None = None

    def ask(self, id: int, frame: bytes, deadline: float) -> "asyncio.Future[Answer]":
        """Send one request. The result is there by `deadline`."""
        assert self.connection is not None
        waiter: asyncio.Future[Answer] = self._link.loop.create_future()
        self._waiting[id] = waiter, deadline
        if deadline < self._alarm.when:
            self._alarm.set(deadline)
        self.connection.write(frame)
        return waiter

    def give_up(self, id: int) -> None:
        """Nobody waits for this answer any more."""
        if self._waiting.pop(id, None) is not None and self.connection is not None:
            self.connection.write(self._link.codec.frame(Cancel(id), self.limit))

    def on_frame(self, frame: bytes) -> None:
        try:
            envelope = self._link.codec.responses.decode(frame)
        except (ValueError, RecursionError) as error:
            raise WireError(f"{self._link.address} sent a malformed frame: {error}") from error
        if isinstance(envelope, _ANSWERS):
            waiter, _ = self._waiting.pop(envelope.id, _NOBODY)
            if waiter is not None and not waiter.done():  # else its caller has given up
                waiter.set_result(envelope)
        elif isinstance(envelope, Hello):
            if not self.greeted.done():
                self.greeted.set_result(envelope)
        elif isinstance(envelope, Gone):
            self._link.actor_gone(envelope.actor, envelope.reason)
        else:
            self._bye = envelope.reason

    def on_malformed(self, error: WireError) -> None:
        _log.error("closing the connection to %s: %s", self._link.address, error)

    def on_lost(self, reason: str) -> None:
        self.lost = self._bye or reason
        self._alarm.cancel()
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError(self.lost))
        waiting, self._waiting = self._waiting, {}
        for waiter, _ in waiting.values():
            if not waiter.done():
                waiter.set_result(None)
        self._link.line_lost(self)

    def on_pressure(self, paused: bool) -> None:
        self.is_paused = paused

    def _sweep(self, time: float) -> float:
        for id in [id for id, (_, deadline) in self._waiting.items() if deadline <= time]:
            waiter, _ = self._waiting[id]
            self.give_up(id)
            if not waiter.done():
                waiter.set_result(Late.LATE)
        return min((deadline for _, deadline in self._waiting.values()), default=math.inf)


_ANSWERS = (Reply, Failure)
_NOBODY = (None, 0.0)


class Link:
    """Calls to the runtime at `address`. Lives as long as the runtime that made it."""

    def __init__(self, runtime: str, address: Address, codec: Codec, terms: Terms) -> None:
        self.address, self.codec = address, codec
        self.loop = asyncio.get_running_loop()
        self._terms = terms
        self._hello = Hello(PROTOCOL, runtime, os.urandom(12), terms.max_frame_bytes)
        self._ids = itertools.count(1)
        self._process = os.getpid()
        self._line: _Line | None = None
        self._peer_session: bytes | None = None
        self._dialling: asyncio.Task[_Line] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._watchers: list[tuple[str, Callable[[str], None]]] = []
        self._closed: str | None = None

    def sender(self, actor: str, handler: Handler, timeout_s: float) -> Send:
        """The function that sends `actor` a message of this handler, see Channel.sender."""
        tags = {message: tag_of(message) for message in handler.messages}
        where, decode, encode = (
            f"{actor}.{handler.name} at {self.address}",
            handler.reply_decoder.decode,
            self.codec.frame,
        )

        async def send(message: msgspec.Struct) -> msgspec.Struct | None:
            tag = tags.get(type(message))
            if tag is None:
                raise handler.wrong_message(message)
            if os.getpid() != self._process:
                raise RuntimeError(
                    f"{where}: this connection belongs to process {self._process}; connect after the fork"
                )
            id, deadline, line = next(self._ids), self.loop.time() + timeout_s, self._line
            answer: Answer = None
            if line is not None and not line.is_paused and timeout_s > 0:  # as mostly
                frame = encode(Call(id, actor, tag, timeout_s, message), line.limit)  # type: ignore[arg-type]
                waiter = line.ask(id, frame, deadline)
                try:
                    answer = await waiter
                except asyncio.CancelledError:
                    line.give_up(id)
                    raise
                if answer is None and not handler.idempotent:
                    raise ActorDied(f"{where} is gone: {line.lost}")
            if answer is None:
                answer = await insist(message, tag, id, deadline)
            if isinstance(answer, Late):
                raise CallTimeout(f"{where} did not answer within {timeout_s:g} s")
            if isinstance(answer, Failure):
                raise error_of(answer)
            try:
                reply: msgspec.Struct | None = decode(answer.body)
            except (ValueError, RecursionError) as error:
                raise WireError(f"{where} sent a malformed reply: {error}") from error
            return reply

        async def insist(message: msgspec.Struct, tag: str, id: int, deadline: float) -> Reply | Failure | Late:
            def frame(limit: int) -> bytes:
                return encode(Call(id, actor, tag, deadline - self.loop.time(), message), limit)  # type: ignore[arg-type]

            try:
                return await self._ask(id, frame, deadline, handler.idempotent, where)
            except PermissionError as error:
                raise ActorDied(f"{where} cannot be called: {error}") from None

        return send

    async def find(self, actor: str, handlers: Handlers, timeout_s: float) -> None:
        """Wait until the runtime listens and has the actor. Raises CallTimeout with the last reason, or
        PermissionError."""
        reason = "nobody listens there"
        tags, deadline = tuple(handlers.by_tag), now() + timeout_s
        try:
            for pause in _backoff():
                try:
                    answer = await self._ask_find(Find(next(self._ids), actor, tags), deadline)
                    if isinstance(answer, Reply):
                        return
                    if answer.kind != ActorDied.__name__:
                        raise error_of(answer)
                    reason = answer.text
                except ActorDied as error:
                    if self._closed is not None:
                        raise
                    reason = str(error)
                await asyncio.sleep(min(pause, deadline - now()))
        except TimeoutError:
            raise CallTimeout(f"{actor} at {self.address} was not there within {timeout_s:g} s: {reason}") from None

    def watch(self, actor: str, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once when the actor, or its whole process, is gone."""
        self._watchers.append((actor, callback))
        self._probe({actor}, "")  # it may have ended before

    async def close(self, reason: str) -> None:
        """Fail what waits, close the connection, end the link's own tasks."""
        self._closed = reason
        self._watchers.clear()
        tasks: set[asyncio.Task[Any]] = {*self._probes, *([self._dialling] if self._dialling is not None else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=HANDSHAKE_TIMEOUT_S)
        line, self._line = self._line, None
        if line is not None and line.connection is not None:
            line.connection.close(reason)
            await line.connection.closed()

    # What lines report.

    def actor_gone(self, actor: str, reason: str) -> None:
        gone = [callback for name, callback in self._watchers if name == actor]
        self._watchers = [(name, callback) for name, callback in self._watchers if name != actor]
        for callback in gone:
            asyncio.get_running_loop().call_soon(callback, reason)

    def line_lost(self, line: _Line) -> None:
        if line is self._line:
            self._line = None
            if self._watchers and self._closed is None:
                self._probe({actor for actor, _ in self._watchers}, line.lost or "the connection was lost")

    # Sending.

    async def _ask_find(self, find: Find, deadline: float) -> Reply | Failure:
        where = f"{find.actor} at {self.address}"
        answer = await self._ask(find.id, lambda limit: self.codec.frame(find, limit), deadline, True, where)
        if isinstance(answer, Late):
            raise TimeoutError
        return answer

    async def _ask(
        self, id: int, frame: Callable[[int], bytes], deadline: float, again: bool, where: str
    ) -> Reply | Failure | Late:
        """Dial if need be, send, and wait; more than once only if `again`. Raises ActorDied, WireError or
        PermissionError."""
        for pause in _backoff():
            try:
                line = await self._ready(deadline, where)
            except TimeoutError:
                return Late.LATE
            if line is not None:
                waiter = line.ask(id, frame(line.limit), deadline)
                try:
                    answer = await waiter
                except asyncio.CancelledError:
                    line.give_up(id)
                    raise
                if answer is not None:
                    return answer
                if not again:
                    raise ActorDied(f"{where} is gone: {line.lost}")
            await asyncio.sleep(min(pause, deadline - now()))
        raise AssertionError("backoff never ends")

    async def _ready(self, deadline: float, where: str) -> _Line | None:
        """The open line, once the peer takes more. None: try again. Raises what `_open` raises, or TimeoutError."""
        async with asyncio.timeout_at(deadline):
            while True:
                line = await self._open(where)
                if line is None or line.lost is not None:
                    return None
                if not line.is_paused:
                    return line
                assert line.connection is not None
                await line.connection.writable()

    async def _open(self, where: str) -> _Line | None:
        """The open line, dialled if need be. None: try again. Raises ActorDied when nobody is there, or
        PermissionError."""
        if self._line is not None:
            return self._line
        if self._closed is not None:
            raise ActorDied(f"{where} cannot be called: {self._closed}")
        if self._dialling is None:
            self._dialling = asyncio.get_running_loop().create_task(self._dial(), name=f"dial {self.address}")
            self._dialling.add_done_callback(self._dialled)
        dialling = self._dialling
        try:
            return await asyncio.shield(dialling)
        except (NobodyListens, Unreachable) as error:
            raise ActorDied(f"{where} is gone: {error.strerror or error}") from None
        except PermissionError:
            raise
        except asyncio.CancelledError:
            if dialling.cancelled() and self._closed is not None:
                raise ActorDied(f"{where} cannot be called: {self._closed}") from None
            raise
        except OSError:
            return None

    async def _dial(self) -> _Line:
        line = _Line(self)
        line.connection = await self.address.dial(line, self._terms)
        try:
            line.connection.write(self.codec.frame(self._hello, self._terms.max_frame_bytes))
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await line.greeted
            if line.lost is not None:  # greeted, and gone
                raise ConnectionError(line.lost)
            if hello.protocol != PROTOCOL:
                raise WireError(f"{self.address} speaks protocol {hello.protocol}, this runtime {PROTOCOL}")
        except BaseException:  # also when cancelled: nobody else has this connection yet
            line.connection.abort("the handshake failed")
            raise
        line.limit = min(self._terms.max_frame_bytes, hello.max_frame_bytes)
        restarted = self._peer_session not in (None, hello.session)
        self._line, self._peer_session = line, hello.session
        if restarted:
            for actor in {name for name, _ in self._watchers}:
                self.actor_gone(actor, f"the runtime at {self.address} was restarted")
        return line

    def _dialled(self, task: asyncio.Task[_Line]) -> None:
        self._dialling = None
        if not task.cancelled():
            task.exception()  # whoever waits sees it; nobody may wait any more

    # Watching.

    def _probe(self, actors: set[str], reason: str) -> None:
        for actor in actors:
            task = asyncio.get_running_loop().create_task(self._look(actor, reason), name=f"probe {actor}")
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _look(self, actor: str, reason: str) -> None:
        """A broken connection is no death yet: dial again, and see whether the same life answers."""
        try:
            answer = await self._ask_find(Find(next(self._ids), actor, ()), now() + PROBE_TIMEOUT_S)
            if isinstance(answer, Failure):
                self.actor_gone(actor, answer.text)
        except (ActorDied, WireError, TimeoutError, PermissionError) as error:
            self.actor_gone(actor, f"{actor} at {self.address} is gone: {reason or error}")


def _backoff() -> Iterator[float]:
    """Pauses between attempts: doubling, then steady, for ever."""
    growing = itertools.takewhile(
        lambda pause: pause < LAST_BACKOFF_S, (FIRST_BACKOFF_S * 2**n for n in itertools.count())
    )
    return itertools.chain(growing, itertools.repeat(LAST_BACKOFF_S))
