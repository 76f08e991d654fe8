"""What the queue's tests stand on: a node's segments, a head with both actors, and peer processes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psrl
from psrl._core import QueueArena
from psrl.actor import Runtime, UnixAddress
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.messages import GetUsage, Usage
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource

PEER = Path(__file__).with_name("queue_peer.py")
EXTENT = 16 * 1024


class Peer:
    """A process that said "ready"."""

    def __init__(self, *arguments: str) -> None:
        package = Path(psrl.__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(package)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == "ready\n", f"peer {arguments} said {line!r}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


@contextmanager
def sockets() -> Iterator[tuple[str, str]]:
    """Paths for the node's and the head's socket, short enough for the kernel."""
    with tempfile.TemporaryDirectory(prefix="psrl") as directory:
        yield f"{directory}/node", f"{directory}/head"


def plan(num_extents: int, extent_bytes: int = EXTENT, max_clients: int = 16) -> QueuePlan:
    return QueuePlan(
        arena_bytes=QueueArena.segment_bytes(num_extents, extent_bytes, max_clients),
        extent_bytes=extent_bytes,
        num_extents=num_extents,
        max_clients=max_clients,
    )


class House:
    """A running queue. `queue` is the client "test"."""

    def __init__(
        self,
        node: NodeSegments,
        head_path: str,
        runtime: Runtime,
        storage: StorageActor,
        controller: QueueController,
        queue: TransferQueue,
    ) -> None:
        self.node, self.head_path, self.runtime = node, head_path, runtime
        self.storage, self.controller, self.queue = storage, controller, queue

    async def connect(self, client: str, put_timeout_s: float = 20.0) -> TransferQueue:
        source = SegmentSource(self.node.socket_path)
        return await TransferQueue.connect(
            self.runtime, self.controller, self.storage, source, client=client, put_timeout_s=put_timeout_s
        )

    def peer(self, name: str, action: str, *keys: str) -> Peer:
        return Peer(self.node.socket_path, self.head_path, name, action, *keys)

    async def usage(self) -> Usage:
        return await self.storage.get_usage(GetUsage())


@asynccontextmanager
async def house(num_extents: int = 64, extent_bytes: int = EXTENT) -> AsyncIterator[House]:
    with sockets() as (node_path, head_path), NodeSegments(node_path) as node:
        node.create_queue(plan(num_extents, extent_bytes))
        async with Runtime("head", listen=UnixAddress(head_path)) as runtime:
            source = SegmentSource(node_path)
            storage = runtime.spawn("storage", StorageActor(source.fetch(QUEUE)))
            controller = runtime.spawn("controller", QueueController(storage))
            queue = await TransferQueue.connect(runtime, controller, storage, source, client="test")
            yield House(node, head_path, runtime, storage, controller, queue)
