"""The rollout gateway: admits each request with PSManager, picks a replica, and follows it to its end.

A request's way (one `generate` call):

    wait for a place  ->  select replica  ->  Reserve  ->  stream  -+->  finished: answer
          ^                                                         |
          +--- replica lost, or interrupted by a sync: keep what was streamed, go again

Requests wait here, never in an engine. Whoever changes what can be admitted (a replica came, left or synced; a
request ended; the ledger moved) wakes one dispatcher task, which goes over the waiting requests, oldest group first.
A request that the ledger refused at some version is not asked again at it until the ledger has changed.

A broken stream is not yet a lost replica: nothing is routed there until its server answers again over a new connection,
or the launcher says that its process ended.
"""

import asyncio
import bisect
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from psrl.actor import Actor, handler
from psrl.clock import now
from psrl.control import PSManager
from psrl.control.messages import NoteProgress, Refused, Reserve, Reserved
from psrl.errors import ActorError, EngineError
from psrl.rollout.messages import (
    AbortTrajectories,
    Ack,
    Generate,
    Generated,
    GetRolloutView,
    HoldReplica,
    ReplicaLoad,
    ReplicaLost,
    RolloutView,
    SetReplica,
)
from psrl.rollout.replica_client import ReplicaClient
from psrl.rollout.request import GenerationRequest
from psrl.rollout.routing import Policy, ReplicaView, eligible
from psrl.types import FinishReason, TrajectoryId, Version

logger = logging.getLogger(__name__)

MAX_DISPATCHES = 1000  # a request that was interrupted this often is failed by name instead of going round for ever
PROGRESS_INTERVAL_S = 5.0
GENERATE_TIMEOUT_S = 24 * 3600.0  # the agent loop sets the real limit of a trajectory
REACH_INTERVAL_S = 0.5  # between two looks at a replica whose stream broke


class _Replica:
    """A replica as the gateway routes to it."""

    def __init__(self, name: str, address: str, max_running: int) -> None:
        self.name, self.address, self.max_running = name, address, max_running
        self.client = ReplicaClient(address)
        self.version = Version(-1)
        self.held = True  # a sync is about to start, or runs
        self.reachable = True
        self.running: dict[TrajectoryId, GenerationRequest] = {}

    @property
    def accepting(self) -> bool:
        return self.reachable and not self.held

    def view(self) -> ReplicaView:
        return ReplicaView(self.name, self.version, len(self.running), self.max_running, self.accepting)


