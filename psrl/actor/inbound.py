"""One accepted connection: calls come in, answers go out.

Anything that makes no sense closes this connection, by name, and touches no other. When the caller's connection is
lost, its calls are cancelled, except those of idempotent handlers: their caller may come back with the same request
id. While the caller reads slower than we answer, we read nothing from it.
"""

import asyncio
import logging
from functools import partial
from typing import Protocol

from psrl.actor.mailbox import Job
from psrl.actor.supervisor import Supervisor
from psrl.actor.transport import Connection
from psrl.actor.wire import (
    MAX_REMAINING_S,
    NIL,
    PROTOCOL,
    Bye,
    Call,
    Cancel,
    Codec,
    Envelope,
    Find,
    Gone,
    Hello,
    Outcome,
    Reply,
    bounded,
    failure,
)
from psrl.errors import ActorDied, ActorError, WireError

_log = logging.getLogger("psrl.actor")

HELLO_TIMEOUT_S = 5.0


class Host(Protocol):
    """What an inbound connection needs of its runtime."""

    codec: Codec
    hello: Hello
    supervisors: dict[str, Supervisor]

    def supervisor(self, actor: str) -> Supervisor:
        """Raises ActorDied when there is no such actor."""

    def forget(self, inbound: "Inbound") -> None:
        """The connection is gone."""


class Inbound:
    """Receiver of one connection on the listening side."""

    def __init__(self, host: Host, connection: Connection) -> None:
        self._host, self.connection = host, connection
        self._limit = host.hello.max_frame_bytes
        self._caller: Hello | None = None
        self._jobs: dict[int, Job] = {}
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HELLO_TIMEOUT_S, self.close, "no greeting came")

    def on_frame(self, frame: bytes) -> None:
        try:
            envelope = self._host.codec.requests.decode(frame)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a malformed frame: {error}") from error
        if self._caller is None:
            self._greet(envelope)
        elif isinstance(envelope, Call):
            self._call(envelope, self._caller.session)
        elif isinstance(envelope, Cancel):
            job = self._jobs.pop(envelope.id, None)
            if job is not None:
                job.stop(ActorDied("the caller gave up"))
        elif isinstance(envelope, Find):
            self._find(envelope)
        else:
            raise WireError("a second greeting")

    def on_malformed(self, error: WireError) -> None:
        caller = self._caller.runtime if self._caller is not None else "a stranger"
        _log.error("closing the connection of %s to %s: %s", caller, self._host.hello.runtime, error)
        self._write(Bye(f"WireError: {error}"))

    def on_lost(self, reason: str) -> None:
        self._timer.cancel()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            if not job.handler.idempotent:
                job.stop(ActorDied(f"the caller is gone: {reason}"))
        self._host.forget(self)

    def on_pressure(self, paused: bool) -> None:
        self.connection.pause_reading(paused)

    def gone(self, actor: str, reason: str) -> None:
        """Tell the caller that an actor here has ended."""
        if self._caller is not None:
            self._write(Gone(actor, reason))

    def close(self, reason: str) -> None:
        """Say why, then close."""
        self._write(Bye(reason))
        self.connection.close(reason)

    def _greet(self, envelope: Envelope) -> None:
        if not isinstance(envelope, Hello):
            raise WireError("a frame before the greeting")
        self._write(self._host.hello)  # also to a wrong protocol: it can then say what is wrong
        if envelope.protocol != PROTOCOL:
            raise WireError(f"{envelope.runtime} speaks protocol {envelope.protocol}, this runtime {PROTOCOL}")
        self._timer.cancel()
        self._caller = envelope
        self._limit = min(self._limit, envelope.max_frame_bytes)

    def _find(self, find: Find) -> None:
        try:
            supervisor = self._host.supervisor(find.actor)
            if supervisor.ended is not None:
                raise ActorDied(supervisor.ended)
            unknown = [tag for tag in find.tags if tag not in supervisor.handlers.by_tag]
            if unknown:
                kind = type(supervisor.actor).__qualname__
                raise WireError(f"{find.actor} is a {kind} here and has no handler for {', '.join(unknown)}")
        except ActorError as error:
            self._write(failure(find.id, error))
        else:
            self._write(Reply(find.id, NIL))

    def _call(self, call: Call, session: bytes) -> None:
        id = call.id
        if id in self._jobs:
            raise WireError(f"request id {id} is in use")
        try:
            supervisor = self._host.supervisors.get(call.actor) or self._host.supervisor(call.actor)
            handler = supervisor.handlers.by_tag.get(call.message)
            if handler is None:
                has = supervisor.handlers.describe()
                raise WireError(f"{call.actor} has no handler for {call.message}; it has {has}")
            try:
                message = handler.message_decoder.decode(call.body)
            except (ValueError, RecursionError) as error:
                raise WireError(f"{call.actor}.{handler.name} got a malformed {call.message}: {error}") from error
            remaining_s = call.remaining_s
            if not 0 < remaining_s < MAX_REMAINING_S:
                remaining_s = bounded(remaining_s)
            mailbox, request = supervisor.mailbox, (session, id)
            if mailbox.is_open and not handler.awaits:
                self._reply(id, mailbox.answer(handler, message, remaining_s, request))
                return
            job = mailbox.take(handler, message, remaining_s, request)
        except ActorError as error:
            self._write(failure(id, error))
            return
        if job.is_answered:
            self._reply(id, job.outcome)
        else:
            self._jobs[id] = job
            job.listen(partial(self._answer, id))

    def _answer(self, id: int, outcome: Outcome) -> None:
        if self._jobs.pop(id, None) is not None:  # else the caller gave up, or is gone
            self._reply(id, outcome)

    def _reply(self, id: int, outcome: Outcome) -> None:
        if isinstance(outcome, ActorError):
            self._write(failure(id, outcome))
            return
        try:
            frame = self._host.codec.frame(Reply(id, outcome), self._limit)  # type: ignore[arg-type]
        except WireError as error:
            self._write(failure(id, WireError(f"the reply did not go out: {error}")))
        else:
            self.connection.write(frame)

    def _write(self, envelope: Envelope) -> None:
        """For the small envelopes: they fit any limit that is allowed."""
        self.connection.write(self._host.codec.frame(envelope, self._host.hello.max_frame_bytes))
