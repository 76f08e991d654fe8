"""The gateway over real replica servers and a real PSManager: admission, selection, partial rollout, losses, aborts."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from psrl.actor import Runtime
from psrl.control import ControlSettings, PSManager, TrajectoryLog
from psrl.control.memory import MemoryEffects, MemoryFeed
from psrl.control.messages import GroupOffer, NextGroup, Publish, StartValidation
from psrl.rollout.coordinator import RolloutCoordinator
from psrl.rollout.engine.base import EngineDelta, EngineLoad, EngineRequest, PulledWeights, Running
from psrl.rollout.gateway import RolloutGateway
from psrl.rollout.messages import (
    AbortTrajectories,
    Generate,
    Generated,
    GetRolloutView,
    RegisterReplica,
    ReplicaLost,
    RolloutView,
    VersionPublished,
)
from psrl.rollout.replica import ReplicaSettings, serve_replica
from psrl.rollout.routing import RequestNumBalance
from psrl.types import Epoch, FinishReason, Purpose, SamplingParams, TrajectoryId, Version

ROLLOUT_N = 2
BATCH = 4
LIMIT_S = 60.0


class Counting:
    """An engine without a model: token i of a response is i, one token a step. A response stands still at `hold_at`
    tokens, until a test takes that away: so that it still runs when the test acts, however late that is.
    """

    def __init__(self, hold_at: int | None = None) -> None:
        self.hold_at = hold_at
        self._version = Version(0)
        self._running: dict[str, tuple[EngineRequest, int]] = {}
        self._deltas: list[EngineDelta] = []

    def submit(self, request: EngineRequest) -> None:
        if request.pinned_version not in (None, self._version):
            self._end(request.request_id, FinishReason.ABORT)
        else:
            self._running[request.request_id] = (request, 0)

    def abort(self, request_ids: Sequence[str], reason: str = "") -> None:
        for name in request_ids:
            if self._running.pop(name, None) is not None:
                self._end(name, FinishReason.ABORT)

    def abort_all(self, reason: str, *, running_only: bool = False) -> None:
        self.abort(list(self._running), reason)

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> None:
        time.sleep(0.001)
        hold_at = self.hold_at
        for name, (request, made) in list(self._running.items()):
            if request.num_prefix + made == hold_at:
                continue
            ended = made + 1 == request.sampling.max_new_tokens
            token = request.num_prefix + made
            reason = FinishReason.LENGTH if ended else None
            self._deltas.append(EngineDelta(name, [token], [-0.5], self._version, reason))
            self._running[name] = (request, made + 1)
            if ended:
                del self._running[name]

    def drain(self, *, finished_only: bool = False) -> list[EngineDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def update(self, pulled: PulledWeights, running: Running) -> int:
        self._version = pulled.version
        return 0

    def distrust_weights(self, reason: str) -> None:
        raise AssertionError(reason)

    def load(self) -> EngineLoad:
        return EngineLoad(Epoch(0), self._version, num_running=len(self._running))

    def _end(self, name: str, reason: FinishReason) -> None:
        self._deltas.append(EngineDelta(name, [], [], self._version, reason))


class Pulled:
    def __init__(self, version: Version) -> None:
        self.version, self.epoch = version, Epoch(0)
        self.tensors: Mapping[str, object] = {}
        self.transfer_s = 0.0


class Newest:
    """A weight source that has whatever is asked for."""

    def pull(self, min_version: Version, timeout_s: float, **_: object) -> AbstractContextManager[Pulled]:
        return nullcontext(Pulled(min_version))

    def cancel(self) -> None:
        pass


class System:
    """PSManager, gateway and coordinator in one runtime, replicas as real servers in this process."""

    def __init__(self, runtime: Runtime, manager: PSManager, gateway_actor: RolloutGateway) -> None:
        self.runtime, self.manager, self.gateway_actor = runtime, manager, gateway_actor
        self.gateway = runtime.spawn("gateway", gateway_actor, mailbox=8192)
        self.coordinator = runtime.spawn(
            "coordinator",
            RolloutCoordinator(
                self.gateway,
                epoch=Epoch(0),
                check_interval_s=0.02,
                partial_rollout=True,
                running="recompute",
                sync_timeout_s=LIMIT_S,
            ),
        )
        self.servers: dict[str, asyncio.Task[None]] = {}
        self.engines: dict[str, Counting] = {}

    async def serve(self, name: str, *, hold_at: int | None = None, max_num_seqs: int = 64, port: int = 0) -> str:
        """Run a server that nobody knows of yet; its address."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def on_ready(address: str, load: EngineLoad) -> None:
            ready.set_result(address)

        engine = self.engines[name] = Counting(hold_at)
        settings = ReplicaSettings(name=name, model_path="", max_model_len=4096, max_num_seqs=max_num_seqs, port=port)
        self.servers[name] = asyncio.create_task(
            serve_replica(settings, Newest(), on_ready, make_engine=lambda _: engine)  # type: ignore[arg-type]
        )
        return await asyncio.wait_for(ready, LIMIT_S)

    async def add_replica(self, name: str, *, hold_at: int | None = None, max_num_seqs: int = 64) -> str:
        address = await self.serve(name, hold_at=hold_at, max_num_seqs=max_num_seqs)
        await self.coordinator.register_replica(
            RegisterReplica(Epoch(0), name, address, Version(0), max_num_seqs=max_num_seqs)
        )
        return address

    async def publish(self, version: int) -> None:
        await self.manager.publish(Publish(Epoch(0), Version(version), 0, ""))
        await self.coordinator.version_published(VersionPublished(Epoch(0), Version(version), 0))
        self.gateway_actor.ledger_changed()

    async def stop_server(self, name: str) -> None:
        self.servers[name].cancel()
        await asyncio.gather(self.servers.pop(name), return_exceptions=True)

    async def end_replica(self, name: str) -> None:
        """As if its process was killed: the server goes, then the node agent tells."""
        await self.stop_server(name)
        await self.coordinator.replica_lost(ReplicaLost(name, "killed"))

    async def view(self) -> RolloutView:
        return await self.gateway.get_rollout_view(GetRolloutView())

    async def wait_tokens(self, num_tokens: int) -> None:
        async def there() -> bool:
            return (await self.view()).num_generated_tokens >= num_tokens

        await until(there)

    async def wait_waiting(self, num_waiting: int) -> None:
        async def there() -> bool:
            return (await self.view()).num_waiting == num_waiting

        await until(there)

    async def offer(self) -> GroupOffer:
        offer = await self.manager.next_group(NextGroup("agent-0", wait_s=20.0))
        assert isinstance(offer, GroupOffer)
        return offer

    async def generate(
        self, trajectory: TrajectoryId, *, num_tokens: int = 8, pinned: Version | None = None
    ) -> Generated:
        prompt = np.arange(3, dtype="<i4").tobytes()
        sampling = SamplingParams(max_new_tokens=num_tokens)
        return await self.gateway.generate(Generate(Epoch(0), trajectory, prompt, sampling, pinned))

    async def close(self) -> None:
        for server in self.servers.values():
            server.cancel()
        await asyncio.gather(*self.servers.values(), return_exceptions=True)


