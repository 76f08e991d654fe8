"""A peer process of the queue's tests. It does what it is told, says "ready", and waits to be killed.

python queue_peer.py SEGMENTS_SOCKET HEAD_SOCKET NAME head|tear|orphan|write|hold|draw|node|map [key ...]
"""

import asyncio
import sys

import numpy as np

from psrl.actor import Runtime, UnixAddress, run
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource


def say_ready() -> None:
    print("ready", flush=True)


async def connect(runtime: Runtime, segments: str, head: str, name: str) -> TransferQueue:
    address = UnixAddress(head)
    controller = await runtime.connect(QueueController, "controller", address, timeout_s=60)
    storage = await runtime.connect(StorageActor, "storage", address, timeout_s=60)
    return await TransferQueue.connect(runtime, controller, storage, SegmentSource(segments), client=name)


async def serve_head(segments: str, head: str) -> None:
    async with Runtime("head", listen=UnixAddress(head)) as runtime:
        storage = runtime.spawn("storage", StorageActor(SegmentSource(segments).fetch(QUEUE)))
        runtime.spawn("controller", QueueController(storage))
        say_ready()
        await asyncio.Event().wait()


async def use_queue(segments: str, head: str, name: str, action: str, keys: list[str]) -> None:
    async with Runtime(name) as runtime:
        queue = await connect(runtime, segments, head, name)
        if action == "tear":  # in the middle of a put: all bytes are there, the flag is not
            await queue.kv_put(keys[0], "train", {"x": np.arange(1000)})
            held: object = await queue._producer.begin("train", [(keys[1], b"", {"x": np.arange(1000)})])
        elif action == "orphan":  # committed, and nobody was told
            held = await queue._producer.write("train", [(keys[0], b"", {"x": np.arange(1000)})])
        elif action == "write":  # until killed, at whatever instant that is
            say_ready()
            for i in range(10**9):
                await queue.kv_put(f"{name}-{i}", "train", {"x": np.full(i % 2000, i)}, {"n": i})
                await queue.kv_clear([f"{name}-{i - 20}"], "train")
        elif action == "draw":  # waits for as many rows as the key says
            say_ready()
            held = await queue.get_meta(["x"], int(keys[0]), "train", task_name="t", timeout_s=60)
        else:
            held = await queue.kv_batch_get(keys, "train")
        say_ready()
        await asyncio.Event().wait()
        del held


def keep_node(segments: str, name: str) -> None:
    with NodeSegments(segments) as node:
        node.create_queue(QueuePlan(arena_bytes=1 << 20, extent_bytes=1 << 16, num_extents=10), name)
        say_ready()
        sys.stdin.read()


def main() -> None:
    segments, head, name, action, *keys = sys.argv[1:]
    if action == "head":
        run(serve_head(segments, head))
    elif action == "node":
        keep_node(segments, name)
    elif action == "map":
        held = SegmentSource(segments).fetch(name)
        say_ready()
        sys.stdin.read()
        del held
    else:
        run(use_queue(segments, head, name, action, keys))


if __name__ == "__main__":
    main()
