"""A node of `psrl-bench queue` over links: the lead has the controller and all rows, the others read them packed."""

import asyncio
import tempfile
import time

import numpy as np

from psrl._core import LinkEndpoint, QueueArena
from psrl.actor import Actor, Runtime, TcpAddress, handler
from psrl.actor.bulk import Bulk
from psrl.bench.messages import Join, NodeAt, Outcome, QueueSetup, ReadOne, ReadPlan, ReadRows, Took
from psrl.bench.node import Hear, listening, port_of, say
from psrl.bench.queue_core import MIB
from psrl.bench.raw import WRITES, RawClient, RawServer
from psrl.bench.rounds import Row, gbytes_per_s, quantiles_us, seconds, share
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.messages import JoinNode
from psrl.transfer.messages import NodeAt as StorageAt
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource

NUM_FIELDS, LENGTH = 9, 8192
ROW_BYTES = NUM_FIELDS * LENGTH * 4
_READ_S = 600.0


class Node:
    """What every node has: an arena, its storage, a link."""

    def __init__(self, setup: QueueSetup, runtime: Runtime, segments: NodeSegments) -> None:
        self.setup, self.runtime = setup, runtime
        num_extents = int(1.3 * setup.num_rows * ROW_BYTES) // MIB + 8 if setup.number == 0 else 8
        segments.create_queue(
            QueuePlan(
                arena_bytes=QueueArena.segment_bytes(num_extents, MIB, 4),
                extent_bytes=MIB,
                num_extents=num_extents,
                max_clients=4,
            )
        )
        secret = bytes.fromhex(setup.token)
        self.bulk = Bulk(LinkEndpoint(setup.transport, name=setup.name, host=setup.host, token=secret))
        self.source = SegmentSource(segments.socket_path)
        self.storage = runtime.spawn("storage", StorageActor(self.source.fetch(QUEUE), setup.number, self.bulk))

    async def join(self, controller: QueueController) -> TransferQueue:
        at = StorageAt(self.setup.number, self.setup.host, port_of(self.runtime), "storage")
        await controller.join_node(JoinNode(at))
        return await TransferQueue.connect(
            self.runtime, controller, self.storage, self.source, client=self.setup.name, bulk=self.bulk
        )


class Reader(Actor):
    """Reads the lead's rows, and as many bytes over a plain socket."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._keys = [str(i) for i in range(node.setup.num_rows)]

    @handler(timeout_s=60)
    async def join(self, message: Join) -> None:
        lead, num_bytes = message.lead, self._node.setup.num_rows * ROW_BYTES
        address = TcpAddress(lead.host, lead.port)
        controller = await self._node.runtime.connect(QueueController, "controller", address)
        self._queue = await self._node.join(controller)
        self._raw = await asyncio.to_thread(RawClient, lead.host, lead.raw_port, num_bytes)

    @handler(timeout_s=_READ_S)
    async def read_rows(self, message: ReadRows) -> Took:
        if message.write:
            return Took([await asyncio.to_thread(seconds, lambda: self._raw.receive(message.write))])
        started = time.perf_counter()
        packed = await self._queue.kv_batch_get(self._keys, "train", layout="jagged")
        taken = time.perf_counter() - started
        assert packed["f8"].values[-1] == LENGTH + 7
        assert len(packed["f0"]) == len(self._keys)
        return Took([taken])

    @handler(timeout_s=_READ_S)
    async def read_one(self, message: ReadOne) -> Took:
        taken = []
        for _ in range(message.count):
            started = time.perf_counter()
            await self._queue.kv_batch_get(self._keys[:1], "train", ["f0"])
            taken.append(time.perf_counter() - started)
        return Took(taken)


async def be_node(setup: QueueSetup, hear: Hear) -> None:
    raw = RawServer(setup.host)
    with tempfile.TemporaryDirectory(prefix="psrl") as directory, NodeSegments(f"{directory}/node") as segments:
        async with listening(setup) as runtime:
            node = Node(setup, runtime, segments)
            try:
                me = NodeAt(setup.name, setup.host, port_of(runtime), raw.port)
                if setup.number:
                    runtime.spawn("reader", Reader(node))
                say(me)
                plan = await hear()
                if isinstance(plan, ReadPlan):
                    say(await _lead(node, me, plan))
                    await hear()
            finally:
                await node.bulk.close(timeout_s=2)


async def _lead(node: Node, me: NodeAt, plan: ReadPlan) -> Outcome:
    controller = node.runtime.spawn("controller", QueueController({0: node.storage}))
    queue = await node.join(controller)
    values = np.arange(LENGTH, dtype=np.float32)
    keys = [str(i) for i in range(node.setup.num_rows)]
    await queue.kv_batch_put(keys, "train", [{f"f{f}": values + f for f in range(NUM_FIELDS)} for _ in keys])
    readers = [
        await node.runtime.connect(Reader, "reader", TcpAddress(peer.host, peer.port), timeout_s=30)
        for peer in plan.peers
    ]
    for reader in readers:
        await reader.join(Join(me))

    async def slowest(write: int) -> float:
        """All at once; with 0 rows, else plain sockets with such writes."""
        answers = await asyncio.gather(*(reader.read_rows(ReadRows(write)) for reader in readers))
        return max(taken for answer in answers for taken in answer.seconds)

    got, raw, singles = list[float](), list[float](), list[float]()
    for _ in range(plan.rounds + 1):
        got.append(await slowest(0))
        raw.append(min([await slowest(write) for write in WRITES]))
        singles += (await readers[0].read_one(ReadOne(10))).seconds
    num_bytes = len(keys) * ROW_BYTES
    row: Row = {"what": f"packed get of {len(keys)} rows by {len(readers)} nodes at once"}
    row |= share(got[1:], raw[1:], "raw sockets")
    row |= {
        "size_bytes": num_bytes,
        "receivers": len(readers),
        "GBps": gbytes_per_s(num_bytes, got[1:]),
        "raw_gbit_per_s": round(8 * len(readers) * gbytes_per_s(num_bytes, raw[1:]), 4),
        "single_field_p50_us": quantiles_us(singles[10:])["p50_us"],
    }
    return Outcome([row], node.bulk.endpoint.description)