def siblings(offer: GroupOffer) -> list[TrajectoryId]:
    return [TrajectoryId(offer.prompt.group, index, offer.offer, offer.purpose) for index in range(ROLLOUT_N)]


def tokens(generated: Generated) -> list[int]:
    return np.frombuffer(generated.token_ids, "<i4").tolist()


@asynccontextmanager
async def system(tmp_path: Path, *, staleness: int = 1) -> AsyncIterator[System]:
    settings = ControlSettings(total_steps=10, batch_size=BATCH, rollout_n=ROLLOUT_N, staleness=staleness)
    async with Runtime("head") as runtime:
        manager = runtime.spawn(
            "manager",
            PSManager(settings, MemoryFeed(), MemoryEffects(), TrajectoryLog(tmp_path)),
        )
        made = System(runtime, manager, RolloutGateway(manager, RequestNumBalance(), max_concurrent_seqs=1024))
        try:
            yield made
        finally:
            await made.close()


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(LIMIT_S):
        while not await check():
            await asyncio.sleep(0.01)


async def test_a_request_is_admitted_and_served_under_the_published_version(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        await made.add_replica("replica-0")
        await made.publish(0)
        (first, second) = siblings(await made.offer())
        results = await asyncio.gather(made.generate(first), made.generate(second, num_tokens=5))
        assert [tokens(result) for result in results] == [list(range(8)), list(range(5))]
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        assert [(span.version, span.num_tokens, span.replica) for span in results[0].spans] == [(0, 8, "replica-0")]
        assert results[0].num_dispatches == 1


async def test_requests_wait_for_the_first_replica_and_spread_over_two(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        await made.publish(0)
        offers = [await made.offer() for _ in range(4)]
        running = [
            asyncio.create_task(made.generate(trajectory, num_tokens=50))
            for offer in offers
            for trajectory in siblings(offer)
        ]
        await made.wait_waiting(8)
        await asyncio.gather(made.add_replica("replica-0"), made.add_replica("replica-1"))
        used = {span.replica for result in await asyncio.gather(*running) for span in result.spans}
        assert used <= {"replica-0", "replica-1"}


async def test_what_was_streamed_is_kept_when_a_replica_dies(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        await made.add_replica("replica-0", hold_at=20)
        await made.publish(0)
        (first, _) = siblings(await made.offer())
        running = asyncio.create_task(made.generate(first, num_tokens=200))
        await made.wait_tokens(20)
        await made.add_replica("replica-1")
        await made.end_replica("replica-0")
        result = await asyncio.wait_for(running, LIMIT_S)
        assert tokens(result) == list(range(200))
        assert len(result.log_probs) == 4 * 200
        assert [(span.replica, span.num_tokens) for span in result.spans] == [("replica-0", 20), ("replica-1", 180)]
        assert result.num_dispatches >= 2


async def test_a_replica_whose_stream_broke_is_routed_to_again_when_it_answers(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        address = await made.add_replica("replica-0", hold_at=20)
        await made.publish(0)
        (first, second) = siblings(await made.offer())
        running = asyncio.create_task(made.generate(first, num_tokens=100))

        async def held_back() -> bool:
            view = await made.view()
            return view.num_waiting == 1 and not view.replicas[0].accepting

        await made.wait_tokens(20)
        await made.stop_server("replica-0")  # nobody says that it is lost
        await until(held_back)
        assert await made.serve("replica-0", port=int(address.rpartition(":")[2])) == address
        result = await asyncio.wait_for(running, LIMIT_S)
        assert tokens(result) == list(range(100))
        assert result.num_dispatches >= 2
        assert tokens(await asyncio.wait_for(made.generate(second), LIMIT_S)) == list(range(8))


async def test_a_sync_interrupts_nobody_and_later_tokens_carry_the_new_version(tmp_path: Path) -> None:
    async with system(tmp_path, staleness=3) as made:
        await made.add_replica("replica-0", hold_at=20)
        await made.publish(0)
        (first, _) = siblings(await made.offer())
        running = asyncio.create_task(made.generate(first, num_tokens=200))
        await made.wait_tokens(20)
        await made.coordinator.version_published(VersionPublished(Epoch(0), Version(1), 0))

        async def synced() -> bool:
            return (await made.view()).replicas[0].version == 1

        await until(synced)
        made.engines["replica-0"].hold_at = None
        result = await asyncio.wait_for(running, LIMIT_S)
        assert tokens(result) == list(range(200))
        assert [(span.version, span.num_tokens) for span in result.spans] == [(0, 20), (1, 180)]
        assert result.num_dispatches == 1


async def test_an_offer_that_was_never_made_is_turned_away(tmp_path: Path) -> None:
    async with system(tmp_path, staleness=0) as made:
        await made.add_replica("replica-0")
        await made.publish(0)
        offers = [await made.offer() for _ in range(BATCH)]
        for offer in offers:
            await asyncio.gather(*(made.generate(trajectory) for trajectory in siblings(offer)))
        stranger = asyncio.create_task(made.generate(TrajectoryId(offers[0].prompt.group, 0, 7)))
        result = await asyncio.wait_for(stranger, LIMIT_S)
        assert result.finish_reason is FinishReason.ABORT  # an offer that PSManager never made


async def test_a_pinned_request_waits_for_its_version(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        await made.add_replica("replica-0")
        await made.publish(0)
        with pytest.raises(Exception, match="validation"):
            await made.manager.start_validation(StartValidation(Epoch(0), Version(3)))
        trajectory = TrajectoryId((await made.offer()).prompt.group, 0, 0, Purpose.TRAIN)
        waiting = asyncio.create_task(made.generate(trajectory, pinned=Version(2)))
        await made.wait_waiting(1)
        assert (await made.view()).pinned_waiting == (2,)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_aborts_end_waiting_and_running_requests_exactly_once(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        await made.publish(0)
        (first, second) = siblings(await made.offer())
        waiting = asyncio.create_task(made.generate(first, num_tokens=4000))
        await made.wait_waiting(1)
        await made.gateway.abort_trajectories(AbortTrajectories((first,), "no longer wanted"))
        result = await asyncio.wait_for(waiting, LIMIT_S)
        assert (result.finish_reason, result.error) == (FinishReason.ABORT, "no longer wanted")

        await made.add_replica("replica-0", hold_at=5)
        running = asyncio.create_task(made.generate(second, num_tokens=4000))
        await made.wait_tokens(5)
        await made.gateway.abort_trajectories(AbortTrajectories((second, first), "enough"))
        result = await asyncio.wait_for(running, LIMIT_S)
        assert result.finish_reason is FinishReason.ABORT
        assert tokens(result) == list(range(5))


async def test_cancelled_requests_leave_no_trace(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        await made.add_replica("replica-0", max_num_seqs=4)
        await made.publish(0)
        trajectories = siblings(await made.offer())
        for round_number in range(60):
            running = [asyncio.create_task(made.generate(trajectory, num_tokens=500)) for trajectory in trajectories]
            await asyncio.sleep(0.0005 * (round_number % 7))
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        async def all_gone() -> bool:
            view = await made.view()
            return view.num_waiting == 0 and all(replica.num_running == 0 for replica in view.replicas)

        await until(all_gone)
        result = await asyncio.wait_for(made.generate(trajectories[0]), LIMIT_S)
        assert tokens(result) == list(range(8))


async def test_requests_beyond_the_limit_wait_in_the_gateway_not_in_the_engine(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        await made.add_replica("replica-0", hold_at=10, max_num_seqs=8)
        await made.publish(0)
        offers = [await made.offer() for _ in range(2 * BATCH)]
        trajectories = [trajectory for offer in offers for trajectory in siblings(offer)]
        running = [asyncio.create_task(made.generate(trajectory, num_tokens=30)) for trajectory in trajectories]

        await made.wait_tokens(8 * 10)
        view = await made.view()
        assert (view.replicas[0].num_running, view.num_waiting) == (8, 8)
        made.engines["replica-0"].hold_at = None
        results = await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)
        assert all(tokens(result) == list(range(30)) for result in results)
