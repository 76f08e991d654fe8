"""One process, many threads and two event loops: nothing that encodes or decodes is shared unguarded."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from queue_house import plan, sockets

from psrl.actor import BlockingRuntime, Runtime, UnixAddress
from psrl.transfer import BlockingTransferQueue, QueueController, StorageActor, TransferQueue
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource

NUM_THREADS, NUM_ROUNDS = 16, 12
DTYPES = ("<f4", "<i8", "|b1", "<f8", "<c8", "<u2", "<U3", "|i1")


@contextmanager
def loops(num: int) -> Iterator[list[BlockingTransferQueue]]:
    """Clients of one queue, each with an event loop of its own; the first one's has the queue's actors too."""
    with sockets() as (node_path, head_path), NodeSegments(node_path) as node, ExitStack() as stack:
        node.create_queue(plan(num_extents=128))
        address = UnixAddress(head_path)

        async def head(runtime: Runtime) -> TransferQueue:
            source = SegmentSource(node_path)
            storage = runtime.spawn("storage", StorageActor(source.fetch(QUEUE)))
            controller = runtime.spawn("controller", QueueController(storage))
            return await TransferQueue.connect(runtime, controller, storage, source, client="loop 0")

        async def other(runtime: Runtime, name: str) -> TransferQueue:
            storage = await runtime.connect(StorageActor, "storage", address, timeout_s=20)
            controller = await runtime.connect(QueueController, "controller", address, timeout_s=20)
            return await TransferQueue.connect(runtime, controller, storage, SegmentSource(node_path), client=name)

        queues = []
        for i in range(num):
            blocking = stack.enter_context(BlockingRuntime(f"loop {i}", listen=address if i == 0 else None))
            queue = blocking.call(other(blocking.runtime, f"loop {i}") if i else head(blocking.runtime), 60)
            queues.append(BlockingTransferQueue(queue, blocking))
            stack.callback(queues[-1].close)
        yield queues


def run_threads(work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("num_loops", [1, 2])
def test_threads_put_and_get_what_is_theirs(num_loops: int) -> None:
    with loops(num_loops) as queues:

        def work(index: int) -> None:
            queue, chance = queues[index % num_loops], np.random.default_rng(index)
            for round in range(NUM_ROUNDS):
                shape = tuple(chance.integers(0, 9, size=index % 4))
                value = chance.integers(0, 100, size=shape).astype(DTYPES[(index + round) % len(DTYPES)])
                tag = {"thread": index, "text": "ü" * index, "values": [round] * index}
                key = f"{index}-{round}"
                queue.kv_put(key, "train", {"x": value, f"only {index}": np.array(round)}, tag)
                (row,) = queue.kv_batch_get([key], "train")
                assert row.keys() == {"x", f"only {index}"}
                assert row["x"].dtype == value.dtype
                assert np.array_equal(row["x"], value)
                assert int(row[f"only {index}"]) == round
                assert queue.kv_list("train")["train"][key] == tag

        run_threads(work)
        assert len(queues[-1].kv_list("train")["train"]) == NUM_THREADS * NUM_ROUNDS
        assert queues[0].clear_partition("train") == NUM_THREADS * NUM_ROUNDS