class _Waiting:
    """A request without a place. `refused_at`: the versions it was refused at since the ledger last changed."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.place: asyncio.Future[_Replica | None] = asyncio.get_running_loop().create_future()
        self.refused_at: set[Version] = set()
        self.ledger_change = -1


class RolloutGateway(Actor):
    """Online requests of agent loops: selection, admission, dispatch, partial rollout."""

    def __init__(self, manager: PSManager, policy: Policy, *, max_concurrent_seqs: int) -> None:
        self._manager = manager
        self._policy = policy
        self._max_concurrent_seqs = max_concurrent_seqs
        self._replicas: dict[str, _Replica] = {}
        self._waiting: dict[TrajectoryId, _Waiting] = {}
        self._line: list[TrajectoryId] = []  # of those that wait, sorted
        self._active: dict[TrajectoryId, GenerationRequest] = {}
        self._wake = asyncio.Event()
        self._ledger_change = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._num_tokens = self._num_finished = self._num_redispatched = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    async def started(self) -> None:
        self.spawn(self._dispatch_for_ever(), "dispatch")
        self.spawn(self._note_progress_for_ever(), "progress")

    async def stopped(self) -> None:
        for waiting in self._waiting.values():
            waiting.place.cancel()
        await asyncio.gather(*(replica.client.close() for replica in self._replicas.values()), *self._closing)

    # --- requests ---

    @handler(timeout_s=GENERATE_TIMEOUT_S)
    async def generate(self, message: Generate) -> Generated:
        """Generate one trajectory to its end. Answers exactly once: finished, aborted, or failed by name."""
        request = GenerationRequest(message, now())
        if message.trajectory in self._active:
            return request.result(FinishReason.ERROR, now(), f"{message.trajectory.key} is being generated already")
        self._active[message.trajectory] = request
        try:
            return await self._follow(request)
        finally:
            del self._active[message.trajectory]

    async def _follow(self, request: GenerationRequest) -> Generated:
        while request.num_dispatches < MAX_DISPATCHES:
            replica = await self._find_place(request)
            if replica is None:
                return request.result(FinishReason.ABORT, now(), request.abort_reason or "")
            request.count_dispatch(now())
            self._num_redispatched += request.num_dispatches > 1
            outcome = await self._stream(request, replica)
            if outcome is not None:
                self._num_finished += 1
                return outcome
        return request.result(FinishReason.ERROR, now(), f"dispatched {MAX_DISPATCHES} times without an end")

    async def _stream(self, request: GenerationRequest, replica: _Replica) -> Generated | None:
        """Follow one dispatch. None: interrupted or lost, to be dispatched again with what it has."""
        reason, error, client = "", "", replica.client
        try:
            async for delta in client.generate(request.to_wire()):
                before = request.num_tokens
                request.take(delta, replica.name)
                self._num_tokens += request.num_tokens - before
                reason, error = delta.finish_reason, delta.error
        except EngineError as failure:
            await client.abort([request.request_id])
            return request.result(FinishReason.ERROR, now(), str(failure))
        except ActorError as failure:
            logger.warning("replica %s lost request %s: %s", replica.name, request.request_id, failure)
            self._lose_touch(replica, client)
        except asyncio.CancelledError:
            self._close_later(client.abort([request.request_id]))
            raise
        finally:
            self._leave(request, replica)
        if request.abort_reason is not None:
            return request.result(FinishReason.ABORT, now(), request.abort_reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            return request.result(FinishReason(reason), now())
        if reason == FinishReason.ERROR:
            return request.result(FinishReason.ERROR, now(), f"replica {replica.name}: {error}")
        finished = request.already_finished()
        return request.result(finished, now()) if finished else None

    @handler
    async def abort_trajectories(self, message: AbortTrajectories) -> Ack:
        """Idempotent; ids that are not here are ignored."""
        on_replica: dict[str, list[str]] = {}
        for trajectory in message.trajectories:
            request = self._active.get(trajectory)
            if request is None:
                continue
            request.abort_reason = message.reason
            waiting = self._waiting.get(trajectory)
            if waiting is not None and not waiting.place.done():
                waiting.place.set_result(None)
            for replica in self._replicas.values():
                if trajectory in replica.running:
                    on_replica.setdefault(replica.name, []).append(request.request_id)
        for name, ids in on_replica.items():
            try:
                await self._replicas[name].client.abort(ids)
            except ActorError as failure:  # a lost replica makes no more tokens; its stream has ended by itself
                logger.warning("abort on %s: %s", name, failure)
        return Ack()

    # --- replicas ---

    @handler
    async def set_replica(self, message: SetReplica) -> Ack:
        """The replica serves this version now. A new address under a known name replaces the old process."""
        known = self._replicas.get(message.name)
        if known is None or known.address != message.address:
            if known is not None:
                known.held = True
                self._close_later(known.client.close())
            known = _Replica(message.name, message.address, min(message.max_num_seqs, self._max_concurrent_seqs))
            self._replicas[message.name] = known
        known.version, known.held = message.version, False
        self._wake.set()
        return Ack()

    @handler
    async def hold_replica(self, message: HoldReplica) -> Ack:
        if message.name in self._replicas:
            self._replicas[message.name].held = True
        return Ack()

    @handler
    async def replica_lost(self, message: ReplicaLost) -> Ack:
        """Its streams end with what they have; each request finds another place."""
        replica = self._replicas.pop(message.name, None)
        if replica is not None:
            replica.held = True
            await replica.client.close()
        return Ack()

    @handler
    async def get_rollout_view(self, message: GetRolloutView) -> RolloutView:
        return RolloutView(
            replicas=tuple(
                ReplicaLoad(
                    name=replica.name,
                    version=replica.version,
                    accepting=replica.accepting,
                    num_running=len(replica.running),
                    num_pinned=sum(request.message.pinned_version is not None for request in replica.running.values()),
                )
                for replica in self._replicas.values()
            ),
            num_waiting=len(self._waiting),
            pinned_waiting=tuple(
                {
                    waiting.request.message.pinned_version
                    for waiting in self._waiting.values()
                    if waiting.request.message.pinned_version is not None
                }
            ),
            num_generated_tokens=self._num_tokens,
            num_finished=self._num_finished,
            num_redispatched=self._num_redispatched,
            busy_s=self._busy_s + (now() - self._busy_since if self._busy_since is not None else 0.0),
        )

    def ledger_changed(self) -> None:
        """PSManager's ledger moved: what was refused may be admitted now. Called in this process."""
        self._ledger_change += 1
        self._wake.set()

    # --- dispatch ---

    async def _find_place(self, request: GenerationRequest) -> _Replica | None:
        """Wait until the dispatcher has a replica and a reservation. None: aborted."""
        if request.abort_reason is not None:
            return None
        waiting = _Waiting(request)
        self._waiting[request.message.trajectory] = waiting
        bisect.insort(self._line, request.message.trajectory)
        self._wake.set()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            place = waiting.place.result() if waiting.place.done() and not waiting.place.cancelled() else None
            if place is not None:  # it was given a replica in the moment of its cancellation
                self._leave(request, place)
            raise
        finally:
            del self._waiting[request.message.trajectory]
            del self._line[bisect.bisect_left(self._line, request.message.trajectory)]

    async def _note_progress_for_ever(self) -> None:
        noted = 0
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            if self._num_tokens != noted:
                noted = self._num_tokens
                await self._manager.note_progress(NoteProgress())

    async def _dispatch_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._dispatch()

    async def _dispatch(self) -> None:
        """One pass over the line. It ends when no replica takes any more; what none can take at its pinned version is
        passed over unseen, so that thousands that wait cost nothing."""
        stuck: set[Version | None] = set()
        for trajectory in tuple(self._line):
            waiting = self._waiting.get(trajectory)
            if waiting is None or waiting.place.done() or waiting.request.message.pinned_version in stuck:
                continue
            if not eligible(self._views(), None):
                return
            await self._try_place(waiting)
            pinned = waiting.request.message.pinned_version
            if not waiting.place.done() and not eligible(self._views(), pinned):
                stuck.add(pinned)

    async def _try_place(self, waiting: _Waiting) -> None:
        message = waiting.request.message
        if waiting.ledger_change != self._ledger_change:
            waiting.refused_at.clear()
            waiting.ledger_change = self._ledger_change
        while not waiting.place.done():
            candidates = [
                view
                for view in eligible(self._views(), message.pinned_version)
                if view.version not in waiting.refused_at
            ]
            if not candidates:
                return
            chosen = self._policy.choose(candidates)
            try:
                answer = await self._manager.reserve(
                    Reserve(message.epoch, message.trajectory, chosen.version, chosen.name)
                )
            except ActorError as failure:
                if not waiting.place.done():
                    waiting.place.set_exception(failure)
                return
            if waiting.place.done():
                return
            if isinstance(answer, Refused):
                if answer.gone:
                    waiting.request.abort_reason = answer.reason
                    waiting.place.set_result(None)
                    return
                waiting.refused_at.add(chosen.version)
                continue
            assert isinstance(answer, Reserved)
            replica = self._replicas.get(chosen.name)
            # The replica may have been taken for a sync, or lost, while PSManager answered: choose again.
            if replica is not None and replica.accepting and replica.version == chosen.version:
                self._enter(waiting.request, replica)
                waiting.place.set_result(replica)

    def _views(self) -> Sequence[ReplicaView]:
        return [replica.view() for replica in self._replicas.values()]

    def _enter(self, request: GenerationRequest, replica: _Replica) -> None:
        if self._busy_since is None:
            self._busy_since = now()
        replica.running[request.message.trajectory] = request

    def _leave(self, request: GenerationRequest, replica: _Replica) -> None:
        replica.running.pop(request.message.trajectory, None)
        if self._busy_since is not None and not any(other.running for other in self._replicas.values()):
            self._busy_s += now() - self._busy_since
            self._busy_since = None
        self._wake.set()

    def _lose_touch(self, replica: _Replica, client: ReplicaClient) -> None:
        """The stream of `client` broke; the first request that says so begins to look for the replica again."""
        if replica.client is not client or self._replicas.get(replica.name) is not replica:
            return
        replica.reachable = False
        replica.client = ReplicaClient(replica.address)
        self._close_later(client.close())
        self.spawn(self._reach(replica), f"reach {replica.name}")

    async def _reach(self, replica: _Replica) -> None:
        """Until the replica answers, or was replaced or lost."""
        while self._replicas.get(replica.name) is replica:
            try:
                await replica.client.health()
            except ActorError:
                await asyncio.sleep(REACH_INTERVAL_S)
            else:
                logger.warning("replica %s answers again", replica.name)
                replica.reachable = True
                self._wake.set()
                return

    def _close_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
