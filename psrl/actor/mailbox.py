"""A mailbox: which calls an actor takes, which are running, and what it answered to those that may be asked again.

Contract. At most `capacity` calls are in hand (waiting for `started()`, or running); one more is Overloaded at once.
A place is given back when the handler has really ended, not when its caller stopped listening. Each job ends by its
deadline: then its caller has a CallTimeout and its handler is cancelled. Jobs of idempotent handlers are remembered
by request id, so a call that is sent twice runs once; running ones as long as they run, ended ones until their
deadline, at most `remembered` of them.

A handler that never awaits runs in `answer`, within the caller's turn: it needs no task, and takes no place for longer
than that. `take` is for the others, and for all that come before the actor has started.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import msgspec

from psrl.actor.alarm import Alarm
from psrl.actor.handler import Handler
from psrl.actor.wire import Outcome, remote_error
from psrl.clock import now
from psrl.errors import ActorDied, ActorError, CallTimeout, Overloaded

DEFAULT_MAILBOX = 1024
REMEMBERED = 4096

RequestId = tuple[bytes, int]
"""Session of the caller, and the call's number in it."""


class Job:
    """One call in hand. It is answered exactly once; who listens hears it at once."""

    __slots__ = ("_listeners", "deadline", "handler", "is_answered", "message", "outcome", "request", "task")

    def __init__(self, handler: Handler, message: msgspec.Struct, deadline: float, request: RequestId | None) -> None:
        self.handler, self.deadline, self.request = handler, deadline, request
        self.message: msgspec.Struct | None = message
        self.task: asyncio.Task[None] | None = None
        self.is_answered = False
        self.outcome: Outcome = None
        self._listeners: list[Callable[[Outcome], None]] | None = None

    def listen(self, callback: Callable[[Outcome], None]) -> None:
        """Call `callback(outcome)` when there is one, now if there is."""
        if self.is_answered:
            callback(self.outcome)
        elif self._listeners is None:
            self._listeners = [callback]
        else:
            self._listeners.append(callback)

    def finish(self, outcome: Outcome) -> None:
        """Answer the caller. Later answers are dropped."""
        if self.is_answered:
            return
        self.is_answered, self.outcome, self.message = True, outcome, None
        listeners, self._listeners = self._listeners, None
        for callback in listeners or ():
            callback(outcome)

    def stop(self, error: ActorError) -> None:
        """Answer with `error` now and cancel the handler, once: its own cleaning up is not disturbed."""
        self.finish(error)
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()


class Mailbox:
    """Takes calls for one actor and hands each to `start`, once `open` was called, which runs it as a task."""

    def __init__(
        self,
        name: str,
        actor: object,
        capacity: int,
        start: Callable[[Job], asyncio.Task[None]],
        remembered: int = REMEMBERED,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"the mailbox of {name} needs room for at least one call, not {capacity}")
        self._name, self._actor, self.capacity, self._start, self._remembered = name, actor, capacity, start, remembered
        self._in_hand: dict[Job, None] = {}
        self._running: dict[RequestId, Job] = {}
        self._answered: OrderedDict[RequestId, tuple[Outcome, float]] = OrderedDict()  # with the deadline
        self._alarm = Alarm(self._sweep)
        self.is_open = False
        self._ended: str | None = None

    @property
    def num_free(self) -> int:
        """How many more calls it takes now."""
        return self.capacity - len(self._in_hand)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Of the handlers that run now."""
        return {job.task for job in self._in_hand if job.task is not None}

    def answer(
        self, handler: Handler, message: msgspec.Struct, timeout_s: float, request: RequestId | None = None
    ) -> Outcome:
        """Run a handler that never awaits, of a mailbox that is open. Raises Overloaded, CallTimeout or ActorDied."""
        if not handler.idempotent:
            request = None
        elif request is not None and request in self._answered:
            return self._answered[request][0]
        if self._ended is not None or timeout_s <= 0 or len(self._in_hand) >= self.capacity:
            raise self._refusal(handler, timeout_s)
        running = handler.function(self._actor, message)
        try:
            running.send(None)
            running.close()
            raise AssertionError(f"{self._name}.{handler.name} has no await and did await")
        except StopIteration as end:
            outcome: Outcome = end.value
            if type(outcome) not in handler.replies:
                outcome = remote_error(handler.wrong_reply(outcome))
        except (Exception, asyncio.CancelledError) as error:
            outcome = remote_error(error)
        if request is not None:
            self._remember(request, outcome, now() + timeout_s)
        return outcome

    def take(
        self, handler: Handler, message: msgspec.Struct, timeout_s: float, request: RequestId | None = None
    ) -> Job:
        """Begin a call, or join the one that `request` began before. Raises Overloaded, CallTimeout or ActorDied."""
        if not handler.idempotent:
            request = None
        elif request is not None:
            if request in self._running:
                return self._running[request]
            if request in self._answered:
                job = Job(handler, message, 0.0, None)
                job.finish(self._answered[request][0])
                return job
        if self._ended is not None or timeout_s <= 0 or len(self._in_hand) >= self.capacity:
            raise self._refusal(handler, timeout_s)
        deadline = now() + timeout_s
        job = Job(handler, message, deadline, request)
        self._in_hand[job] = None
        if request is not None:
            self._running[request] = job
        if deadline < self._alarm.when:
            self._alarm.set(deadline)
        if self.is_open:
            self._begin(job)
        else:
            job.listen(lambda _: self._drop(job))
        return job

    def open(self) -> None:
        """The actor has started: run what has come in meanwhile, in order."""
        self.is_open = True
        for job in list(self._in_hand):
            if not job.is_answered:
                self._begin(job)

    def close(self, reason: str) -> None:
        """The actor has ended: fail every call in hand, and every later one, with ActorDied."""
        if self._ended is None:
            self._ended = reason
        self._alarm.cancel()
        for job in list(self._in_hand):
            job.stop(ActorDied(self._ended))

    def _begin(self, job: Job) -> None:
        job.task = self._start(job)
        job.task.add_done_callback(partial(self._release, job))

    def _drop(self, job: Job) -> None:
        """A call was answered or given up before it began."""
        if job.task is None:
            self._release(job)

    def _release(self, job: Job, _: object = None) -> None:
        self._in_hand.pop(job, None)
        if job.request is not None and self._running.pop(job.request, None) is not None:
            self._remember(job.request, job.outcome, job.deadline)

    def _remember(self, request: RequestId, outcome: Outcome, deadline: float) -> None:
        self._answered[request] = outcome, deadline
        time = now()
        while self._answered:
            _, oldest = next(iter(self._answered.values()))
            if len(self._answered) <= self._remembered and oldest > time:
                break
            self._answered.popitem(last=False)

    def _refusal(self, handler: Handler, timeout_s: float) -> ActorError:
        if self._ended is not None:
            return ActorDied(self._ended)
        if timeout_s <= 0:
            return _late(self._name, handler)
        return Overloaded(f"{self._name} already has {self.capacity} calls in its mailbox")

    def _sweep(self, time: float) -> float:
        late = [job for job in self._in_hand if job.deadline <= time and not job.is_answered]
        for job in late:
            job.stop(_late(self._name, job.handler))
        return min((job.deadline for job in self._in_hand if not job.is_answered), default=math.inf)


def _late(actor: str, handler: Handler) -> CallTimeout:
    return CallTimeout(f"{actor}.{handler.name} did not answer before its deadline")
