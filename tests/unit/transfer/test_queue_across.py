"""Rows of other nodes: real processes, TCP alone between them."""

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from queue_far import HOST, SECRET, Node, row_of

import psrl
from psrl.actor import Runtime, TcpAddress, Token
from psrl.errors import LinkError, UnknownKey
from psrl.transfer import QueueController, TransferQueue
from psrl.transfer.landing import Landing
from psrl.transfer.messages import GetUsage, LeaveNode

FAR = Path(__file__).with_name("queue_far.py")


class Far:
    """The process of another node."""

    def __init__(self, port: int, number: int, num_rows: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
        command = [sys.executable, str(FAR), str(port), str(number), str(num_rows)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=20)


class Cluster:
    def __init__(self, node: Node, controller: QueueController, queue: TransferQueue) -> None:
        self.node, self.controller, self.queue = node, controller, queue
        self.far: list[Far] = []

    async def start(self, number: int, num_rows: int) -> Far:
        assert isinstance(self.node.runtime.address, TcpAddress)
        far = await asyncio.to_thread(Far, self.node.runtime.address.port, number, num_rows)
        self.far.append(far)
        return far


@asynccontextmanager
async def cluster(**options: float) -> AsyncIterator[Cluster]:
    """Node 0, with the controller, is this process; others come as started."""
    with tempfile.TemporaryDirectory(prefix="psrl") as directory:
        async with Runtime("node0", listen=TcpAddress(HOST, 0), token=Token(SECRET)) as runtime:
            node = Node(runtime, 0, directory)
            controller = runtime.spawn("controller", QueueController(node.storage))
            at = Cluster(node, controller, await node.connect(controller, "here", **options))
            try:
                yield at
            finally:
                for far in at.far:
                    far.kill()
                await node.close()


def check(row: dict[str, np.ndarray], number: int) -> None:
    want = row_of(number)
    assert set(row) == set(want)
    for name, value in want.items():
        assert (row[name].dtype, row[name].shape) == (value.dtype, value.shape)
        assert np.array_equal(row[name], value)


async def test_rows_come_from_the_node_that_has_them() -> None:
    async with cluster() as at:
        await at.start(1, 12)
        await at.start(2, 5)
        await at.queue.kv_put("0-7", "train", row_of(7))
        keys = ["1-3", "0-7", "2-0", "1-11", "1-0", "2-4"]
        numbers = [3, 7, 0, 11, 0, 4]
        for number, row in zip(numbers, await at.queue.kv_batch_get(keys, "train"), strict=True):
            check(row, number)
        packed = await at.queue.kv_batch_get(keys, "train", layout="jagged")
        for i, number in enumerate(numbers):
            check(
                {name: column[i] if name != "score" else column[i].reshape(()) for name, column in packed.items()},
                number,
            )
        (row,) = await at.queue.kv_batch_get(["1-5"], "train", ["score", "tokens"])
        assert list(row) == ["score", "tokens"]
        assert row["tokens"].size == 50
        single = await at.queue.kv_batch_get(["2-3"], "train", ["tokens"], layout="jagged")
        assert np.array_equal(single["tokens"].values, row_of(3)["tokens"])
        assert (await at.queue.kv_list("train"))["train"]["1-3"] == {"i": 3}


async def test_rows_of_several_nodes_are_one_batch_for_a_task() -> None:
    async with cluster() as at:
        waiting = asyncio.create_task(at.queue.get_meta(["tokens"], 8, "train", task_name="t", timeout_s=60))
        await at.start(1, 4)
        await at.start(2, 4)
        meta = await waiting
        assert sorted(meta.keys) == [f"{node}-{i}" for node in (1, 2) for i in range(4)]
        packed = await at.queue.kv_batch_get_by_meta(meta, layout="jagged")
        assert packed["tokens"].lengths().tolist() == [10 * tag["i"] for tag in meta.tags]
        await at.queue.kv_put("1-2", "train", {"late": np.arange(3)})  # a row with records on two nodes
        (row,) = await at.queue.kv_batch_get(["1-2"], "train")
        assert row["late"].tolist() == [0, 1, 2]
        check({name: row[name] for name in row_of(2)}, 2)
        assert await at.queue.kv_clear(meta.keys, "train") == 8
        assert await at.queue.kv_list() == {}


async def test_leases_of_other_nodes_are_given_back() -> None:
    async with cluster() as at:
        await at.start(1, 6)
        nodes = at.queue._consumer._fetcher
        assert nodes is not None
        for _ in range(5):
            await at.queue.kv_batch_get([f"1-{i}" for i in range(6)], "train", layout="jagged")
        storage = await nodes._storage(1)
        await at.queue.clear_partition("train")
        usage = await storage.get_usage(GetUsage())
        assert (usage.row_bytes, usage.leased_bytes) == (0, 0)
        with pytest.raises(UnknownKey):
            await at.queue.kv_batch_get(["1-1"], "train")


async def test_a_node_that_dies_is_an_error_that_names_it() -> None:
    async with cluster(restart_wait_s=0.5) as at:
        far = await at.start(1, 6)
        await at.start(2, 3)
        await at.queue.kv_batch_get(["1-1", "2-1"], "train")
        far.kill()
        started = time.monotonic()
        with pytest.raises(LinkError, match="rows of node 1 cannot be had"):
            await at.queue.kv_batch_get(["1-2", "2-1"], "train")
        assert time.monotonic() - started < 20
        check((await at.queue.kv_batch_get(["2-1"], "train"))[0], 1)
        await at.controller.leave_node(LeaveNode(1))
        assert set((await at.queue.kv_list())["train"]) == {"2-0", "2-1", "2-2"}
        with pytest.raises(UnknownKey, match="no key '1-2'"):
            await at.queue.kv_batch_get(["1-2"], "train")


async def test_a_node_that_dies_in_the_middle_of_a_transfer_leaves_no_one_waiting() -> None:
    async with cluster(restart_wait_s=0.5) as at:
        far = await at.start(1, 200)
        keys = [f"1-{i}" for i in range(200)]
        errors = 0

        async def read() -> None:
            nonlocal errors
            try:
                while True:
                    packed = await at.queue.kv_batch_get(keys, "train", layout="jagged")
                    assert packed["tokens"].lengths().tolist() == [10 * i for i in range(200)]
            except LinkError:
                errors += 1

        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0.3)
        far.kill()
        async with asyncio.timeout(60):
            await asyncio.gather(*readers)
        assert errors == 3


