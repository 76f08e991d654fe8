"""Rows in, rows out, in one process; every claim of the API that needs no second one."""

import asyncio
import gc
import warnings

import numpy as np
import pytest
import torch
from queue_house import EXTENT, house, plan, sockets

from psrl.actor import BlockingRuntime, Runtime, UnixAddress
from psrl.errors import ArenaFull, NotReady, RemoteError, Revoked, StorageError, UnknownKey
from psrl.transfer import BlockingTransferQueue, QueueController, StorageActor, TransferQueue
from psrl.transfer.messages import RegisterClient, ReleaseClient
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource


def same(array: np.ndarray, other: np.ndarray) -> bool:
    return array.dtype == other.dtype and array.shape == other.shape and np.array_equal(array, other)


async def test_every_kind_of_value_comes_back_as_it_was() -> None:
    values = {
        "ints": np.arange(7, dtype=np.int32),
        "matrix": np.arange(12.0).reshape(3, 4),
        "transposed": np.arange(12.0).reshape(3, 4).T,
        "strided": np.arange(20)[::3],
        "empty": np.zeros((0, 5), np.float16),
        "scalar": np.array(2.5, np.float32),
        "numpy_scalar": np.float64(0.5),
        "flags": np.array([True, False]),
        "complex": np.array([1 + 2j]),
        "text": np.array(["ab", "äöü"]),
        "big_endian": np.arange(3, dtype=">i4"),
    }
    async with house() as at:
        await at.queue.kv_put("k", "train", {**values, "bytes": b"raw \x00 bytes"})
        (row,) = await at.queue.kv_batch_get(["k"], "train")
        for name, value in values.items():
            assert same(row[name], np.asarray(value)), name
        assert row["bytes"].tobytes() == b"raw \x00 bytes"
        assert row["bytes"].dtype == np.uint8


@pytest.mark.parametrize(
    ("value", "error"),
    [(np.array([object()]), StorageError), (np.zeros(2, [("a", "i4")]), StorageError), ([1, 2], TypeError)],
)
async def test_what_cannot_be_shared_is_refused_by_name(value: object, error: type[Exception]) -> None:
    async with house() as at:
        with pytest.raises(error):
            await at.queue.kv_put("k", "train", {"field": value})  # type: ignore[dict-item]
        assert await at.queue.kv_list() == {}


