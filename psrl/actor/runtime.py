"""The runtime: the actors of one process, its listener, and its links to other processes.

    async with Runtime("head", listen=UnixAddress(path)) as runtime:
        ref = runtime.spawn("counter", Counter())
        other = await runtime.connect(Scorer, "scorer", UnixAddress(other_path), timeout_s=10)

A runtime belongs to the event loop that entered it, and is used from there alone; it makes no loop of its own and
leaves the loop as it was. Closing is orderly: stop accepting; end actors, last spawned first (handlers cancelled,
then `stopped()`); close connections and links; give the address back.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self, cast

import msgspec

from psrl.actor.actor import Actor
from psrl.actor.handler import Handler, handlers_of
from psrl.actor.inbound import Inbound
from psrl.actor.link import Link
from psrl.actor.mailbox import DEFAULT_MAILBOX, Job
from psrl.actor.ref import A, Ref, Send, unwrap
from psrl.actor.supervisor import Supervisor
from psrl.actor.token import Token
from psrl.actor.transport import DEFAULT_HOST_TIMEOUT_S, Address, Connection, Listener, Terms
from psrl.actor.wire import DEFAULT_FRAME_BYTES, PROTOCOL, Codec, Hello, Outcome
from psrl.clock import now
from psrl.errors import ActorDied, ActorError, CallTimeout, ConfigError

_log = logging.getLogger("psrl.actor")

CLOSE_TIMEOUT_S = 10.0
MIN_FRAME_BYTES = 64 * 1024  # every envelope but Call and Reply fits


class Failed(NamedTuple):
    """An actor that ended by an error."""

    actor: str
    error: BaseException


class Runtime:
    """Runs actors. `on_failure` is called with each actor that ends by an error, besides the log.

    `token` is the cluster's, for transports that leave the machine; a host that answers nothing for `host_timeout_s`
    counts as gone. `address` is where peers reach this runtime, once it is entered.
    """

    def __init__(
        self,
        name: str,
        listen: Address | None = None,
        *,
        token: Token | None = None,
        max_frame_bytes: int = DEFAULT_FRAME_BYTES,
        host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S,
        on_failure: Callable[[Failed], None] | None = None,
    ) -> None:
        if not MIN_FRAME_BYTES <= max_frame_bytes < 2**32:
            raise ConfigError(f"max_frame_bytes must be from {MIN_FRAME_BYTES} to {2**32 - 1}, not {max_frame_bytes}")
        if not 1 <= host_timeout_s < 3600:
            raise ConfigError(f"host_timeout_s must be from 1 to 3600, not {host_timeout_s:g}")
        self.name, self.address = name, listen
        self.codec = Codec()
        self.hello = Hello(PROTOCOL, name, os.urandom(12), max_frame_bytes)
        self._terms = Terms(max_frame_bytes, token, host_timeout_s)
        self._on_failure = on_failure
        self.supervisors: dict[str, Supervisor] = {}
        self._listener: Listener | None = None
        self._inbound: set[Inbound] = set()
        self._links: dict[Address, Link] = {}
        self._failed: asyncio.Queue[Failed] = asyncio.Queue()
        self._state = "not entered"
        self._process = 0

    async def __aenter__(self) -> Self:
        if self._state != "not entered":
            raise RuntimeError(f"runtime {self.name} was entered before")
        self._process = os.getpid()
        if self.address is not None:
            self._listener = await self.address.listen(self._accept, self._terms)
            self.address = self._listener.address
        self._state = "open"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def spawn(self, name: str, actor: A, *, mailbox: int = DEFAULT_MAILBOX) -> A:
        """Run `actor` under `name`, with at most `mailbox` calls in hand. Raises ValueError for a name in use."""
        self._check_open()
        running = self.supervisors.get(name)
        if running is not None and running.ended is None:
            raise ValueError(f"runtime {self.name} already has an actor {name}")
        if actor._supervisor is not None:
            raise ValueError(f"this {type(actor).__qualname__} already runs as {actor.name}; an actor lives once")
        supervisor = Supervisor(name, actor, mailbox, self._actor_ended)
        actor.name, actor.runtime, actor._supervisor = name, self, supervisor
        self.supervisors.pop(name, None)
        self.supervisors[name] = supervisor
        return self._local(type(actor), supervisor)

    async def connect(self, kind: type[A], name: str, address: Address, *, timeout_s: float = 10.0) -> A:
        """A ref to the actor `name` of the runtime at `address`, which may still be starting.

        Raises CallTimeout when it is not there within `timeout_s`, WireError when it is not a `kind`, PermissionError
        when who listens there is not to be trusted, or does not trust us.
        """
        self._check_open()
        handlers = handlers_of(kind)
        if address == self.address:
            return self._local(kind, await self._own(name, timeout_s))
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(self.name, address, self.codec, self._terms)
        await link.find(name, handlers, timeout_s)
        return cast(A, Ref(handlers, _Remote(self, link, name), f"{name}: {kind.__qualname__} at {address}"))

    def watch(self, ref: Actor, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once, on the loop, when the actor behind `ref` is gone."""
        self._check_open()
        unwrap(ref)._channel.watch(callback)

    async def wait_failed(self) -> Failed:
        """The next actor that ended by an error. For supervisors: waits as long as all is well."""
        return await self._failed.get()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End everything in order, in at most about `timeout_s`. What does not end in time is named in the log."""
        if self._state != "open":
            return
        self._state = "closed"
        deadline = now() + timeout_s
        reason = f"runtime {self.name} closed"
        if self._listener is not None:
            self._listener.stop_accepting()
        for supervisor in reversed(list(self.supervisors.values())):
            await supervisor.stop(reason, max(0.1, deadline - now()))
        connections = [inbound.connection for inbound in self._inbound]
        for inbound in list(self._inbound):
            inbound.close(reason)
        endings = [link.close(reason) for link in self._links.values()]
        if self._listener is not None:
            endings.append(self._listener.close())
        try:
            async with asyncio.timeout_at(max(deadline, now() + 0.1)):
                await asyncio.gather(*endings)
        except TimeoutError:
            _log.error("runtime %s: some connections did not close in %g s", self.name, timeout_s)
        for connection in connections:
            connection.abort(reason)

    # Host of inbound connections.

    def supervisor(self, actor: str) -> Supervisor:
        found = self.supervisors.get(actor)
        if found is None:
            raise ActorDied(f"runtime {self.name} has no actor {actor}")
        return found

    def forget(self, inbound: Inbound) -> None:
        self._inbound.discard(inbound)

    def _accept(self, connection: Connection) -> Inbound:
        if self._state == "closed":
            raise PermissionError(f"runtime {self.name} closed")
        inbound = Inbound(self, connection)
        self._inbound.add(inbound)
        return inbound

    # Inside.

    def _local(self, kind: type[A], supervisor: Supervisor) -> A:
        label = f"{supervisor.name}: {kind.__qualname__} in {self.name}"
        return cast(A, Ref(handlers_of(kind), _Local(self, supervisor), label))

    async def _own(self, name: str, timeout_s: float) -> Supervisor:
        deadline = now() + timeout_s
        while name not in self.supervisors:
            if now() > deadline:
                raise CallTimeout(f"{name} was not spawned in {self.name} within {timeout_s:g} s")
            await asyncio.sleep(0.01)
        return self.supervisors[name]

    def _actor_ended(self, supervisor: Supervisor, error: BaseException | None) -> None:
        assert supervisor.ended is not None
        for inbound in self._inbound:
            inbound.gone(supervisor.name, supervisor.ended)
        if error is None:
            return
        _log.error("%s", supervisor.ended, exc_info=error)
        failed = Failed(supervisor.name, error)
        self._failed.put_nowait(failed)
        if self._on_failure is not None:
            self._on_failure(failed)

    def _check_open(self) -> None:
        if self._state != "open":
            raise RuntimeError(f"runtime {self.name} is {self._state}")
        self.check_process()

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child: sockets and loop belong to the parent."""
        if os.getpid() != self._process:
            raise RuntimeError(f"runtime {self.name} belongs to process {self._process}; make one after the fork")


