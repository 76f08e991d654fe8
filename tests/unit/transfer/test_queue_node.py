"""The queue as other programs house it: in their own loop, with processes of the same node and of other nodes."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import psrl
from psrl._core import LinkEndpoint
from psrl.actor import Runtime, TcpAddress, Token, UnixAddress
from psrl.actor.bulk import Bulk
from psrl.errors import ActorDied, ConfigError, UnknownKey
from psrl.transfer import NodeSegments, QueueNode, QueuePlan, SegmentSource
from psrl.transfer.clients import pid_namespace
from psrl.transfer.messages import GetUsage, ListNodes, WatchClient

SECRET = b"of the nodes of these tests"
HOST = "127.0.0.1"

READER = """
import asyncio, sys
from psrl.actor import Runtime, UnixAddress
from psrl.transfer import QueueNode, SegmentSource

async def main(folder):
    async with Runtime("reader") as runtime:
        source = SegmentSource(f"{folder}/segments")
        queue = await (await QueueNode.attach(runtime, source, UnixAddress(f"{folder}/head"))).connect("reader")
        views = await queue.kv_batch_get(["a"], "train")
        await queue.kv_put("b", "train", {"x": views[0]["x"] + 1})
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


@asynccontextmanager
async def reader(folder: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that looks at row a and has put row b."""
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, folder, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.wait(), 30)


async def test_a_process_that_nobody_here_started_gives_back_what_it_held_when_it_is_killed() -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    with tempfile.TemporaryDirectory(prefix="psrl") as folder, NodeSegments(f"{folder}/segments") as segments:
        segments.create_queue(QueuePlan.of(4 << 20, extent_bytes=1 << 16))
        async with Runtime("head", listen=UnixAddress(f"{folder}/head")) as runtime:
            node = await QueueNode.host(runtime, segments, on_client_ended=ended.put_nowait)
            queue = await node.connect("head")
            await queue.kv_put("a", "train", {"x": np.arange(1000)})
            async with reader(folder) as process:
                await queue.kv_clear(["a"], "train")
                queue.close()
                held = await node.storage.get_usage(GetUsage())
                assert held.leased_bytes > 0
                assert held.open_bytes > 0
                process.send_signal(signal.SIGKILL)
                assert await asyncio.wait_for(ended.get(), 30) == "reader"
            (row,) = await queue.kv_batch_get(["b"], "train")
            assert np.array_equal(row["x"], np.arange(1000) + 1)
            del row
            await queue.kv_clear(["b"], "train")
            left = await node.storage.get_usage(GetUsage())
            assert left.free_bytes == left.capacity


async def test_a_client_that_starts_again_under_its_name_is_not_taken_for_the_dead_one() -> None:
    with tempfile.TemporaryDirectory(prefix="psrl") as folder, NodeSegments(f"{folder}/segments") as segments:
        segments.create_queue(QueuePlan.of(4 << 20, extent_bytes=1 << 16))
        ended: list[str] = []
        async with Runtime("head", listen=UnixAddress(f"{folder}/head")) as runtime:
            node = await QueueNode.host(runtime, segments, on_client_ended=ended.append)
            queue = await node.connect("head")
            await queue.kv_put("a", "train", {"x": np.arange(10)})
            async with reader(folder):
                again = await node.connect("reader")  # takes the name over, as a process started anew does
            await again.kv_put("c", "train", {"x": np.arange(10)})
            assert list((await again.kv_list("train"))["train"]) == ["a", "b", "c"]
            assert ended == []


async def test_who_cannot_be_watched_is_told_so() -> None:
    with tempfile.TemporaryDirectory(prefix="psrl") as folder, NodeSegments(f"{folder}/segments") as segments:
        segments.create_queue(QueuePlan.of(4 << 20))
        async with Runtime("head", listen=UnixAddress(f"{folder}/head")) as runtime:
            node = await QueueNode.host(runtime, segments)
            elsewhere = WatchClient("far", os.getpid(), pid_namespace() + 1)
            assert not (await node._clients.watch_client(elsewhere)).sees
            gone = await asyncio.create_subprocess_exec("true")
            await asyncio.wait_for(gone.wait(), 30)
            assert not (await node._clients.watch_client(WatchClient("gone", gone.pid, pid_namespace()))).sees
            assert (await node._clients.watch_client(WatchClient("self", os.getpid(), pid_namespace()))).sees


async def test_a_node_joins_by_tcp_alone_and_leaves_with_its_rows() -> None:
    with tempfile.TemporaryDirectory(prefix="psrl") as folder:
        near, far = NodeSegments(f"{folder}/near"), NodeSegments(f"{folder}/far")
        token = Token(SECRET)
        for segments in (near, far):
            segments.create_queue(QueuePlan.of(4 << 20))
        async with (
            Bulk(LinkEndpoint("tcp", name="near", token=SECRET)) as near_bulk,
            Bulk(LinkEndpoint("tcp", name="far", token=SECRET)) as far_bulk,
            Runtime("near", listen=TcpAddress(HOST, 0), token=token) as near_runtime,
            Runtime("far", listen=TcpAddress(HOST, 0), token=token) as far_runtime,
        ):
            head = near_runtime.address
            assert isinstance(head, TcpAddress)
            home = await QueueNode.host(near_runtime, near, near_bulk)
            queue = await home.connect("near")
            await queue.kv_put("near", "train", {"x": np.arange(100)})
            async with QueueNode.join(far_runtime, far, head, 1, far_bulk) as node:
                away = await node.connect("far")
                await away.kv_put("far", "train", {"x": np.arange(50)})
                for reads in (queue, away):
                    rows = await reads.kv_batch_get(["near", "far"], "train")
                    assert [row["x"].tolist() for row in rows] == [list(range(100)), list(range(50))]
                # Another process of node 1: its storage is here, the controller is at the head.
                async with (
                    Runtime("third", token=token) as third,
                    Bulk(LinkEndpoint("tcp", name="third", token=SECRET)) as bulk,
                ):
                    assert far_runtime.address is not None
                    source = SegmentSource(f"{folder}/far")
                    attached = await QueueNode.attach(third, source, far_runtime.address, bulk, controller=head)
                    (row,) = await (await attached.connect("third")).kv_batch_get(["far"], "train")
                    assert row["x"].tolist() == list(range(50))
            with pytest.raises(UnknownKey):
                await queue.kv_batch_get(["far"], "train")
            assert list((await queue.kv_list("train"))["train"]) == ["near"]
            assert [at.node for at in (await home.controller.list_nodes(ListNodes())).at] == [0]
        near.close()
        far.close()


async def test_leaving_is_quiet_when_the_head_is_gone() -> None:
    with tempfile.TemporaryDirectory(prefix="psrl") as folder, NodeSegments(f"{folder}/far") as far:
        far.create_queue(QueuePlan.of(4 << 20))
        near = NodeSegments(f"{folder}/near")
        near.create_queue(QueuePlan.of(4 << 20))
        async with (
            Bulk(LinkEndpoint("tcp", name="near", token=SECRET)) as near_bulk,
            Bulk(LinkEndpoint("tcp", name="far", token=SECRET)) as far_bulk,
            Runtime("far", listen=TcpAddress(HOST, 0), token=Token(SECRET)) as runtime,
        ):
            head = Runtime("near", listen=TcpAddress(HOST, 0), token=Token(SECRET))
            await head.__aenter__()
            await QueueNode.host(head, near, near_bulk)
            assert isinstance(head.address, TcpAddress)
            async with QueueNode.join(runtime, far, head.address, 1, far_bulk) as node:
                queue = await node.connect("far", restart_wait_s=0.1)
                await head.close()
                with pytest.raises(ActorDied):
                    await queue.kv_list()
        near.close()


@pytest.mark.parametrize("listen", [None, TcpAddress("0.0.0.0", 0)])
async def test_other_nodes_need_an_address_that_they_reach(listen: TcpAddress | None) -> None:
    with tempfile.TemporaryDirectory(prefix="psrl") as folder, NodeSegments(f"{folder}/near") as near:
        near.create_queue(QueuePlan.of(4 << 20))
        async with (
            Bulk(LinkEndpoint("tcp", name="near", token=SECRET)) as bulk,
            Runtime("near", listen=listen, token=Token(SECRET)) as runtime,
        ):
            with pytest.raises(ConfigError, match="must listen at a TcpAddress that other nodes reach"):
                await QueueNode.host(runtime, near, bulk)
