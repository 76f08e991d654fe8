"""PSManager: the single authority for admission, as an actor around `Control`.

Handlers ask `Control`, which decides at once and without waiting; what it decided is then carried out here: log lines
are written before the reply, effects run one after the other in a task of the actor. An error in an effect ends the
actor, one in the log fails the run: either way the trainer is told by name.

Order of a run: trainer Publish(initial version) -> workers NextGroup -> gateway Reserve -> workers Complete -> trainer
Consume(b), Publish(b + 1), TakeSnapshot(b + 1) -> ... -> Finish.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from psrl.actor import Actor, handler
from psrl.clock import now
from psrl.control.control import Control
from psrl.control.effects import Abort, AnnounceVersion, ClearRows, Effects, LedgerChanged, PromptFeed
from psrl.control.log import TrajectoryLog
from psrl.control.messages import (
    AwaitValidation,
    Batch,
    Complete,
    Completed,
    Consume,
    Counters,
    EndOfData,
    Fail,
    Finish,
    GetStatus,
    GroupOffer,
    NextGroup,
    NoGroup,
    NoteProgress,
    NotReady,
    Prompt,
    Publish,
    Published,
    Refused,
    Reserve,
    Reserved,
    Snapshot,
    StartValidation,
    Status,
    TakeSnapshot,
    ValidationDone,
    WorkerLost,
)
from psrl.control.records import EndLine, PublishLine, StartLine
from psrl.control.settings import ControlSettings
from psrl.control.state import ControlState
from psrl.errors import RunFailed

T = TypeVar("T")

MAX_WAIT_S = 20.0
"""Longest long-poll: well below the deadline of a call, so that an answer is never lost to it."""

FINISH_TIMEOUT_S = 15.0
"""For the last effects (aborts) when a run ends."""


class PSManager(Actor):
    """Versions, staleness ledger and unfinished work of a run.

    `log` is open for this attempt; it is closed by Finish or at the actor's end. `state` resumes from a checkpoint;
    `settings.initial_version` must be its version. `validation` are the prompts of a validation round.
    """

    def __init__(
        self,
        settings: ControlSettings,
        feed: PromptFeed,
        effects: Effects,
        log: TrajectoryLog,
        state: ControlState | None = None,
        *,
        validation: Sequence[Prompt] = (),
    ) -> None:
        left_behind = log.left_behind(state.log_bytes if state is not None else 0, settings.initial_version)
        self._control = Control(settings, feed, validation, state, attempt=log.attempt, left_behind=left_behind)
        self._settings, self._effects, self._log = settings, effects, log
        self._queue: asyncio.Queue[Abort | ClearRows | AnnounceVersion] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._last_progress_s = 0.0
        self._closed = False

    async def started(self) -> None:
        self._last_progress_s = now()
        first = self._log.attempt == 0 and self._settings.initial_version == 0
        self._log.write_attempt(
            StartLine(
                attempt=self._log.attempt,
                epoch=self._settings.epoch,
                resumed_from=None if first else self._settings.initial_version,
                staleness=self._settings.staleness,
                rollout_n=self._settings.rollout_n,
            )
        )
        self.spawn(self._carry_out(), "effects")

    async def stopped(self) -> None:
        if not self._closed:
            self._closed = True
            self._log.close()

    # -- work -----------------------------------------------------------------------------------------------------

    @handler(idempotent=True)
    async def next_group(self, message: NextGroup) -> GroupOffer | NoGroup:
        losses = self._control.num_losses(message.worker)

        def offer() -> GroupOffer | NoGroup | None:
            if self._control.finished:
                return NoGroup(end=True)
            if self._control.num_losses(message.worker) != losses:
                return NoGroup()  # asked by a process that has died since
            return self._control.next_group(message.worker, message.life, now())

        return await self._when(offer, message.wait_s) or NoGroup(end=self._control.finished)

    @handler(idempotent=True)
    async def reserve(self, message: Reserve) -> Reserved | Refused:
        answer = self._control.reserve(message)
        self._settle(progress=isinstance(answer, Reserved), wake=False)
        return answer

    @handler(idempotent=True)
    async def complete(self, message: Complete) -> Completed:
        answer = self._control.complete(message)
        self._settle()
        return answer

    @handler(idempotent=True)
    async def fail(self, message: Fail) -> None:
        self._control.fail(message)
        self._settle()

    @handler(idempotent=True)
    async def worker_lost(self, message: WorkerLost) -> None:
        self._control.worker_lost(message.worker)
        self._settle(progress=False)

    # -- the trainer ----------------------------------------------------------------------------------------------

    @handler(idempotent=True)
    async def consume(self, message: Consume) -> Batch | NotReady | EndOfData:
        """The batch, sorted by group; asked again, the same."""
        self._control.check_epoch(message.epoch)
        answer: Batch | EndOfData | None = await self._when(
            lambda: self._control.consume(message.buffer), message.wait_s
        )
        return answer or NotReady(self._control.waiting_for(message.buffer, now()))

    @handler(idempotent=True, timeout_s=60.0)
    async def publish(self, message: Publish) -> Published:
        """Accepting is the commit: when `commit_weights` fails nothing has changed."""
        self._control.check_epoch(message.epoch)
        async with self._publishing:
            if self._control.check_publish(message.version):
                await self._effects.commit_weights(message)
                self._control.publish(message.version, message.slot)
                if message.version != self._settings.initial_version:  # that one stands in the line of the start
                    self._log.write_attempt(PublishLine(self._log.attempt, message.version, now(), message.skipped))
                self._settle()
        return Published(message.version)

    @handler(idempotent=True)
    async def start_validation(self, message: StartValidation) -> None:
        self._control.check_epoch(message.epoch)
        self._control.start_validation(message.version)
        self._settle()

    @handler(idempotent=True)
    async def await_validation(self, message: AwaitValidation) -> ValidationDone | NotReady:
        self._control.check_epoch(message.epoch)
        done = await self._when(lambda: self._control.validation_result(message.version), message.wait_s)
        return done or NotReady(self._control.waiting_for_validation())

    @handler(idempotent=True)
    async def take_snapshot(self, message: TakeSnapshot) -> Snapshot:
        self._control.check_epoch(message.epoch)
        return Snapshot(self._control.take_snapshot(message.version, self._log.num_bytes).encode())

    @handler(idempotent=True)
    async def note_progress(self, message: NoteProgress) -> None:
        self._last_progress_s = now()

    @handler(idempotent=True)
    async def get_status(self, message: GetStatus) -> Status:
        control = self._control
        return Status(
            epoch=self._settings.epoch,
            version=control.version,
            counters=control.counters,
            buffers=control.buffers,
            last_progress_s=self._last_progress_s,
            finished=control.finished,
        )

    @handler(idempotent=True)
    async def finish(self, message: Finish) -> Counters:
        """Offer nothing more, stop what runs, close the log. The counters at the end."""
        self._control.check_epoch(message.epoch)
        self._control.finish(message.reason)
        if not self._closed:
            self._settle()
            self._closed = True
            self._log.write_attempt(EndLine(self._log.attempt, self._control.counters, message.reason))
            self._log.close()
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                await self._queue.join()
        return self._control.counters

    # -- carrying out ---------------------------------------------------------------------------------------------

    def _settle(self, *, progress: bool = True, wake: bool = True) -> None:
        """After a decision: write its lines, queue its effects, wake those who wait."""
        try:
            self._control.check()
            self._log.write(self._control.take_lines())
        except (RunFailed, AssertionError) as error:
            self._control.failure = str(error) or repr(error)
            self._wake()
            raise
        for effect in self._control.take_effects():
            if isinstance(effect, LedgerChanged):
                self._effects.ledger_changed()  # does not wait, so it need not stand in line
            else:
                self._queue.put_nowait(effect)
        if progress:
            self._last_progress_s = now()
        if wake:
            self._wake()

    def _wake(self) -> None:
        """Let everyone who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _when(self, answer: Callable[[], T | None], wait_s: float) -> T | None:
        """The answer as soon as there is one; None after `wait_s` (at most MAX_WAIT_S)."""
        deadline = now() + min(wait_s, MAX_WAIT_S)
        while True:
            changed = self._changed
            found = answer()
            if found is not None or now() >= deadline:
                self._settle(progress=False, wake=False)
                return found
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                pass

    async def _carry_out(self) -> None:
        """Effects, one after the other, in the order decided."""
        while True:
            effect = await self._queue.get()
            match effect:
                case Abort(trajectories, reason):
                    await self._effects.abort(trajectories, reason)
                case ClearRows(keys, partition):
                    await self._effects.clear_rows(keys, partition)
                case AnnounceVersion(version, slot):
                    await self._effects.version_published(self._settings.epoch, version, slot)
            self._queue.task_done()
