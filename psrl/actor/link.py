"""A link: this process's connection to one other runtime, and the calls that wait on it.

One connection carries all calls to that runtime. It is opened by the first call and opened again by the next call
after it broke. When it breaks, waiting calls fail at once with ActorDied; those of idempotent handlers are sent again
with the same request id as long as somebody listens there and their deadline has not passed. Nobody listening is
death, at once.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from psrl.actor.handler import Handler, Handlers, tag_of
from psrl.actor.transport import Address, Connection, NobodyListens
from psrl.actor.wire import (
    PROTOCOL,
    Bye,
    Call,
    Cancel,
    Codec,
    Failure,
    Find,
    Gone,
    Hello,
    Reply,
    error_of,
)
from psrl.clock import now
from psrl.errors import ActorDied, CallTimeout, WireError

_log = logging.getLogger("psrl.actor")

HANDSHAKE_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.005, 0.2

Answer = Reply | Failure | None
"""What a waiting call gets; None when the connection was lost first."""


class _Line:
    """One connection of a link: receives what the peer sends and hands it to whoever waits."""

    def __init__(self, link: "Link") -> None:
        self._link = link
        self.connection: Connection | None = None
        self.greeted: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self.waiting: dict[int, asyncio.Future[Answer]] = {}
        self.lost: str | None = None
        self._bye: str | None = None

    def on_frame(self, frame: bytes) -> None:
        try:
            envelope = self._link.codec.responses.decode(frame)
        except (ValueError, RecursionError) as error:
            raise WireError(f"{self._link.address} sent a malformed frame: {error}") from error
        match envelope:
            case Reply(id=id) | Failure(id=id):
                waiter = self.waiting.pop(id, None)
                if waiter is not None and not waiter.done():  # else its caller has given up
                    waiter.set_result(envelope)
            case Hello():
                if not self.greeted.done():
                    self.greeted.set_result(envelope)
            case Gone(actor=actor, reason=reason):
                self._link.actor_gone(actor, reason)
            case Bye(reason=reason):
                self._bye = reason

    def on_malformed(self, error: WireError) -> None:
        _log.error("closing the connection to %s: %s", self._link.address, error)

    def on_lost(self, reason: str) -> None:
        self.lost = self._bye or reason
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError(self.lost))
        waiting, self.waiting = self.waiting, {}
        for waiter in waiting.values():
            if not waiter.done():
                waiter.set_result(None)
        self._link.line_lost(self)

    def on_pressure(self, paused: bool) -> None:
        """Writers wait in `Connection.writable`."""


class Link:
    """Calls to the runtime at `address`. Lives as long as the runtime that made it."""

    def __init__(self, runtime: str, address: Address, codec: Codec, max_frame_bytes: int) -> None:
        self.address, self.codec = address, codec
        self._limit = max_frame_bytes
        self._hello = Hello(PROTOCOL, runtime, os.urandom(12), max_frame_bytes)
        self._ids = itertools.count(1)
        self._line: _Line | None = None
        self._peer_session: bytes | None = None
        self._dialling: asyncio.Task[_Line] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._watchers: list[tuple[str, Callable[[str], None]]] = []
        self._closed: str | None = None

    async def call(
        self, actor: str, handler: Handler, message: msgspec.Struct, timeout_s: float
    ) -> msgspec.Struct | None:
        """The reply of `actor`. Raises an ActorError, at the latest `timeout_s` from now."""
        deadline = now() + timeout_s
        where = f"{actor}.{handler.name} at {self.address}"
        body, tag, id = self.codec.body(message), tag_of(type(message)), next(self._ids)

        def frame(limit: int) -> bytearray:
            return self.codec.frame(Call(id, actor, tag, deadline - now(), body), limit)

        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._ask(id, frame, handler.idempotent, where)
        except TimeoutError:
            raise CallTimeout(f"{where} did not answer within {timeout_s:g} s") from None
        if isinstance(answer, Failure):
            raise error_of(answer)
        try:
            reply: msgspec.Struct | None = handler.reply_decoder.decode(answer.body)
        except (ValueError, RecursionError) as error:
            raise WireError(f"{where} sent a malformed reply: {error}") from error
        return reply

    async def find(self, actor: str, handlers: Handlers, timeout_s: float) -> None:
        """Wait until the runtime listens and has the actor. Raises CallTimeout with the last reason."""
        reason = "nobody listens there"
        tags = tuple(handlers.by_tag)
        try:
            async with asyncio.timeout(timeout_s):
                for pause in _backoff():
                    try:
                        answer = await self._ask_find(Find(next(self._ids), actor, tags))
                        if isinstance(answer, Reply):
                            return
                        if answer.kind != ActorDied.__name__:
                            raise error_of(answer)
                        reason = answer.text
                    except ActorDied as error:
                        if self._closed is not None:
                            raise
                        reason = str(error)
                    await asyncio.sleep(pause)
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

    async def _ask_find(self, find: Find) -> Reply | Failure:
        return await self._ask(find.id, lambda limit: self.codec.frame(find, limit), True, find.actor)

    async def _ask(self, id: int, frame: Callable[[int], bytearray], again: bool, where: str) -> Reply | Failure:
        """Send until there is an answer; more than once only if `again`. The caller brings the deadline."""
        for pause in _backoff():
            line = await self._open(where)
            if line is not None:
                answer, reason = await self._ask_once(line, id, frame)
                if answer is not None:
                    return answer
                if not again:
                    raise ActorDied(f"{where} is gone: {reason}")
            await asyncio.sleep(pause)
        raise AssertionError("backoff never ends")

    async def _ask_once(self, line: _Line, id: int, frame: Callable[[int], bytearray]) -> tuple[Answer, str]:
        connection, hello = line.connection, line.greeted.result()
        assert connection is not None
        await connection.writable()
        if line.lost is not None:
            return None, line.lost
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        line.waiting[id] = waiter
        try:
            connection.write(frame(min(self._limit, hello.max_frame_bytes)))
            answer = await waiter
        except asyncio.CancelledError:
            connection.write(self.codec.frame(Cancel(id), self._limit))
            raise
        finally:
            line.waiting.pop(id, None)
        return answer, line.lost or ""

    async def _open(self, where: str) -> _Line | None:
        """The open line, dialled if need be. None: try again. Raises ActorDied when nobody listens."""
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
        except (NobodyListens, PermissionError) as error:
            raise ActorDied(f"{where} is gone: {error.strerror or error}") from None
        except asyncio.CancelledError:
            if dialling.cancelled() and self._closed is not None:
                raise ActorDied(f"{where} cannot be called: {self._closed}") from None
            raise
        except OSError:
            return None

    async def _dial(self) -> _Line:
        line = _Line(self)
        line.connection = await self.address.dial(line, self._limit)
        try:
            line.connection.write(self.codec.frame(self._hello, self._limit))
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await line.greeted
            if hello.protocol != PROTOCOL:
                raise WireError(f"{self.address} speaks protocol {hello.protocol}, this runtime {PROTOCOL}")
        except BaseException:  # also when cancelled: nobody else has this connection yet
            line.connection.abort("the handshake failed")
            raise
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
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answer = await self._ask_find(Find(next(self._ids), actor, ()))
            if isinstance(answer, Failure):
                self.actor_gone(actor, answer.text)
        except (ActorDied, WireError, TimeoutError) as error:
            self.actor_gone(actor, f"{actor} at {self.address} is gone: {reason or error}")


def _backoff() -> Iterator[float]:
    """Pauses between attempts: doubling, then steady, for ever."""
    growing = itertools.takewhile(
        lambda pause: pause < LAST_BACKOFF_S, (FIRST_BACKOFF_S * 2**n for n in itertools.count())
    )
    return itertools.chain(growing, itertools.repeat(LAST_BACKOFF_S))
