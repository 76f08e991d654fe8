"""Another node: its own segments, storage and writer, reached over TCP alone.

python queue_far.py CONTROLLER_PORT NODE NUM_ROWS     says "ready" when its rows are put, and works until it is killed
"""

import asyncio
import sys
import tempfile

import numpy as np

from psrl._core import LinkEndpoint, QueueArena
from psrl.actor import Runtime, TcpAddress, Token, run
from psrl.actor.bulk import Bulk
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.messages import JoinNode, NodeAt
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource

SECRET = b"of the nodes of these tests"
HOST = "127.0.0.1"
EXTENT = 64 * 1024


def row_of(number: int) -> dict[str, np.ndarray]:
    return {
        "tokens": np.arange(number * 10, dtype=np.int32) + number,
        "logits": np.full((number % 4, 3), number, np.float64),
        "score": np.array(number, np.float32),
    }


class Node:
    """A node's segments, storage and queue in this process, joined to the controller."""

    def __init__(self, runtime: Runtime, number: int, directory: str, num_extents: int = 64) -> None:
        self.runtime, self.number = runtime, number
        self.segments = NodeSegments(f"{directory}/node{number}")
        arena_bytes = QueueArena.segment_bytes(num_extents, EXTENT, 8)
        self.segments.create_queue(
            QueuePlan(arena_bytes=arena_bytes, extent_bytes=EXTENT, num_extents=num_extents, max_clients=8)
        )
        self.bulk = Bulk(LinkEndpoint("tcp", name=f"node {number}", token=SECRET))
        self.source = SegmentSource(self.segments.socket_path)
        self.storage = runtime.spawn("storage", StorageActor(self.source.fetch(QUEUE), number, self.bulk))

    async def join(self, controller: QueueController) -> None:
        assert isinstance(self.runtime.address, TcpAddress)
        at = NodeAt(self.number, HOST, self.runtime.address.port, "storage")
        await controller.join_node(JoinNode(at))

    async def connect(self, controller: QueueController, client: str, **options: float) -> TransferQueue:
        return await TransferQueue.connect(
            self.runtime, controller, self.storage, self.source, client=client, bulk=self.bulk, **options
        )

    async def close(self) -> None:
        await self.bulk.close(timeout_s=2)
        self.segments.close()


async def be_far(port: int, number: int, num_rows: int, directory: str) -> None:
    async with Runtime(f"node{number}", listen=TcpAddress(HOST, 0), token=Token(SECRET)) as runtime:
        controller = await runtime.connect(QueueController, "controller", TcpAddress(HOST, port), timeout_s=30)
        node = Node(runtime, number, directory)
        await node.join(controller)
        queue = await node.connect(controller, f"writer on {number}")
        keys = [f"{number}-{i}" for i in range(num_rows)]
        await queue.kv_batch_put(
            keys, "train", [row_of(i) for i in range(num_rows)], [{"i": i} for i in range(num_rows)]
        )
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="psrl") as made:
        run(be_far(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), made))
