"""PSManager in a real runtime: long polls, effects, log and failures. The decisions are tested in test_control.py."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from psrl.actor import Runtime, UnixAddress
from psrl.control import ControlSettings, ControlState, PSManager, TrajectoryLog
from psrl.control.memory import MemoryEffects, MemoryFeed, synthetic_prompt
from psrl.control.messages import (
    AwaitValidation,
    Batch,
    Complete,
    Consume,
    Counters,
    EndOfData,
    Fail,
    Finish,
    GetStatus,
    GroupOffer,
    NextGroup,
    NoGroup,
    NotReady,
    Publish,
    Published,
    Reserve,
    Reserved,
    StartValidation,
    TakeSnapshot,
    ValidationDone,
    WorkerLost,
)
from psrl.errors import ActorError, RemoteError
from psrl.metrics.checks import check
from psrl.metrics.run_files import read_run
from psrl.types import Epoch, FinishReason, TrajectoryId, Version, VersionSpan

E0 = Epoch(0)
SETTINGS = ControlSettings(total_steps=3, batch_size=2, rollout_n=2, staleness=1, max_failed_in_a_row=2)


@asynccontextmanager
async def running(
    directory: Path, settings: ControlSettings = SETTINGS, effects=None, state=None, listen=None, on_failure=None
):
    log = TrajectoryLog(directory)
    actor = PSManager(
        settings,
        MemoryFeed(),
        effects or MemoryEffects(),
        log,
        state,
        validation=[synthetic_prompt(i) for i in range(2)],
    )
    async with Runtime("head", listen=listen, on_failure=on_failure) as runtime:
        yield runtime.spawn("psmanager", actor)


async def publish(manager: PSManager, version: int) -> Published:
    return await manager.publish(Publish(E0, Version(version), slot=version % 3, manifest_hash="h"))


async def run_group(manager: PSManager, offer: GroupOffer, version: int, worker: str = "a") -> None:
    for index in range(offer.num_trajectories):
        trajectory = TrajectoryId(offer.prompt.group, index, offer.offer, offer.purpose)
        version_ = Version(version) if offer.pinned_version is None else offer.pinned_version
        assert isinstance(await manager.reserve(Reserve(E0, trajectory, version_, "r0")), Reserved)
        await manager.complete(
            Complete(
                epoch=E0,
                trajectory=trajectory,
                worker=worker,
                spans=(VersionSpan(version_, 2, "r0"),),
                num_prompt_tokens=1,
                num_response_tokens=2,
                finish_reason=FinishReason.STOP,
                started_s=0.0,
                ended_s=1.0,
                num_dispatches=1,
                raw_score=float(index),
                shaped_reward=float(index),
                metrics={"acc": float(index)},
            )
        )


async def work(manager: PSManager, worker: str = "a") -> None:
    """An agent loop worker whose replica is always in sync."""
    while True:
        offer = await manager.next_group(NextGroup(worker, wait_s=5.0))
        if isinstance(offer, NoGroup):
            if offer.end:
                return
            continue
        version = (await manager.get_status(GetStatus())).version
        await run_group(manager, offer, version, worker)


async def train(manager: PSManager, version: int) -> int:
    """Steps until the data ends; the version then."""
    await publish(manager, version)
    while True:
        answer = await manager.consume(Consume(E0, version))
        if isinstance(answer, EndOfData):
            return version
        if isinstance(answer, Batch):
            version += 1
            await publish(manager, version)


def agrees(directory: Path, counters: Counters) -> None:
    """The files keep the protocol's promises, and their end record has these counters."""
    run = read_run(directory)
    assert check(run).violations == ()
    assert run.ends[-1].counters == {"type": "Counters"} | msgspec.structs.asdict(counters)


