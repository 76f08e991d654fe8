"""A mailbox: which calls an actor takes, which are running, and what it answered to those that may be asked again.

Contract. At most `capacity` calls are in hand (waiting for `started()`, or running); one more is Overloaded at once.
A place is given back when the handler has really ended, not when its caller stopped listening. Each job ends by its
deadline: then its caller has a CallTimeout and its handler is cancelled. Jobs of idempotent handlers are remembered
by request id, so a call that is sent twice runs once; running ones as long as they run, ended ones until their
deadline, at most `remembered` of them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from psrl.actor.handler import Handler
from psrl.actor.wire import Outcome
from psrl.clock import now
from psrl.errors import ActorDied, ActorError, CallTimeout, Overloaded

DEFAULT_MAILBOX = 1024
REMEMBERED = 4096

RequestId = tuple[bytes, int]
"""Session of the caller, and the call's number in it."""


class Job:
    """One call in hand. `outcome` is set exactly once, unless its only listener cancels it."""

    __slots__ = ("_timer", "deadline", "handler", "message", "outcome", "request", "task")

    def __init__(
        self, actor: str, handler: Handler, message: msgspec.Struct, deadline: float, request: RequestId | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.handler, self.deadline, self.request = handler, deadline, request
        self.message: msgspec.Struct | None = message
        self.task: asyncio.Task[None] | None = None
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self._timer = loop.call_at(deadline, self._expire, actor)

    def finish(self, outcome: Outcome) -> None:
        """Answer the caller. Later answers are dropped."""
        self._timer.cancel()
        self.message = None
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def stop(self, error: ActorError) -> None:
        """Answer with `error` now and cancel the handler, once: its own cleaning up is not disturbed."""
        self.finish(error)
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()

    def _expire(self, actor: str) -> None:
        self.stop(_late(actor, self.handler))


class Mailbox:
    """Takes calls for one actor and hands each to `start` (once `open` was called), which runs it as a task."""

    def __init__(
        self, actor: str, capacity: int, start: Callable[[Job], asyncio.Task[None]], remembered: int = REMEMBERED
    ) -> None:
        if capacity < 1:
            raise ValueError(f"the mailbox of {actor} needs room for at least one call, not {capacity}")
        self._actor, self.capacity, self._start, self._remembered = actor, capacity, start, remembered
        self._in_hand: dict[Job, None] = {}
        self._running: dict[RequestId, Job] = {}
        self._answered: OrderedDict[RequestId, Job] = OrderedDict()
        self._open = False
        self._ended: str | None = None

    @property
    def num_free(self) -> int:
        """How many more calls it takes now."""
        return self.capacity - len(self._in_hand)

    def take(self, handler: Handler, message: msgspec.Struct, deadline: float, request: RequestId | None = None) -> Job:
        """Begin a call, or join the one that `request` began before. Raises Overloaded, CallTimeout or ActorDied."""
        if self._ended is not None:
            raise ActorDied(self._ended)
        if request is not None and handler.idempotent:
            known = self._running.get(request) or self._answered.get(request)
            if known is not None:
                return known
        else:
            request = None
        if deadline <= now():
            raise _late(self._actor, handler)
        if self.num_free <= 0:
            raise Overloaded(f"{self._actor} already has {self.capacity} calls in its mailbox")
        job = Job(self._actor, handler, message, deadline, request)
        self._in_hand[job] = None
        if request is not None:
            self._running[request] = job
        if self._open:
            self._begin(job)
        else:
            job.outcome.add_done_callback(lambda _: self._drop(job))
        return job

    def open(self) -> None:
        """The actor has started: run what has come in meanwhile, in order."""
        self._open = True
        for job in list(self._in_hand):
            if not job.outcome.done():
                self._begin(job)

    def close(self, reason: str) -> None:
        """The actor has ended: fail every call in hand, and every later one, with ActorDied."""
        if self._ended is None:
            self._ended = reason
        for job in list(self._in_hand):
            job.stop(ActorDied(self._ended))

    def _begin(self, job: Job) -> None:
        job.task = self._start(job)
        job.task.add_done_callback(lambda _: self._release(job))

    def _drop(self, job: Job) -> None:
        """A call was answered or given up before it began."""
        if job.task is None:
            self._release(job)

    def _release(self, job: Job) -> None:
        self._in_hand.pop(job, None)
        if job.request is not None and self._running.pop(job.request, None) is not None:
            self._remember(job.request, job)

    def _remember(self, request: RequestId, job: Job) -> None:
        self._answered[request] = job
        time = now()
        while self._answered:
            oldest = next(iter(self._answered.values()))
            if len(self._answered) <= self._remembered and oldest.deadline > time:
                break
            self._answered.popitem(last=False)


def _late(actor: str, handler: Handler) -> CallTimeout:
    return CallTimeout(f"{actor}.{handler.name} did not answer before its deadline")