async def test_a_restarted_node_is_found_at_its_new_place() -> None:
    async with cluster(restart_wait_s=0.5) as at:
        far = await at.start(1, 3)
        check((await at.queue.kv_batch_get(["1-2"], "train"))[0], 2)
        far.kill()
        await at.controller.leave_node(LeaveNode(1))
        await at.start(1, 3)
        with pytest.raises(LinkError):  # the old place, asked once more
            await at.queue.kv_batch_get(["1-2"], "train")
        check((await at.queue.kv_batch_get(["1-2"], "train"))[0], 2)


async def test_without_a_link_rows_of_others_are_refused_by_name() -> None:
    async with cluster() as at:
        await at.start(1, 2)
        source = at.node.source
        plain = await TransferQueue.connect(at.node.runtime, at.controller, at.node.storage, source, client="plain")
        with pytest.raises(LinkError, match="rows are on node 1, and this queue was given no link"):
            await plain.kv_batch_get(["1-1"], "train")


def test_memory_of_batches_is_used_again_when_nobody_looks_at_it() -> None:
    landing = Landing()
    first, _ = landing.take(3 << 20)
    place = first.ctypes.data
    part = first[10:20].view(np.int16)
    second, _ = landing.take(3 << 20)
    assert second.ctypes.data != place
    del first
    gc.collect()
    third, _ = landing.take(3 << 20)
    assert third.ctypes.data not in (place, second.ctypes.data)
    del part
    gc.collect()
    again, _ = landing.take((3 << 20) - 100)
    assert again.ctypes.data == place
    assert len(again) == (3 << 20) - 100
    assert len(landing.take(0)[0]) == 0
