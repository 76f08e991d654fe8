"""Every process of the queue killed at random points, by seed; and a soak. Real processes, really killed.

What must hold, whatever dies when: a row that a put promised is read whole by exactly one consumer or is still there;
nobody reads a torn row; nobody hangs; in the end every byte is free, and the memory ends with the node agent.
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from queue_crowd import row_of
from queue_house import plan

import psrl
from psrl.actor import Runtime, UnixAddress
from psrl.errors import ActorError
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.messages import GetUsage, ReleaseClient
from psrl.transfer.segments import NodeSegments, SegmentSource

CROWD = Path(__file__).with_name("queue_crowd.py")
PATIENCE_S = 90.0  # for anything that has to happen; the machine may be busy
SEEDS = (0, 1)
DEEP_SEEDS = range(200)


class Process:
    """One of the crowd, by its role; killed and started again under the same name."""

    def __init__(self, directory: str, role: str, name: str, num_clients: int) -> None:
        self.role, self.name, self.num_clients = role, name, num_clients
        paths = [f"{directory}/{each}" for each in ("node", "storage", "controller")]
        self._arguments = [role, *paths]
        if role in ("write", "read"):
            self._arguments += [f"{directory}/log", name, str(num_clients)]
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(self._begin) == "ready\n", self.name

    def _begin(self) -> str:
        environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
        command = [sys.executable, str(CROWD), *self._arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def end(self) -> None:
        """Let it finish what it has in hand."""
        assert self._process is not None
        await asyncio.to_thread(self._process.communicate, timeout=PATIENCE_S)
        assert self._process.returncode == 0, self.name

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=20)


class Crowd:
    def __init__(self, directory: str, processes: list[Process], inode: int) -> None:
        self.directory, self.processes, self.inode = directory, processes, inode

    def of(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    def log(self, what: str) -> list[str]:
        lines = (Path(self.directory) / "log").read_text().splitlines()
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == what]

    async def kill(self, process: Process, controller: QueueController) -> None:
        """And start it again; until then the node agent tells the controller."""
        process.kill()
        for i in range(process.num_clients):
            await released(controller, f"{process.name}.{i}")
        await process.start()


async def released(controller: QueueController, client: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            await controller.release_client(ReleaseClient(client))
            return
        except ActorError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def crowd(writers: int, readers: int, clients: int, num_extents: int) -> AsyncIterator[Crowd]:
    with tempfile.TemporaryDirectory(prefix="psrl") as directory, NodeSegments(f"{directory}/node") as node:
        (Path(directory) / "log").touch()
        segment = node.create_queue(plan(num_extents, max_clients=64))
        inode = os.fstat(segment.fd).st_ino
        del segment
        processes = [Process(directory, role, role, 0) for role in ("storage", "controller")]
        processes += [Process(directory, "write", f"w{i}", clients) for i in range(writers)]
        processes += [Process(directory, "read", f"r{i}", clients) for i in range(readers)]
        try:
            await processes[0].start()
            await processes[1].start()
            await asyncio.gather(*(process.start() for process in processes[2:]))
            yield Crowd(directory, processes, inode)
        finally:
            for process in processes:
                process.kill()


async def settle(at: Crowd, runtime: Runtime) -> None:
    """Stop writing, let readers read the rest, and go through the books."""
    for process in at.of("write"):
        await process.end()
    for process in at.of("read"):
        await process.end()
    storage = await runtime.connect(StorageActor, "storage", UnixAddress(f"{at.directory}/storage"), timeout_s=20)
    address = UnixAddress(f"{at.directory}/controller")
    controller = await runtime.connect(QueueController, "controller", address, timeout_s=20)
    source = SegmentSource(f"{at.directory}/node")
    queue = await TransferQueue.connect(runtime, controller, storage, source, client="referee")
    assert at.log("wrong") == []

    left = list((await queue.kv_list()).get("train", {}))
    ready = await queue.get_production_status(["x", "y"], "train")
    promised, drawn, cleared = at.log("put"), Counter(at.log("drawn")), set(at.log("clear"))
    assert len(promised) > 20
    assert [key for key in promised if key not in cleared and key not in left] == [], "lost"
    assert [key for key, times in drawn.items() if times > 1] == [], "drawn twice"
    assert all(ready[key] for key in promised if key in ready)
    rows = await queue.kv_batch_get(left, "train")
    assert all(np.array_equal(rows[i][name], row_of(key)[name]) for i, key in enumerate(left) for name in rows[i])
    del rows
    await queue.clear_partition("train")
    queue.close()
    for process in at.of("write") + at.of("read"):
        for i in range(process.num_clients):
            await released(controller, f"{process.name}.{i}")
    usage = await storage.get_usage(GetUsage())
    assert (usage.row_bytes, usage.leased_bytes) == (0, 0), usage
    assert usage.free_bytes >= usage.capacity - usage.extent_bytes  # storage's own extent, open for notes


async def run_seed(seed: int, num_kills: int, holders: Callable[[int], list[str]]) -> None:
    inode = await kill_some(random.Random(seed), num_kills)
    assert holders(inode) == [], "left behind"


async def kill_some(chance: random.Random, num_kills: int) -> int:
    """Returns the inode of the queue's memory."""
    async with crowd(writers=2, readers=2, clients=1, num_extents=96) as at, Runtime("referee") as runtime:
        address = UnixAddress(f"{at.directory}/controller")
        controller = await runtime.connect(QueueController, "controller", address, timeout_s=20)
        for _ in range(num_kills):
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            for process in chance.sample(at.processes, chance.choice((1, 1, 1, 2))):
                await at.kill(process, controller)
        await asyncio.sleep(0.3)
        await settle(at, runtime)
        return at.inode


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_is_killed_no_row_is_lost_or_torn(seed: int, holders: Callable[[int], list[str]]) -> None:
    await run_seed(seed, 5, holders)