class _Local:
    """Channel to an actor of this process: the message itself is handed over."""

    def __init__(self, runtime: Runtime, supervisor: Supervisor) -> None:
        self._runtime, self._supervisor = runtime, supervisor

    def sender(self, handler: Handler, timeout_s: float) -> Send:
        runtime, mailbox = self._runtime, self._supervisor.mailbox

        async def send(message: msgspec.Struct) -> msgspec.Struct | None:
            if type(message) not in handler.messages:
                raise handler.wrong_message(message)
            runtime.check_process()
            if handler.awaits or not mailbox.is_open:
                outcome = await _outcome(mailbox.take(handler, message, timeout_s))
            else:
                await asyncio.sleep(0)  # who calls in a loop lets others run
                outcome = mailbox.answer(handler, message, timeout_s)
            if isinstance(outcome, ActorError):
                raise outcome
            return outcome

        return send

    def watch(self, callback: Callable[[str], None]) -> None:
        self._supervisor.watch(callback)


class _Remote:
    """Channel to an actor of another process."""

    def __init__(self, runtime: Runtime, link: Link, actor: str) -> None:
        self._runtime, self._link, self._actor = runtime, link, actor

    def sender(self, handler: Handler, timeout_s: float) -> Send:
        return self._link.sender(self._actor, handler, timeout_s)

    def watch(self, callback: Callable[[str], None]) -> None:
        self._link.watch(self._actor, callback)


async def _outcome(job: Job) -> Outcome:
    """Wait for it; who gives up waiting gives up the job."""
    if not job.is_answered:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(outcome: Outcome) -> None:
            if not answered.done():
                answered.set_result(None)

        job.listen(wake)
        try:
            await answered
        except asyncio.CancelledError:
            job.stop(ActorDied("the caller gave up"))
            raise
    return job.outcome
