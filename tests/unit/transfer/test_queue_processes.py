"""Real processes, really killed."""

import asyncio
import os
import random
import uuid
from pathlib import Path

import numpy as np
import pytest
from queue_house import EXTENT, Peer, house, plan, sockets
from queue_peer import connect

from psrl.actor import Runtime
from psrl.errors import UnknownKey
from psrl.transfer.messages import ReleaseClient
from psrl.transfer.segments import NodeSegments


async def start(*arguments: str) -> Peer:
    """A peer, while this loop goes on serving it."""
    return await asyncio.to_thread(Peer, *arguments)


async def test_writer_killed_in_a_put_leaves_no_visible_row() -> None:
    async with house() as at:
        before = (await at.usage()).free_bytes
        peer = await start(at.node.socket_path, at.head_path, "writer", "tear", "whole", "torn")
        peer.kill()
        released = await at.controller.release_client(ReleaseClient("writer"))
        assert released.num_records == 1
        assert set((await at.queue.kv_list())["train"]) == {"whole"}
        (row,) = await at.queue.kv_batch_get(["whole"], "train")
        assert np.array_equal(row["x"], np.arange(1000))
        with pytest.raises(UnknownKey):
            await at.queue.kv_batch_get(["torn"], "train")
        del row
        await at.queue.kv_clear(["whole", "torn"], "train")
        assert (await at.usage()).free_bytes == before


async def test_rows_that_a_dead_writer_told_nobody_of_are_freed() -> None:
    async with house() as at:
        before = (await at.usage()).free_bytes
        peer = await start(at.node.socket_path, at.head_path, "writer", "orphan", "untold")
        peer.kill()
        assert (await at.usage()).free_bytes < before
        await at.controller.release_client(ReleaseClient("writer"))
        assert await at.queue.kv_list() == {}
        assert (await at.usage()).free_bytes == before


async def test_a_restarted_writer_frees_what_its_earlier_life_told_nobody_of() -> None:
    async with house() as at:
        before = (await at.usage()).free_bytes
        peer = await start(at.node.socket_path, at.head_path, "writer", "orphan", "untold")
        peer.kill()
        await at.connect("writer")
        assert (await at.usage()).free_bytes == before


async def test_killed_readers_leases_come_back_by_release() -> None:
    async with house() as at:
        before = (await at.usage()).free_bytes
        await at.queue.kv_put("k", "train", {"x": np.arange(1000)})
        peer = await start(at.node.socket_path, at.head_path, "reader", "hold", "k")
        peer.kill()
        await at.queue.kv_clear(["k"], "train")
        at.queue.close()
        assert (await at.usage()).free_bytes < before
        released = await at.controller.release_client(ReleaseClient("reader"))
        assert released.num_leases == 1
        assert (await at.usage()).free_bytes == before


async def test_writers_killed_at_any_instant_leave_whole_rows_and_no_leak() -> None:
    chance = random.Random(0)
    async with house(num_extents=128) as at:
        before = (await at.usage()).free_bytes
        for i in range(4):
            peer = await start(at.node.socket_path, at.head_path, f"w{i}", "write")
            while not any(key.startswith(f"w{i}-") for key in (await at.queue.kv_list()).get("train", {})):
                await asyncio.sleep(0.01)
            await asyncio.sleep(chance.uniform(0.0, 0.15))
            peer.kill()
            await at.controller.release_client(ReleaseClient(f"w{i}"))
        tags = (await at.queue.kv_list()).get("train", {})
        assert len(tags) >= 4
        rows = await at.queue.kv_batch_get(list(tags), "train")
        for tag, row in zip(tags.values(), rows, strict=True):
            assert row["x"].size == tag["n"] % 2000
            assert (row["x"] == tag["n"]).all()
        del rows, row
        await at.queue.kv_clear(list(tags), "train")
        assert (await at.usage()).free_bytes == before


async def test_head_killed_and_restarted_finds_what_was_put() -> None:
    with sockets() as (node_path, head_path), NodeSegments(node_path) as node:
        node.create_queue(plan(32))
        head = await start(node_path, head_path, "head", "head")
        async with Runtime("client") as runtime:
            queue = await connect(runtime, node_path, head_path, "client")
            await queue.kv_batch_put(["a", "b"], "train", [{"x": np.arange(4)}, {"x": np.arange(5)}], [{"n": 1}, None])
            await queue.kv_put("b", "train", {"late": np.arange(2)})
            await queue.kv_clear(["a"], "train")
            (view,) = await queue.kv_batch_get(["b"], "train")
            head.kill()
            with await start(node_path, head_path, "head", "head"):
                assert await queue.kv_list() == {"train": {"b": {}}}
                (row,) = await queue.kv_batch_get(["b"], "train")
                assert row["x"].ctypes.data == view["x"].ctypes.data
                await queue.kv_put("c", "train", {"x": np.arange(EXTENT // 16)})
                assert len(await queue.kv_batch_get(["b", "c"], "train")) == 2


def test_memory_is_gone_when_all_processes_are_however_they_end() -> None:
    name = f"queue-{uuid.uuid4().hex[:12]}"
    with sockets() as (node_path, _):
        node = Peer(node_path, "-", name, "node")
        reader = Peer(node_path, "-", name, "map")
        assert holders(name) == {node.pid, reader.pid}
        node.kill()
        assert holders(name) == {reader.pid}
        reader.kill()
        assert holders(name) == set()
    shared = Path("/dev/shm")
    assert not [entry for entry in (shared.iterdir() if shared.is_dir() else ()) if name in entry.name]


def holders(name: str) -> set[int]:
    """Processes that map the segment."""
    found = set()
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and name in (process / "maps").read_text(errors="replace"):
                found.add(int(process.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found - {os.getpid()}