@pytest.mark.deep
@pytest.mark.timeout(4 * 3600)
async def test_two_hundred_seeds_of_kills(
    holders: Callable[[int], list[str]], record_property: Callable[[str, object], None]
) -> None:
    record_property("seeds", "1000 to 1199")
    record_property("kills_a_seed", "6 to 12")
    for seed in DEEP_SEEDS:
        try:
            await run_seed(1000 + seed, 6, holders)
        except BaseException as error:
            error.add_note(f"seed {1000 + seed}")
            raise


async def soak(seconds: float, max_growth: int, processes: int) -> dict[str, object]:
    """16 writers and 8 readers; every row is read back equal, and nobody's memory grows. Returns what there is to say.

    `processes` writers' and half as many readers', with several clients each.
    """
    clients = 16 // processes
    async with (
        crowd(processes, processes // 2, clients, num_extents=192) as at,
        Runtime("referee") as runtime,
    ):
        await asyncio.sleep(seconds / 3)
        before = {process.name: resident(process.pid) for process in at.processes}
        await asyncio.sleep(seconds * 2 / 3)
        growth = {process.name: resident(process.pid) - before[process.name] for process in at.processes}
        await settle(at, runtime)
        assert max(growth.values()) < max_growth, growth
        return {"rows": len(at.log("clear")), "seconds_of_work": seconds, "largest_growth_bytes": max(growth.values())}


@pytest.mark.timeout(240)
async def test_soak_of_some_seconds() -> None:
    await soak(9, max_growth=16 << 20, processes=2)


@pytest.mark.deep
@pytest.mark.timeout(900)
async def test_soak_of_five_minutes(record_property: Callable[[str, object], None]) -> None:
    for name, value in (await soak(300, max_growth=4 << 20, processes=16)).items():
        record_property(name, value)


def resident(pid: int) -> int:
    """Bytes of memory of its own: without the segment, which is everybody's."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return (int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])) * 1024
