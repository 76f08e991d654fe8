"""Bulk against a second real process: bytes, order, deadlines, death, goodbye."""

import asyncio
import gc
import os
import signal
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl._core import LinkEndpoint, Segment
from psrl.actor.bulk import Bulk
from psrl.errors import LinkError

TOKEN = b"a token for tests alone"
PEER = Path(__file__).with_name("bulk_peer.py")
SIZE = 4 << 20
PATIENCE_S = 60.0


def endpoint(name: str) -> LinkEndpoint:
    return LinkEndpoint("tcp", name=name, token=TOKEN)


class Peer:
    """bulk_peer.py in a process of its own: its memory is pattern(7) and open for put and pull."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, put: bytes, pull: bytes) -> None:
        self.process, self.address, self.put, self.pull = process, address, put, pull

    async def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        return (await self.process.stdout.readline()).decode().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def stop(self) -> None:
        self.signal(signal.SIGSTOP)
        await _until(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEER), str(SIZE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address, put, pull = (await process.stdout.readline()).decode().split()
    yield Peer(process, address, bytes.fromhex(put), bytes.fromhex(pull))
    if process.returncode is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    await process.communicate()


class Node:
    """A Bulk with memory, and what its callbacks heard."""

    def __init__(self, name: str = "ours") -> None:
        self.notices: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.connected: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.endpoint = endpoint(name)
        self.bulk = Bulk(
            self.endpoint,
            lambda *what: self.notices.put_nowait(what),
            lambda *what: self.connected.put_nowait(what),
            lambda *what: self.lost.put_nowait(what),
        )
        self.memory = np.zeros(SIZE, np.uint8)
        self.region = self.endpoint.add_region(self.memory)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    yield node
    await node.bulk.close(timeout_s=1)


def pattern(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


async def test_put_pull_and_notices_between_processes(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    await node.bulk.pull(number, peer.pull, node.region, [(0, 0, SIZE)], timeout_s=PATIENCE_S)
    assert (node.memory == pattern(7)).all()
    node.memory[:] = pattern(8)
    await node.bulk.put(number, peer.put, node.region, [(0, 0, SIZE)], b"echo", timeout_s=PATIENCE_S)
    assert await node.notices.get() == (number, b"echo")
    assert await peer.ask("sum") == str(int(pattern(8).astype(np.uint64).sum()))
    await node.bulk.notify(number, b"echo", timeout_s=PATIENCE_S)
    assert await node.notices.get() == (number, b"echo")


async def test_pieces_may_be_an_array_of_many(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    offsets = np.random.default_rng(0).permutation(SIZE // 1024)[:2000].astype(np.uint64) * np.uint64(1024)
    local = np.arange(2000, dtype=np.uint64) * np.uint64(1000)
    pieces = np.stack([local, offsets, np.full(2000, 1000, np.uint64)], axis=1)
    await node.bulk.pull(number, peer.pull, node.region, pieces, timeout_s=PATIENCE_S)
    theirs = pattern(7)
    expected = np.concatenate([theirs[o : o + 1000] for o in offsets.astype(int)])
    assert (node.memory[: len(expected)] == expected).all()
    await node.bulk.pull(number, peer.pull, node.region, [], timeout_s=PATIENCE_S)
    with pytest.raises(LinkError, match="rows of"):
        await node.bulk.pull(number, peer.pull, node.region, [(1, 2)], timeout_s=PATIENCE_S)


async def test_many_at_once(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    node.memory[:] = pattern(9)
    step = SIZE // 256
    async with asyncio.TaskGroup() as group:
        for at in range(0, SIZE, step):
            piece = [(at, at, step)]
            group.create_task(node.bulk.put(number, peer.put, node.region, piece, timeout_s=PATIENCE_S))
    assert await peer.ask("sum") == str(int(pattern(9).astype(np.uint64).sum()))
    [counted] = node.endpoint.counters()
    assert (counted["name"], counted["puts"], counted["bytes_put"]) == ("peer", 256, SIZE)


async def test_flush_waits_for_what_was_begun(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    puts = [
        asyncio.create_task(node.bulk.put(number, peer.put, node.region, [(0, 0, SIZE)], timeout_s=PATIENCE_S))
        for _ in range(4)
    ]
    await asyncio.sleep(0)
    await node.bulk.flush(number, timeout_s=PATIENCE_S)
    assert all(put.done() for put in puts)


async def test_refusals_are_typed(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    with pytest.raises(LinkError) as refused:
        await node.bulk.put(number, peer.put, node.region, [(0, SIZE, 1)], timeout_s=PATIENCE_S)
    assert refused.value.status == "refused"
    assert await peer.ask("withdraw") == "ok"
    with pytest.raises(LinkError, match="withdrawn") as stale:
        await node.bulk.put(number, peer.put, node.region, [(0, 0, 1)], timeout_s=PATIENCE_S)
    assert stale.value.status == "stale"
    with pytest.raises(LinkError) as unknown:
        await node.bulk.notify(12345, b"n", timeout_s=PATIENCE_S)
    assert unknown.value.status == "peer_lost"
    for mistake in (
        lambda: node.bulk.put(number, peer.put, node.region, [(SIZE, 0, 1)], timeout_s=1),
        lambda: node.bulk.notify(number, b"n" * 513, timeout_s=1),
        lambda: node.bulk.connect("nonsense", timeout_s=1),
        lambda: node.bulk.put(number, b"no advert", node.region, [], timeout_s=1),
    ):
        with pytest.raises(LinkError):
            await mistake()


async def test_wrong_token_is_refused(node: Node) -> None:
    other = LinkEndpoint("tcp", name="other", token=b"not the token, as long")
    with pytest.raises(LinkError, match="token") as refused:
        await node.bulk.connect(other.address, timeout_s=PATIENCE_S)
    assert refused.value.status == "refused"
    assert other.close(1)


async def test_deadline_holds_against_a_stopped_peer(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    await peer.stop()
    with pytest.raises(LinkError) as late:
        await node.bulk.pull(number, peer.pull, node.region, [(0, 0, SIZE)], timeout_s=0.2)
    assert late.value.status == "timeout"
    peer.signal(signal.SIGCONT)
    await node.bulk.flush(number, timeout_s=PATIENCE_S)


async def test_a_killed_peer_ends_its_operations(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    await peer.stop()
    pull = asyncio.create_task(node.bulk.pull(number, peer.pull, node.region, [(0, 0, SIZE)], timeout_s=PATIENCE_S))
    await asyncio.sleep(0.05)
    peer.signal(signal.SIGKILL)
    with pytest.raises(LinkError, match="peer at 127") as lost:
        await pull
    assert lost.value.status == "peer_lost"
    who, why = await node.lost.get()
    assert who == number
    assert "hung up" in why or "reset" in why


async def test_a_cancelled_caller_leaves_the_operation_to_its_end(node: Node, peer: Peer) -> None:
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    put = asyncio.create_task(node.bulk.put(number, peer.put, node.region, [(0, 0, 9)], b"echo", timeout_s=PATIENCE_S))
    await asyncio.sleep(0)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert await node.notices.get() == (number, b"echo")
    await node.bulk.flush(number, timeout_s=PATIENCE_S)


async def test_close_says_goodbye(node: Node, peer: Peer) -> None:
    other = Node("other")
    number = await other.bulk.connect(node.endpoint.address, timeout_s=PATIENCE_S)
    theirs, name = await node.connected.get()
    assert name == "other"
    assert await other.bulk.close(timeout_s=PATIENCE_S)
    assert await other.bulk.close(timeout_s=PATIENCE_S)
    assert (await other.lost.get())[0] == number
    who, why = await node.lost.get()
    assert who == theirs
    assert why.startswith("other at ")
    assert why.endswith("said goodbye")
    with pytest.raises(LinkError) as closed:
        await other.bulk.notify(number, b"late", timeout_s=1)
    assert closed.value.status == "closed"


async def test_a_raising_callback_stops_nothing(peer: Peer) -> None:
    errors: list[BaseException | None] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context.get("exception")))

    def bad(peer: int, notice: bytes) -> None:
        raise ValueError("boom")

    bulk = Bulk(endpoint("ours"), bad)
    number = await bulk.connect(peer.address, timeout_s=PATIENCE_S)
    await bulk.notify(number, b"echo", timeout_s=PATIENCE_S)
    await asyncio.wait_for(_until(lambda: len(errors) == 1), PATIENCE_S)
    await bulk.notify(number, b"n", timeout_s=PATIENCE_S)
    await bulk.close(timeout_s=PATIENCE_S)
    assert isinstance(errors[0], ValueError)


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_regions_hold_their_memory_as_long_as_they_must(node: Node, peer: Peer) -> None:
    memory = np.ones(1000, np.uint8)
    alive = weakref.ref(memory)
    region = node.endpoint.add_region(memory)
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    del memory
    await node.bulk.put(number, peer.put, region, [(0, 0, 1000)], timeout_s=PATIENCE_S)
    gc.collect()
    assert alive() is not None
    node.endpoint.remove_region(region)
    del region
    node.endpoint.poll()  # lets go of what the progress thread had last
    gc.collect()
    assert alive() is None


async def test_segments_and_read_only_memory(node: Node, peer: Peer) -> None:
    segment = Segment.create("bulk", 1 << 20)
    segment.view(0, 1000, writable=True)[:] = 7
    region = node.endpoint.add_region(segment)
    assert (region.size, region.writable) == (1 << 20, True)
    number = await node.bulk.connect(peer.address, timeout_s=PATIENCE_S)
    await node.bulk.put(number, peer.put, region, [(0, 0, 1000)], timeout_s=PATIENCE_S)
    reader = node.endpoint.add_region(Segment.attach(segment.fd, read_only=True))
    assert not reader.writable
    with pytest.raises(LinkError, match="read-only"):
        node.endpoint.advertise(reader, 0, 10, "put")
    with pytest.raises(LinkError, match="read-only"):
        await node.bulk.pull(number, peer.pull, reader, [(0, 0, 10)], timeout_s=PATIENCE_S)
    with pytest.raises((BufferError, ValueError)):
        node.endpoint.add_region(b"bytes cannot be written")


async def test_no_descriptor_is_left() -> None:
    async def life() -> None:
        first, second = Node("first"), Node("second")
        await first.bulk.connect(second.endpoint.address, timeout_s=PATIENCE_S)
        await first.bulk.close(timeout_s=PATIENCE_S)
        await second.bulk.close(timeout_s=PATIENCE_S)

    await life()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await life()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
