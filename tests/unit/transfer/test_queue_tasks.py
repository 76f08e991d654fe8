"""Batches for tasks, through the whole queue."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest
from queue_house import House, house, sockets

from psrl.actor import Runtime, UnixAddress
from psrl.errors import NotReady, StorageError, UnknownKey
from psrl.transfer import (
    GRPOGroupNSampler,
    QueueController,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    StalenessBufferSampler,
    StorageActor,
    TransferQueue,
)
from psrl.transfer.messages import FreeRecords, WriteNote
from psrl.transfer.samplers import Candidate
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource


async def fill(queue: TransferQueue, number: int, partition: str = "train", start: int = 0) -> list[str]:
    keys = [str(i) for i in range(start, start + number)]
    await queue.kv_batch_put(
        keys, partition, [{"x": np.arange(int(key))} for key in keys], [{"n": int(k)} for k in keys]
    )
    return keys


async def test_each_row_is_drawn_once_by_each_task() -> None:
    async with house() as at:
        keys = await fill(at.queue, 6)
        first = await at.queue.get_meta(["x"], 4, "train", task_name="update")
        assert (first.keys, first.fields, first.partition_id) == (keys[:4], ["x"], "train")
        assert first.tags == [{"n": i} for i in range(4)]
        second = await at.queue.get_meta(["x"], 2, "train", task_name="update")
        assert second.keys == keys[4:]
        assert (await at.queue.get_meta(["x"], 6, "train", task_name="score")).keys == keys
        with pytest.raises(NotReady, match=r"'update' asked for 1 rows of partition 'train' .* 0 of its 6 rows"):
            await at.queue.get_meta(["x"], 1, "train", task_name="update")
        with pytest.raises(NotReady, match=r"0 of its 0 rows were ready after 0.05 s"):
            await at.queue.get_meta(["x"], 1, "val", task_name="update", timeout_s=0.05)
        (row, *_) = await at.queue.kv_batch_get_by_meta(second)
        assert row["x"].size == 4


async def test_a_draw_waits_for_the_last_field_of_the_last_row() -> None:
    async with house() as at:
        other = await at.connect("other")
        waiting = asyncio.create_task(at.queue.get_meta(["x", "score"], 3, "train", task_name="t", timeout_s=20))
        await fill(other, 3)
        for key in "012":
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await other.kv_put(key, "train", {"score": np.float32(1)})
        started = time.perf_counter()
        assert (await waiting).keys == ["0", "1", "2"]
        assert time.perf_counter() - started < 1


async def test_a_get_waits_for_what_is_not_there_yet() -> None:
    async with house() as at:
        other = await at.connect("other")
        waiting = asyncio.create_task(at.queue.kv_batch_get(["0", "1"], "train", ["x", "late"], timeout_s=20))
        await fill(other, 2)
        await other.kv_put("1", "train", {"late": np.arange(2)})
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await other.kv_put("0", "train", {"late": np.arange(1)})
        assert [row["late"].size for row in await waiting] == [1, 2]
        with pytest.raises(UnknownKey, match="no key 'never'"):
            await at.queue.kv_batch_get(["0", "never"], "train", timeout_s=0.05)


async def test_many_consumers_share_rows_out_and_none_starves() -> None:
    async with house(num_extents=128) as at:
        clients = [await at.connect(f"c{i}") for i in range(6)]
        drawn: list[str] = []

        async def consume(client: TransferQueue) -> None:
            for _ in range(10):
                meta = await client.get_meta(["x"], 2, "train", task_name="t", timeout_s=30)
                drawn.extend(meta.keys)
                await client.kv_clear(meta.keys, "train")

        async def produce(client: TransferQueue, start: int) -> None:
            for i in range(start, start + 40):
                await client.kv_put(str(i), "train", {"x": np.arange(i % 50)})

        await asyncio.gather(
            *(consume(client) for client in clients[:4]), produce(clients[4], 0), produce(clients[5], 40)
        )
        assert sorted(map(int, drawn)) == list(range(80))
        assert await at.queue.kv_list() == {}


async def test_consumers_that_give_up_take_nothing_along() -> None:
    """Field fault 36: cancelled at any point, all rows are there for others."""
    async with house() as at:
        await fill(at.queue, 4)
        for i in range(40):
            ask = asyncio.create_task(at.queue.get_meta(["x"], 4 + i % 2, "train", task_name="t", timeout_s=5))
            for _ in range(i // 4):
                await asyncio.sleep(0)
            ask.cancel()
            try:
                meta = await ask
            except asyncio.CancelledError:
                continue
            assert await at.queue.reset_consumption("train", "t", meta.keys) == 4
        assert len(await at.queue.get_meta(["x"], 4, "train", task_name="t")) == 4


async def test_a_consumer_that_dies_waiting_is_given_nothing() -> None:
    async with house() as at:
        peer = await asyncio.to_thread(at.peer, "waiter", "draw", "2")
        await asyncio.sleep(0.3)
        peer.kill()
        await asyncio.sleep(0.2)
        await fill(at.queue, 2)
        assert len(await at.queue.get_meta(["x"], 2, "train", task_name="t")) == 2


async def test_status_of_production_and_consumption() -> None:
    async with house() as at:
        await fill(at.queue, 3)
        await at.queue.kv_put("1", "train", {"score": np.float32(1)})
        assert await at.queue.get_production_status(["x", "score"], "train") == {"0": False, "1": True, "2": False}
        assert await at.queue.check_production_status(["x"], "train")
        assert not await at.queue.check_production_status(["x", "score"], "train")
        assert not await at.queue.check_production_status(["x"], "val")
        await at.queue.get_meta(["score"], 1, "train", task_name="t")
        assert await at.queue.get_consumption_status("t", "train") == {"0": False, "1": True, "2": False}
        assert not await at.queue.check_consumption_status("t", "train")
        unconsumed = await at.queue.get_meta(["x", "score"], None, "train", mode="force_fetch", task_name="t")
        assert unconsumed.keys == ["0", "2"]
        await at.queue.get_meta(["x"], 2, "train", task_name="t")
        assert await at.queue.check_consumption_status("t", "train")
        assert await at.queue.reset_consumption("train", "t", ["1", "2", "zz"]) == 2
        assert (await at.queue.get_meta(["x"], 2, "train", task_name="t")).keys == ["1", "2"]
        assert await at.queue.reset_consumption("train") == 3
        assert await at.queue.reset_consumption("train") == 0


async def test_inserted_rows_get_their_fields_later() -> None:
    async with house() as at:
        await at.queue.kv_put("1", "train", {"x": np.arange(3)})
        meta = await at.queue.get_meta(["x"], 3, "train", mode="insert")
        assert meta.keys == ["2", "3", "4"]  # "1" is taken; numbers count on
        assert set((await at.queue.kv_list())["train"]) == {"1", "2", "3", "4"}
        with pytest.raises(UnknownKey, match=r"key '2' .* has no field 'x' yet"):
            await at.queue.kv_batch_get_by_meta(meta)
        await at.queue.kv_batch_put(meta.keys, "train", [{"x": np.arange(i)} for i in range(3)])
        assert len(await at.queue.get_meta(["x"], 4, "train", task_name="t")) == 4


async def test_clearing_a_partition_forgets_rows_and_tasks_alike() -> None:
    async with house() as at:
        before = (await at.usage()).free_bytes
        for _ in range(3):
            await fill(at.queue, 4)
            await fill(at.queue, 2, "val")
            await at.queue.get_meta(["x"], 4, "train", task_name="t", sampler=RankAwareSampler(0, 0))
            assert await at.queue.clear_partition("train") == 4
            assert await at.queue.clear_partition("train") == 0
            assert set(await at.queue.kv_list()) == {"val"}
        await at.queue.clear_partition("val")
        at.queue.close()
        usage = await at.usage()
        assert before - usage.free_bytes <= usage.open_bytes == 16 * 1024  # one extent, open for notes


async def test_rows_of_one_name_in_two_partitions_are_strangers() -> None:
    """Field fault 60."""
    async with house() as at:
        await fill(at.queue, 2, "train")
        await at.queue.get_meta(["x"], 2, "train", task_name="t")
        await at.queue.kv_clear(["0", "1"], "train")
        await fill(at.queue, 2, "val")
        assert await at.queue.get_production_status(["x"], "train") == {}
        assert (await at.queue.get_meta(["x"], 2, "val", task_name="t")).keys == ["0", "1"]
        with pytest.raises(NotReady):
            await at.queue.get_meta(["x"], 1, "train", task_name="t")


async def test_every_sampler_through_the_queue() -> None:
    async with house() as at:
        tags = [{"version_tag": i // 4, "parent_id": i // 2, "total_lengths": 10 * i} for i in range(8)]
        await at.queue.kv_batch_put([str(i) for i in range(8)], "train", [{"x": np.arange(3)}] * 8, tags)

        async def draw(task: str, size: int, sampler: object) -> list[str]:
            return (await at.queue.get_meta(["x"], size, "train", task_name=task, sampler=sampler)).keys  # type: ignore[arg-type]

        assert await draw("a", 3, SequentialSampler()) == ["0", "1", "2"]
        assert await draw("a", 4, GRPOGroupNSampler(2, "parent_id")) == ["4", "5", "6", "7"]
        assert await draw("b", 2, StalenessBufferSampler(2, 1)) == ["4", "5"]
        assert await draw("c", 2, RankAwareSampler(3, 0)) == await draw("c", 2, RankAwareSampler(3, 0)) == ["0", "1"]
        shares = [await draw("d", 4, SeqlenBalancedSampler(2, rank, 0, n=2)) for rank in (1, 0)]
        assert sorted(map(int, shares[0] + shares[1])) == list(range(8))
        assert {sum(map(int, share)) for share in shares} == {14}
        with pytest.raises(ValueError, match="3 rows is not made of groups of 2"):
            await draw("e", 3, GRPOGroupNSampler(2))
        with pytest.raises(UnknownKey, match="no sampler 'mine'; the controller was given none"):
            await draw("e", 3, "mine")
        await at.queue.kv_put("9", "train", {"x": np.arange(1)})
        with pytest.raises(StorageError, match="key '9': its tag has no integer"):
            await draw("b", 3, StalenessBufferSampler(2, 1))


async def test_a_sampler_of_ones_own() -> None:
    class Longest(SequentialSampler, frozen=True):
        def sample(self, ready: Sequence[Candidate], batch_size: int) -> tuple[list[str], list[str]]:
            best = sorted(ready, key=lambda row: -row.number("n"))[:batch_size]
            return [row.key for row in best], [row.key for row in ready]

    with sockets() as (node_path, head_path), NodeSegments(node_path) as node:
        from queue_house import plan

        node.create_queue(plan(32))
        async with Runtime("head", listen=UnixAddress(head_path)) as runtime:
            source = SegmentSource(node_path)
            storage = runtime.spawn("storage", StorageActor(source.fetch(QUEUE)))
            controller = runtime.spawn("controller", QueueController(storage, samplers={"longest": Longest()}))
            queue = await TransferQueue.connect(runtime, controller, storage, source, client="c")
            await fill(queue, 5)
            meta = await queue.get_meta(["x"], 2, "train", task_name="t", sampler="longest")
            assert meta.keys == ["4", "3"]
            assert await queue.check_consumption_status("t", "train")  # those left out are consumed too


async def test_a_restarted_controller_knows_what_was_drawn() -> None:
    async with house() as at:
        await fill(at.queue, 6)
        await at.queue.get_meta(["x"], 2, "train", task_name="t")
        shared = await at.queue.get_meta(["x"], 2, "train", task_name="t", sampler=RankAwareSampler(0, 7))
        await at.queue.get_meta(["x"], 4, "train", task_name="other")
        await at.queue.reset_consumption("train", "other", ["1", "2"])
        async with Runtime("again") as runtime:
            again = await restart(at, runtime)
            for task in ("t", "other"):
                status = await at.queue.get_consumption_status(task, "train")
                assert await again.get_consumption_status(task, "train") == status
            meta = await again.get_meta(["x"], 2, "train", task_name="t", sampler=RankAwareSampler(0, 7))
            assert meta == shared
            assert (await again.get_meta(["x"], 2, "train", task_name="t")).keys == ["4", "5"]


async def test_a_note_whose_answer_was_lost_is_written_once() -> None:
    """Storage was killed after it had written: the controller asks its successor for the same note."""
    async with house() as at:
        note, other = WriteNote("t/1", b"first"), WriteNote("t/1", b"second")
        written = await at.storage.write_note(note)
        assert written.record is not None
        async with Runtime("again") as runtime:
            again = runtime.spawn("storage", StorageActor(SegmentSource(at.node.socket_path).fetch(QUEUE)))
            assert await again.write_note(note) == written
            assert (await again.write_note(other)).record not in (None, written.record)
            await again.free_records(FreeRecords((written.record,)))

            # One that was freed is not there any more, and is written like any other.
            third = runtime.spawn("third", StorageActor(SegmentSource(at.node.socket_path).fetch(QUEUE)))
            assert (await third.write_note(note)).record not in (None, written.record)


async def restart(at: House, runtime: Runtime) -> TransferQueue:
    """New actors on the same segment; the old ones must not be used to change anything any more."""
    source = SegmentSource(at.node.socket_path)
    storage = runtime.spawn("storage", StorageActor(source.fetch(QUEUE)))
    controller = runtime.spawn("controller", QueueController(storage))
    return await TransferQueue.connect(runtime, controller, storage, source, client="again")


async def test_bad_questions_are_refused_at_once() -> None:
    async with house() as at:
        for arguments, text in (
            (((["x"], 2, "train"), {}), "name of the task"),
            (((["x"], 0, "train"), {"task_name": "t"}), "batch_size 0"),
            (((["x"], None, "train"), {"mode": "insert"}), "batch_size"),
            (((["x"], 2, "train"), {"mode": "peek", "task_name": "t"}), "peek"),
        ):
            with pytest.raises(ValueError, match=text):
                await at.queue.get_meta(*arguments[0], **arguments[1])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="layout is rows or jagged"):
            await at.queue.kv_batch_get(["a"], "train", layout="columns")  # type: ignore[call-overload]
