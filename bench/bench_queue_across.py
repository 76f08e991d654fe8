"""How near does reading another node's rows come to a plain TCP socket over the same path?

Two processes: one is a node with rows (and the controller), the other a node that reads them packed. Each round: raw
sends of as many bytes, with four sizes of writes, and one kv_batch_get. Prints one JSON object.

    python bench/bench_queue_across.py [--mib N] [--rounds N]          over loopback
    python bench/bench_queue_across.py --netns [--gbit R]              between two network namespaces (root)
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_link import ORDER, WRITES, namespaces, receive_exactly

from psrl._core import LinkEndpoint, QueueArena
from psrl.actor import Runtime, TcpAddress, Token, run
from psrl.actor.bulk import Bulk
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.messages import JoinNode, NodeAt
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource

SECRET = b"a benchmark's token"
NUM_FIELDS, LENGTH, EXTENT = 9, 8192, 1 << 20
ROW_BYTES = NUM_FIELDS * LENGTH * 4


class Node:
    def __init__(self, stack: contextlib.ExitStack, runtime: Runtime, host: str, number: int, num_bytes: int) -> None:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="psrl"))
        segments = stack.enter_context(NodeSegments(f"{directory}/node"))
        num_extents = num_bytes // EXTENT + 8
        arena_bytes = QueueArena.segment_bytes(num_extents, EXTENT, 4)
        segments.create_queue(
            QueuePlan(arena_bytes=arena_bytes, extent_bytes=EXTENT, num_extents=num_extents, max_clients=4)
        )
        self.runtime, self.host, self.number = runtime, host, number
        self.bulk = Bulk(LinkEndpoint("tcp", name=f"node {number}", host=host, token=SECRET))
        self.source = SegmentSource(segments.socket_path)
        self.storage = runtime.spawn("storage", StorageActor(self.source.fetch(QUEUE), number, self.bulk))

    async def join(self, controller: QueueController) -> TransferQueue:
        assert isinstance(self.runtime.address, TcpAddress)
        await controller.join_node(JoinNode(NodeAt(self.number, self.host, self.runtime.address.port, "storage")))
        return await TransferQueue.connect(
            self.runtime, controller, self.storage, self.source, client=f"on {self.number}", bulk=self.bulk
        )


async def be_far(host: str, num_rows: int) -> None:
    with contextlib.ExitStack() as stack:
        async with Runtime("far", listen=TcpAddress(host, 0), token=Token(SECRET)) as runtime:
            node = Node(stack, runtime, host, 1, int(1.3 * num_rows * ROW_BYTES))
            controller = runtime.spawn("controller", QueueController({1: node.storage}))
            queue = await node.join(controller)
            values = np.arange(LENGTH, dtype=np.float32)
            keys = [str(i) for i in range(num_rows)]
            await queue.kv_batch_put(keys, "train", [{f"f{f}": values + f for f in range(NUM_FIELDS)} for _ in keys])
            listener = stack.enter_context(socket.create_server((host, 0)))
            assert isinstance(runtime.address, TcpAddress)
            print(json.dumps([host, runtime.address.port, listener.getsockname()[1]]), flush=True)
            await asyncio.to_thread(send_raw, listener, num_rows * ROW_BYTES)
            await node.bulk.close(timeout_s=2)


def send_raw(listener: socket.socket, num_bytes: int) -> None:
    """Whatever is asked for, until the other side ends."""
    memory = memoryview(np.ones(num_bytes, np.uint8))
    raw, _ = listener.accept()
    with raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        order = bytearray(ORDER.size)
        while raw.recv_into(order, ORDER.size, socket.MSG_WAITALL):
            total, write = ORDER.unpack(order)
            for at in range(0, total, write):
                raw.sendall(memory[at : min(total, at + write)])


async def be_near(host: str, num_rows: int, rounds: int) -> dict[str, Any]:
    far, port, raw_port = json.loads(await asyncio.to_thread(sys.stdin.readline))
    num_bytes, keys = num_rows * ROW_BYTES, [str(i) for i in range(num_rows)]
    memory = memoryview(np.ones(num_bytes, np.uint8))
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(socket.create_connection((far, raw_port)))
        async with Runtime("near", listen=TcpAddress(host, 0), token=Token(SECRET)) as runtime:
            controller = await runtime.connect(QueueController, "controller", TcpAddress(far, port), timeout_s=20)
            node = Node(stack, runtime, host, 0, EXTENT)
            queue = await node.join(controller)

            def receive(write: int) -> None:
                raw.sendall(ORDER.pack(num_bytes, write))
                receive_exactly(raw, memory)

            for _ in range(rounds + 1):
                start = time.perf_counter()
                packed = await queue.kv_batch_get(keys, "train", layout="jagged")
                times.setdefault("get", []).append(time.perf_counter() - start)
                assert packed["f8"].values[-1] == LENGTH + 7
                assert len(packed["f0"]) == num_rows
                del packed
                for write in WRITES:
                    start = time.perf_counter()
                    receive(write)
                    times.setdefault(f"raw_{write >> 10}k", []).append(time.perf_counter() - start)
            singles = []
            for _ in range(50):
                start = time.perf_counter()
                await queue.kv_batch_get(["0"], "train", ["f0"])
                singles.append((time.perf_counter() - start) * 1e6)
            await node.bulk.close(timeout_s=2)
    times = {name: each[1:] for name, each in times.items()}
    best = min((name for name in times if name != "get"), key=lambda name: statistics.median(times[name]))
    ratios = [theirs / ours for ours, theirs in zip(times["get"], times[best], strict=True)]
    return {
        "gbytes_per_s": {name: round(num_bytes / statistics.median(each) / 1e9, 4) for name, each in times.items()},
        "best_raw": best,
        "get_to_raw": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "single_field_us": round(statistics.median(singles), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--netns", action="store_true")
    parser.add_argument("--gbit", type=float)
    parser.add_argument("--role", choices=["near", "far"], help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_rows = (options.mib << 20) // ROW_BYTES
    if options.role == "far":
        return run(be_far(options.host, num_rows))
    if options.role == "near":
        print(json.dumps(run(be_near(options.host, num_rows, options.rounds))))
        return None

    def start(prefix: list[str], role: str, host: str, **streams: Any) -> "subprocess.Popen[str]":
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        shared = ("--mib", str(options.mib), "--rounds", str(options.rounds), "--role", role, "--host", host)
        return subprocess.Popen([*prefix, sys.executable, __file__, *shared], text=True, env=environment, **streams)

    with contextlib.ExitStack() as stack:
        near, near_host, far, far_host = list[str](), "127.0.0.1", list[str](), "127.0.0.1"
        if options.netns:
            near, near_host, far, far_host = stack.enter_context(namespaces(options.gbit))
        load = os.getloadavg()[0]
        owner = start(far, "far", far_host, stdout=subprocess.PIPE)
        reader = start(near, "near", near_host, stdin=owner.stdout, stdout=subprocess.PIPE)
        found, _ = reader.communicate()
        owner.wait(60)
    result = {
        "bench": "queue across nodes",
        "path": f"namespaces{f' at {options.gbit} Gbit/s' if options.gbit else ''}" if options.netns else "loopback",
        "num_bytes": num_rows * ROW_BYTES,
        "rounds": options.rounds,
        "load_average": round(load, 1),
        "num_cpus": os.cpu_count(),
        "machine": platform.machine(),
        **json.loads(found),
    }
    print(json.dumps(result, indent=2))
    return None


if __name__ == "__main__":
    main()