async def test_views_are_read_only_and_no_copies() -> None:
    async with house(extent_bytes=1 << 20) as at:
        await at.queue.kv_put("k", "train", {"x": np.zeros(100_000)})
        (one,) = await at.queue.kv_batch_get(["k"], "train")
        (two,) = await at.queue.kv_batch_get(["k"], "train")
        assert one["x"].ctypes.data == two["x"].ctypes.data
        assert one["x"].ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            one["x"][0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            one["x"].setflags(write=True)


async def test_torch_sees_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    async with house() as at:
        await at.queue.kv_put("k", "train", {"x": np.arange(5, dtype=np.float32)})
        (row,) = await at.queue.kv_batch_get(["k"], "train")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so
            tensor = torch.from_numpy(row["x"])
        assert tensor.data_ptr() == row["x"].ctypes.data
        del row
        assert tensor.tolist() == [0, 1, 2, 3, 4]


async def test_fields_arrive_at_different_times_and_replace_each_other() -> None:
    async with house() as at:
        meta = await at.queue.kv_put("k", "train", {"x": np.arange(3), "y": np.arange(2)}, {"uid": "k"})
        assert (meta.keys, meta.tags, meta.fields) == (["k"], [{"uid": "k"}], ["x", "y"])
        await at.queue.kv_put("k", "train", {"score": np.float32(1)})
        await at.queue.kv_put("k", "train", {"x": np.arange(9)})
        (row,) = await at.queue.kv_batch_get(["k"], "train")
        assert {name: value.size for name, value in row.items()} == {"x": 9, "y": 2, "score": 1}
        assert await at.queue.kv_list() == {"train": {"k": {"uid": "k"}}}
        await at.queue.kv_put("k", "train", tag={"version": 3})
        assert await at.queue.kv_list("train") == {"train": {"k": {"version": 3}}}
        (row,) = await at.queue.kv_batch_get_by_meta(meta)
        assert list(row) == ["x", "y"]
        with pytest.raises(ValueError, match="needs fields or a tag"):
            await at.queue.kv_put("k", "train")


async def test_a_get_never_returns_less_than_asked_for() -> None:
    async with house() as at:
        await at.queue.kv_batch_put(["a", "b"], "train", [{"x": np.arange(1)}, {"y": np.arange(1)}])
        for keys, fields in ((["a", "zz"], None), (["a", "b"], ["x"]), (["a"], ["x", "q"])):
            with pytest.raises(UnknownKey):
                await at.queue.kv_batch_get(keys, "train", fields)
        with pytest.raises(UnknownKey, match="no partition 'val'"):
            await at.queue.kv_batch_get(["a"], "val")
        rows = await at.queue.kv_batch_get(["b", "a", "b"], "train")
        assert [list(row) for row in rows] == [["y"], ["x"], ["y"]]


async def test_partitions_share_nothing() -> None:
    async with house() as at:
        for partition, value in (("train", 1), ("val", 2)):
            await at.queue.kv_put("k", partition, {"x": np.array(value)}, {"p": partition})
        assert await at.queue.kv_clear(["k"], "train") == 1
        (row,) = await at.queue.kv_batch_get(["k"], "val")
        assert row["x"] == 2
        assert await at.queue.kv_list() == {"val": {"k": {"p": "val"}}}
        with pytest.raises(UnknownKey):
            await at.queue.kv_batch_get(["k"], "train")


async def test_clear_is_idempotent_and_gives_every_byte_back() -> None:
    async with house() as at:
        before = (await at.usage()).free_bytes
        for _ in range(3):
            keys = [str(i) for i in range(100)]
            await at.queue.kv_batch_put(keys, "train", [{"x": np.zeros(i * 10)} for i in range(100)])
            await at.queue.kv_batch_put(keys[:50], "train", [{"late": np.zeros(5)} for _ in range(50)])
            assert await at.queue.kv_clear([*keys[:10], "never was"], "train") == 10
            assert await at.queue.kv_clear(keys, "train") == 90
            assert await at.queue.kv_clear(keys, "train") == 0
        at.queue.close()
        assert (await at.usage()).free_bytes == before


async def test_cleared_rows_stay_valid_for_who_looks_at_them() -> None:
    async with house(num_extents=2) as at:
        await at.queue.kv_put("old", "train", {"x": np.full(1000, 7)})
        (row,) = await at.queue.kv_batch_get(["old"], "train")
        await at.queue.kv_clear(["old"], "train")
        writer = await at.connect("other", put_timeout_s=0.2)
        new = [{"x": np.full(1000, i)} for i in range(20)]
        with pytest.raises(ArenaFull):
            await writer.kv_batch_put([f"new-{i}" for i in range(20)], "train", new)
        assert (row["x"] == 7).all()
        part = row["x"][10:20]
        del row
        gc.collect()
        assert (part == 7).all()  # a view of the view holds the lease too


async def test_a_full_arena_makes_a_put_wait_then_says_what_is_missing() -> None:
    async with house(num_extents=2) as at:
        queue = await at.connect("writer", put_timeout_s=0.2)
        await queue.kv_batch_put(["a", "b"], "train", [{"x": np.zeros(EXTENT // 10)}] * 2)
        with pytest.raises(ArenaFull, match=r"no room for 13\d\d\d bytes .* 0 of 32768 .*transfer_queue.arena_bytes"):
            await queue.kv_put("c", "train", {"x": np.zeros(EXTENT // 10)})
        assert set((await queue.kv_list())["train"]) == {"a", "b"}
        patient = await at.connect("patient")
        waiting = asyncio.create_task(patient.kv_put("c", "train", {"x": np.zeros(EXTENT // 10)}))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await queue.kv_clear(["a"], "train")
        await waiting
        assert set((await queue.kv_list())["train"]) == {"b", "c"}


async def test_a_row_that_can_never_fit_is_refused_at_once() -> None:
    async with house(num_extents=4) as at:
        with pytest.raises(ArenaFull, match="no room ever for 80192 bytes"):
            await at.queue.kv_put("k", "train", {"x": np.zeros(10_000)})


async def test_rows_larger_than_an_extent_get_several() -> None:
    async with house(num_extents=16) as at:
        before = (await at.usage()).free_bytes
        large = np.arange(8_000)  # 64,000 bytes: four extents
        await at.queue.kv_batch_put(["s", "l", "t"], "train", [{"x": large[:5]}, {"x": large}, {"x": large[:6]}])
        rows = await at.queue.kv_batch_get(["s", "l", "t"], "train")
        assert [row["x"].size for row in rows] == [5, 8_000, 6]
        assert np.array_equal(rows[1]["x"], large)
        del rows
        await at.queue.kv_clear(["s", "l", "t"], "train")
        at.queue.close()
        assert (await at.usage()).free_bytes == before


async def test_a_batch_is_put_whole_or_not_at_all() -> None:
    async with house(num_extents=3) as at:
        queue = await at.connect("writer", put_timeout_s=0.1)
        before = (await at.usage()).free_bytes
        with pytest.raises(ArenaFull):
            await queue.kv_batch_put(list("abcd"), "train", [{"x": np.zeros(EXTENT // 10)}] * 4)
        assert await queue.kv_list() == {}
        queue.close()
        assert (await at.usage()).free_bytes == before


async def test_many_writers_and_readers_at_once_lose_nothing() -> None:
    async with house(num_extents=128) as at:
        clients = [await at.connect(f"c{i}") for i in range(8)]

        async def work(client: TransferQueue, number: int) -> None:
            for i in range(50):
                key = f"{number}-{i}"
                await client.kv_put(key, "train", {"x": np.full(i, number)}, {"i": i})
                await client.kv_put(key, "train", {"late": np.full(3, i)})
                (row,) = await clients[(number + 1) % 8].kv_batch_get([key], "train")
                assert (row["x"] == number).all()
                assert (row["late"] == i).all()

        await asyncio.gather(*(work(client, number) for number, client in enumerate(clients)))
        assert len((await at.queue.kv_list())["train"]) == 400


async def test_a_name_taken_again_takes_over_and_the_old_one_is_told() -> None:
    async with house() as at:
        first = await at.connect("worker")
        await first.kv_put("a", "train", {"x": np.arange(3)})
        second = await at.connect("worker")
        with pytest.raises(Revoked, match="counts as dead"):
            await first.kv_put("b", "train", {"x": np.arange(3)})
        with pytest.raises(Revoked):
            await first.kv_batch_get(["a"], "train")
        await second.kv_put("b", "train", {"x": np.arange(3)})
        assert set((await second.kv_list())["train"]) == {"a", "b"}


async def test_release_is_idempotent_and_knows_nobody_it_has_not_met() -> None:
    async with house() as at:
        client = await at.connect("worker")
        await client.kv_put("a", "train", {"x": np.arange(3)})
        released = await at.controller.release_client(ReleaseClient("worker"))
        assert released.client is not None
        assert (await at.controller.release_client(ReleaseClient("worker"))).client is None
        assert (await at.controller.release_client(ReleaseClient("stranger"))).client is None
        assert set((await at.queue.kv_list())["train"]) == {"a"}


async def test_clients_have_a_limit_that_is_named() -> None:
    async with house() as at:
        for i in range(15):
            await at.storage.register_client(RegisterClient(f"c{i}"))
        with pytest.raises(RemoteError, match="has its 16 clients already"):
            await at.storage.register_client(RegisterClient("one more"))


async def test_new_actors_on_the_same_segment_find_every_row() -> None:
    async with house() as at:
        await at.queue.kv_batch_put(
            ["a", "b"], "train", [{"x": np.arange(3)}, {"x": np.arange(4)}], [{"n": 1}, {"n": 2}]
        )
        await at.queue.kv_put("a", "train", {"x": np.arange(9)})
        await at.queue.kv_put("a", "train", {"late": np.arange(2)}, {"n": 3})
        await at.queue.kv_put("gone", "train", {"x": np.arange(3)})
        await at.queue.kv_clear(["gone"], "train")
        listed = await at.queue.kv_list()
        async with Runtime("again") as runtime:
            source = SegmentSource(at.node.socket_path)
            storage = runtime.spawn("storage", StorageActor(source.fetch(QUEUE)))
            controller = runtime.spawn("controller", QueueController(storage))
            again = await TransferQueue.connect(runtime, controller, storage, source, client="again")
            assert await again.kv_list() == listed
            rows = await again.kv_batch_get(["a", "b"], "train")
            assert [{name: value.size for name, value in row.items()} for row in rows] == [
                {"x": 9, "late": 2},
                {"x": 4},
            ]


async def test_storage_needs_a_segment_that_is_laid_out() -> None:
    with sockets() as (path, _), NodeSegments(path) as node:
        node.create_weights(1 << 16, "plain")
        with pytest.raises(StorageError, match="segment plain holds no queue"):
            StorageActor(node.fetch("plain"))
        with pytest.raises(UnknownKey, match="no segment named queue; there are: plain"):
            SegmentSource(path).fetch("queue")


def test_blocking_twin_does_the_same() -> None:
    with sockets() as (node_path, head_path), NodeSegments(node_path) as node:
        node.create_queue(plan(16))

        async def start(runtime: Runtime) -> TransferQueue:
            source = SegmentSource(node_path)
            storage = runtime.spawn("storage", StorageActor(source.fetch(QUEUE)))
            controller = runtime.spawn("controller", QueueController(storage))
            return await TransferQueue.connect(runtime, controller, storage, source, client="trainer")

        with BlockingRuntime("trainer", listen=UnixAddress(head_path)) as blocking:
            queue = BlockingTransferQueue(blocking.call(start(blocking.runtime), 60), blocking)
            meta = queue.kv_batch_put(["a", "b"], "train", [{"x": np.arange(2)}] * 2, [{"i": 0}, {"i": 1}])
            queue.kv_put("a", "train", {"y": np.array(1)})
            assert [list(row) for row in queue.kv_batch_get(["a", "b"], "train")] == [["x", "y"], ["x"]]
            assert [list(row) for row in queue.kv_batch_get_by_meta(meta)] == [["x"], ["x"]]
            assert queue.kv_list("train") == {"train": {"a": {"i": 0}, "b": {"i": 1}}}
            packed = queue.kv_batch_get(["a", "b"], "train", ["x"], layout="jagged")
            assert packed["x"].lengths().tolist() == [2, 2]
            assert queue.kv_batch_get_by_meta(meta, layout="jagged")["x"].values.tolist() == [0, 1, 0, 1]
            drawn = queue.get_meta(["x"], 2, "train", task_name="t", timeout_s=1)
            assert drawn.keys == ["a", "b"]
            with pytest.raises(NotReady):
                queue.get_meta(["x"], 1, "train", task_name="t", timeout_s=0.01)
            assert queue.get_consumption_status("t", "train") == {"a": True, "b": True}
            assert queue.check_consumption_status("t", "train")
            assert queue.get_production_status(["y"], "train") == {"a": True, "b": False}
            assert queue.check_production_status(["x"], "train")
            assert queue.reset_consumption("train", "t") == 2
            assert queue.kv_clear(["a"], "train") == 1
            with pytest.raises(UnknownKey):
                queue.kv_batch_get(["a"], "train")
            assert queue.clear_partition("train") == 1
            queue.close()


async def test_what_cannot_be_meant_is_refused_before_anything_is_written() -> None:
    async with house() as at:
        row = {"x": np.arange(3)}
        with pytest.raises(ValueError, match="each key once"):
            await at.queue.kv_batch_put(["a", "a"], "p", [row, row])
        with pytest.raises(TypeError, match="one dict for each key"):
            await at.queue.kv_batch_put(["a"], "p", row)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="keys is a list of strings, not 'ab'"):
            await at.queue.kv_batch_put("ab", "p", [row, row])
        assert await at.queue.kv_list() == {}
        await at.queue.kv_batch_put(["a", "b"], "p", [row, row])
        with pytest.raises(TypeError, match="keys"):
            await at.queue.kv_clear("ab", "p")
        with pytest.raises(TypeError, match="select_fields"):
            await at.queue.kv_batch_get(["a"], "p", "x")
        with pytest.raises(TypeError, match="data_fields"):
            await at.queue.get_meta("x", 1, "p", task_name="t")
        assert list((await at.queue.kv_list())["p"]) == ["a", "b"]


async def test_values_that_cannot_be_stored_are_named() -> None:
    async with house() as at:
        with pytest.raises(TypeError, match=r"field x is a torch\.bfloat16 tensor on cpu"):
            await at.queue.kv_put("a", "p", {"x": torch.zeros(3, dtype=torch.bfloat16)})
        with pytest.raises(TypeError, match="key 'a': its tag"):
            await at.queue.kv_put("a", "p", tag={"score": np.float32(1)})
        assert await at.queue.kv_list() == {}
