"""One actor's life: start, tasks, end.

The tasks of an actor are its handlers, in its mailbox, and the others (its `started`, what it spawned), in a TaskGroup
that this object holds. The first error outside a handler ends the actor: calls in hand fail at once with ActorDied,
every task is cancelled and awaited, `stopped()` runs within its deadline, and the runtime is told. An orderly stop is
the same without the error.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from psrl.actor.actor import Actor
from psrl.actor.handler import handlers_of
from psrl.actor.mailbox import Job, Mailbox
from psrl.actor.wire import remote_error

T = TypeVar("T")
_log = logging.getLogger("psrl.actor")

STOPPED_TIMEOUT_S = 5.0

OnEnd = Callable[["Supervisor", BaseException | None], None]


class Supervisor:
    """Runs `actor` under `name` until `stop` or a failure. `on_end` is called once, right when it ends."""

    def __init__(self, name: str, actor: Actor, capacity: int, on_end: OnEnd) -> None:
        self.name, self.actor = name, actor
        self.handlers = handlers_of(type(actor))
        self.mailbox = Mailbox(name, actor, capacity, self._start_handler)
        self.ended: str | None = None
        self._on_end = on_end
        self._watchers: list[Callable[[str], None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._was_started = False
        self._loop = asyncio.get_running_loop()
        self._host = self._loop.create_task(self._run(), name=f"actor {name}")

    def own(self, coroutine: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """Run a task that lives at most as long as the actor and ends it by an error."""
        if self._group is None or self.ended is not None:
            coroutine.close()
            raise RuntimeError(f"actor {self.name} runs no tasks now: {self.ended or 'it has not started'}")
        task = self._group.create_task(coroutine, name=f"{self.name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def watch(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once when the actor has ended, soon if it has already."""
        if self.ended is None:
            self._watchers.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback, self.ended)

    async def stop(self, reason: str, timeout_s: float) -> None:
        """End the actor in order. Tasks that do not end in time are named in the log and left cancelled."""
        self._end(f"actor {self.name} ended: {reason}", None)
        done, _ = await asyncio.wait({self._host}, timeout=timeout_s)
        if not done:
            stuck = ", ".join(sorted(task.get_name() for task in self._tasks | self.mailbox.tasks)) or "stopped()"
            _log.error("actor %s did not stop in %g s; still running: %s", self.name, timeout_s, stuck)
            self._host.cancel()

    async def _run(self) -> None:
        if self.ended is not None:
            return
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self.own(self._start(), "started")
                await self._stopping.wait()
        except* Exception:
            pass  # _task_done has reported the first one
        if handling := self.mailbox.tasks:
            await asyncio.wait(handling)
        if self._was_started:
            await self._after()

    async def _start(self) -> None:
        await self.actor.started()
        self._was_started = True
        self.mailbox.open()

    async def _after(self) -> None:
        try:
            async with asyncio.timeout(STOPPED_TIMEOUT_S):
                await self.actor.stopped()
        except Exception as error:
            _log.error("actor %s: stopped() failed", self.name, exc_info=error)

    def _start_handler(self, job: Job) -> asyncio.Task[None]:
        return self._loop.create_task(self._handle(job), name=f"{self.name}.{job.handler.name}")

    async def _handle(self, job: Job) -> None:
        if job.message is None:
            return  # answered before its turn came
        try:
            reply = await job.handler.function(self.actor, job.message)
            if type(reply) not in job.handler.replies:
                raise job.handler.wrong_reply(reply)
        except asyncio.CancelledError as error:
            job.finish(remote_error(error))
            raise
        except Exception as error:
            job.finish(remote_error(error))
        else:
            job.finish(reply)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            what = task.get_name().removeprefix(f"{self.name}/")
            self._end(f"actor {self.name} ended: its task {what} raised {type(error).__name__}: {error}", error)

    def _end(self, reason: str, error: BaseException | None) -> None:
        if self.ended is not None:
            return
        self.ended = reason
        self._stopping.set()
        self.mailbox.close(reason)  # cancels the handlers
        for task in list(self._tasks):
            task.cancel()
        self._on_end(self, error)
        watchers, self._watchers = self._watchers, []
        for callback in watchers:
            asyncio.get_running_loop().call_soon(callback, reason)