async def test_a_run_from_first_weights_to_the_end(tmp_path: Path) -> None:
    effects = MemoryEffects()
    async with running(tmp_path, effects=effects) as manager, asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(manager, name)) for name in ("a", "b")]
        assert await train(manager, 0) == 3
        counters = await manager.finish(Finish(E0, "done"))
        assert await manager.finish(Finish(E0, "done")) == counters
        await asyncio.gather(*workers)
    assert counters == Counters(offered=6, trained=6)
    assert effects.committed == [(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 0)]
    assert effects.announced == [0, 1, 2, 3]
    assert sorted(effects.cleared) == sorted(("train", f"{group}_{i}") for group in range(6) for i in range(2))
    assert effects.num_ledger_changes > 0
    agrees(tmp_path, counters)


async def test_over_a_socket(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "head.sock"))
    async with running(tmp_path, listen=address), Runtime("worker") as other:
        manager = await other.connect(PSManager, "psmanager", address, timeout_s=10)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work(manager))
            assert await train(manager, 0) == 3
            counters = await manager.finish(Finish(E0, "done"))
    assert counters.trained == 6


async def test_next_group_waits_for_work(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        assert await manager.next_group(NextGroup("a", wait_s=0.01)) == NoGroup()
        poll = asyncio.create_task(manager.next_group(NextGroup("a", wait_s=10.0)))
        await asyncio.sleep(0.01)
        assert not poll.done()
        await publish(manager, 0)
        assert isinstance(await poll, GroupOffer)


async def test_parked_poll_of_a_lost_worker_takes_no_work(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        poll = asyncio.create_task(manager.next_group(NextGroup("a", wait_s=10.0)))
        await asyncio.sleep(0.01)
        await manager.worker_lost(WorkerLost("a", "killed"))
        assert await poll == NoGroup()
        await publish(manager, 0)
        offer = await manager.next_group(NextGroup("a", wait_s=10.0))
        assert isinstance(offer, GroupOffer)
        assert (offer.prompt.group, offer.offer) == (0, 0)


async def test_lost_workers_groups_go_to_another(tmp_path: Path) -> None:
    effects = MemoryEffects()
    async with running(tmp_path, effects=effects) as manager:
        await publish(manager, 0)
        assert isinstance(await manager.next_group(NextGroup("a")), GroupOffer)
        await manager.worker_lost(WorkerLost("a", "killed"))
        offer = await manager.next_group(NextGroup("b"))
        assert isinstance(offer, GroupOffer)
        assert (offer.prompt.group, offer.offer) == (0, 1)
        await manager.finish(Finish(E0, "stop"))
    assert [(t.group, t.index, t.offer) for t in effects.aborted] == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]


async def test_not_ready_says_who_is_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        answer = await manager.consume(Consume(E0, 0, wait_s=0.01))
        assert isinstance(answer, NotReady)
        assert "first weights" in answer.waiting_for
        await publish(manager, 0)
        await manager.next_group(NextGroup("agent-0"))
        answer = await manager.consume(Consume(E0, 0, wait_s=0.01))
        assert isinstance(answer, NotReady)
        assert "agent-0 runs 1" in answer.waiting_for


async def test_repeated_publish_commits_once(tmp_path: Path) -> None:
    effects = MemoryEffects()
    async with running(tmp_path, effects=effects) as manager:
        answers = await asyncio.gather(publish(manager, 0), publish(manager, 0))
        assert answers == [Published(Version(0))] * 2
        assert len(effects.committed) == 1


async def test_failed_commit_publishes_nothing(tmp_path: Path) -> None:
    class Failing(MemoryEffects):
        async def commit_weights(self, message):
            if not self.committed:
                self.committed.append((message.epoch, message.version, message.slot))
                raise RuntimeError("slot 0 is torn")

    async with running(tmp_path, effects=Failing()) as manager:
        with pytest.raises(RemoteError, match="slot 0 is torn"):
            await publish(manager, 0)
        assert await manager.next_group(NextGroup("a", wait_s=0.01)) == NoGroup()
        await publish(manager, 0)
        assert isinstance(await manager.next_group(NextGroup("a", wait_s=0.01)), GroupOffer)


async def test_message_of_another_epoch_is_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        with pytest.raises(RemoteError) as raised:
            await manager.consume(Consume(Epoch(1), 0))
        assert raised.value.error == "StaleMessage"


async def test_validation(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        await publish(manager, 0)
        await manager.start_validation(StartValidation(E0, Version(0)))
        answer = await manager.await_validation(AwaitValidation(E0, Version(0), wait_s=0.01))
        assert isinstance(answer, NotReady)
        for _ in range(2):
            offer = await manager.next_group(NextGroup("a"))
            assert isinstance(offer, GroupOffer)
            await run_group(manager, offer, 0)
        done = await manager.await_validation(AwaitValidation(E0, Version(0)))
        assert isinstance(done, ValidationDone)
        assert len(done.samples) == 2


async def test_broken_reward_reaches_the_trainer_that_waits(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        await publish(manager, 0)
        waiting = asyncio.create_task(manager.consume(Consume(E0, 0)))
        for _ in range(2):
            offer = await manager.next_group(NextGroup("a"))
            assert isinstance(offer, GroupOffer)
            await manager.fail(Fail(E0, TrajectoryId(offer.prompt.group, 0), "a", "reward raised KeyError"))
        with pytest.raises(RemoteError, match="reward raised KeyError") as raised:
            await waiting
        assert raised.value.error == "RunFailed"


async def test_log_that_cannot_be_written_ends_the_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").symlink_to("/dev/full")
    async with running(tmp_path) as manager:
        await publish(manager, 0)
        offer = await manager.next_group(NextGroup("a"))
        assert isinstance(offer, GroupOffer)
        waiting = asyncio.create_task(manager.consume(Consume(E0, 0)))
        await asyncio.sleep(0)
        with pytest.raises(RemoteError, match="No space left"):
            await manager.fail(Fail(E0, TrajectoryId(offer.prompt.group, 0), "a", "x"))
        with pytest.raises(RemoteError, match="No space left"):
            await waiting


async def test_error_in_an_effect_ends_the_actor(tmp_path: Path) -> None:
    class Failing(MemoryEffects):
        async def version_published(self, epoch, version, slot):
            raise RuntimeError("the coordinator is gone")

    failures = []
    async with running(tmp_path, effects=Failing(), on_failure=failures.append) as manager:
        await publish(manager, 0)
        with pytest.raises(ActorError):
            await manager.consume(Consume(E0, 0))
    assert "coordinator is gone" in str(failures[0].error)


async def test_status(tmp_path: Path) -> None:
    async with running(tmp_path) as manager:
        await publish(manager, 0)
        offer = await manager.next_group(NextGroup("a"))
        assert isinstance(offer, GroupOffer)
        await run_group(manager, offer, 0)
        status = await manager.get_status(GetStatus())
    assert (status.version, status.counters.in_flight, status.finished) == (0, 1, False)
    assert status.buffers == {0: "PENDING 1/2", 1: "PENDING 0/2"}
    assert status.last_progress_s > 0


async def test_killed_run_resumes_with_the_same_prompts_and_counters_add_up(tmp_path: Path) -> None:
    async with running(tmp_path) as manager, asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(work(manager))
        await publish(manager, 0)
        for version in (0, 1):
            assert isinstance(await manager.consume(Consume(E0, version)), Batch)
            await publish(manager, version + 1)
            if version == 0:
                state = ControlState.decode((await manager.take_snapshot(TakeSnapshot(E0, Version(1)))).state)
        worker.cancel()  # the run ends here without Finish: killed
    resumed = ControlSettings(total_steps=3, batch_size=2, rollout_n=2, staleness=1, initial_version=Version(1))
    async with running(tmp_path, settings=resumed, state=state) as manager, asyncio.TaskGroup() as tasks:
        tasks.create_task(work(manager))
        assert await train(manager, 1) == 3
        counters = await manager.finish(Finish(E0, "done"))
    assert (counters.trained, counters.rolled_back, counters.in_flight) == (6, 2, 0)
    agrees(tmp_path, counters)
