"""Queue and PSManager of a head process, reached over TCP by a worker process and a trainer (this one)."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import psrl
from psrl._core import QueueArena
from psrl.actor import Runtime, TcpAddress, Token
from psrl.control import PSManager
from psrl.control.messages import Batch, Consume, EndOfData, Finish, GetStatus, NotReady, Publish
from psrl.errors import ActorDied
from psrl.transfer import QueueController
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.segments import NodeSegments
from psrl.types import Epoch, Version

sys.path.append(str(Path(__file__).parent))  # for across_nodes, which is also a program

from across_nodes import HOST, SETTINGS, connect

SECRET = "the secret of this run"
PROGRAM = Path(__file__).parent / "across_nodes.py"
E0 = Epoch(0)


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process, and its first line."""
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1]), "PSRL_CLUSTER_TOKEN": SECRET}
    started = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), *arguments, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert started.stdout is not None
        line = (await asyncio.wait_for(started.stdout.readline(), 60)).decode().strip()
        assert line, f"{arguments} ended with {await started.wait()}"
        yield started, line
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await asyncio.wait_for(started.wait(), 10)


@pytest.fixture
def segments() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="psrl") as directory, NodeSegments(f"{directory}/node") as node:
        arena_bytes = QueueArena.segment_bytes(64, 16 * 1024, 16)
        node.create_queue(QueuePlan(arena_bytes=arena_bytes, extent_bytes=16 * 1024, num_extents=64, max_clients=16))
        yield node.socket_path


async def publish(manager: PSManager, version: int) -> None:
    await manager.publish(Publish(E0, Version(version), slot=version % 3, manifest_hash="h"))


async def test_a_run_over_tcp_to_its_end(segments: str, tmp_path: Path) -> None:
    async with (
        process("head", segments, str(tmp_path)) as (_, port),
        process("worker", port, segments, "worker") as (worker, _),
        Runtime("trainer", token=Token(SECRET)) as runtime,
    ):
        manager, queue = await connect(runtime, int(port), segments)
        version, num_rows = 0, 0
        await publish(manager, version)
        async with asyncio.timeout(60):
            while not isinstance(answer := await manager.consume(Consume(E0, version, wait_s=5.0)), EndOfData):
                if isinstance(answer, NotReady):
                    continue
                assert isinstance(answer, Batch)
                for group in answer.groups:
                    rows = await queue.kv_batch_get(list(group.keys), "train")
                    assert [len(row["tokens"]) for row in rows] == [100, 101]
                    assert all(np.array_equal(row["tokens"], np.arange(len(row["tokens"]))) for row in rows)
                    assert await queue.kv_clear(list(group.keys), "train") == 2
                    num_rows += 2
                version += 1
                await publish(manager, version)
        assert (version, num_rows) == (SETTINGS.total_steps, SETTINGS.total_steps * 4)
        counters = await manager.finish(Finish(E0, "done"))
        assert counters.trained == SETTINGS.total_steps * 2
        assert await asyncio.wait_for(worker.wait(), 20) == 0


async def test_a_killed_head_fails_what_waits_on_it_and_strangers_never_got_in(segments: str, tmp_path: Path) -> None:
    async with process("head", segments, str(tmp_path)) as (head, port):
        async with Runtime("stranger", token=Token("what strangers may guess")) as stranger:
            with pytest.raises(PermissionError, match="different ones"):
                await stranger.connect(QueueController, "controller", TcpAddress(HOST, int(port)))
        async with Runtime("trainer", token=Token(SECRET)) as runtime:
            manager, _queue = await connect(runtime, int(port), segments)
            waiting = asyncio.create_task(manager.consume(Consume(E0, 0, wait_s=20.0)))
            assert (await manager.get_status(GetStatus())).finished is False
            head.kill()
            with pytest.raises(ActorDied, match=r"manager\.consume at tcp:127\.0\.0\.1:\d+ is gone: nobody listens"):
                await asyncio.wait_for(waiting, 10)
