"""Transfers between real processes, any of which is killed at a random moment."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import psrl
from psrl._core import Segment, WeightStore
from psrl.actor import Runtime, UnixAddress
from psrl.weights.broadcast import Broadcaster, BroadcastSettings, Report
from psrl.weights.server import ParameterServer

sys.path.insert(0, str(Path(__file__).parent))
from weights_node import MANIFEST

NUM_NODES = 4
TIMEOUT_S = 60.0
BYTES = np.random.default_rng(0).integers(0, 256, MANIFEST.total_bytes, dtype=np.uint8)


def version_bytes(version: int) -> np.ndarray:
    flat = BYTES.copy()
    flat[version::1009] ^= version + 1
    return flat


class Process:
    """A node: the segment stays, its process comes and goes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.segment = Segment.create(f"weights {name}", WeightStore.required_bytes(MANIFEST.total_bytes))
        WeightStore.format(self.segment, MANIFEST.total_bytes)
        self.store = WeightStore.open(self.segment)
        self.child: subprocess.Popen[str] | None = None
        self.lives = 0

    async def start(self, runtime: Runtime) -> ParameterServer:
        self.lives += 1
        socket = str(self.folder / f"{self.name}.{self.lives}")
        script = Path(__file__).with_name("weights_node.py")
        self.child = subprocess.Popen(  # noqa: ASYNC220 - a moment
            [sys.executable, str(script), self.name, str(self.segment.fd), socket, "127.0.0.1"],
            pass_fds=[self.segment.fd],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        )
        assert await asyncio.to_thread(self.child.stdout.readline) == "ready\n"
        return await runtime.connect(ParameterServer, "weights", UnixAddress(socket), timeout_s=10)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(timeout=10)
        self.child.stdout.close()

    def publish(self, version: int) -> None:
        ticket = self.store.begin(0, version, MANIFEST.digest)
        self.store.put(ticket, 0, version_bytes(version))
        self.store.seal(ticket, MANIFEST.total_bytes)
        self.store.commit(0, version, ticket.slot)

    def version(self) -> int | None:
        """The newest version, which is whole."""
        newest = self.store.newest()
        if newest is None:
            return None
        lease = self.store.acquire("test", 0)
        self.store.verify(lease)
        assert np.array_equal(self.store.view(lease), version_bytes(newest.version)), self.name
        self.store.release(lease)
        return newest.version

    def stop_when_it_receives(self, version: int) -> None:
        """SIGSTOP, as soon as the first bytes of a version are there."""
        expected = version_bytes(version)[:4096]
        while self.store.newest().version < version:
            for index, slot in enumerate(self.store.slots()):
                if slot.state == "writing" and slot.version == version:
                    found = self.segment.view(self.store.memory_offset(index), len(expected))
                    if np.array_equal(found, expected):
                        self.child.send_signal(signal.SIGSTOP)
                        return

    def descriptors(self) -> Counter[str]:
        """What the process has open, but for sockets: links to peers come and go."""
        folder = Path(f"/proc/{self.child.pid}/fd")
        kinds = [str(entry.readlink()).split(":")[0].split(" ")[0] for entry in folder.iterdir()]
        return Counter(kind for kind in kinds if kind != "socket")


@asynccontextmanager
async def processes(
    mode: str, kind: str = "chain", call_timeout_s: float = 20.0
) -> AsyncIterator[tuple[Broadcaster, dict[str, Process], Runtime]]:
    with tempfile.TemporaryDirectory(prefix="psrl-") as folder:
        nodes = {name: Process(name, Path(folder)) for name in (f"n{i}" for i in range(NUM_NODES))}
        try:
            async with Runtime("test") as runtime:
                refs = await asyncio.gather(*(node.start(runtime) for node in nodes.values()))
                settings = BroadcastSettings(mode=mode, kind=kind, unit_bytes=256 << 10, call_timeout_s=call_timeout_s)
                yield Broadcaster(dict(zip(nodes, refs)), settings), nodes, runtime
        finally:
            for node in nodes.values():
                if node.child.poll() is None:
                    node.kill()


async def round_with_a_kill(
    broadcaster: Broadcaster,
    nodes: dict[str, Process],
    runtime: Runtime,
    version: int,
    victim: str,
    after_s: float,
) -> Report:
    """Publish at n0, kill one process in the middle of the broadcast, look, start it again, catch up."""
    nodes["n0"].publish(version)
    loop = asyncio.get_running_loop()
    started = loop.time()
    running = asyncio.ensure_future(broadcaster.broadcast("n0", 0, version, TIMEOUT_S))
    await asyncio.sleep(after_s)
    nodes[victim].kill()
    report = await running
    assert loop.time() - started < TIMEOUT_S, "it waited for its deadline"
    for name, node in nodes.items():
        assert node.version() == (version if name in report.have or name == "n0" else version - 1), (name, report)
    killed_in_time = victim in report.lost
    if victim != "n0" and killed_in_time:
        assert set(report.lost) == {victim}, report
    broadcaster.replace(victim, await nodes[victim].start(runtime))
    for name in nodes:
        caught_up = await broadcaster.catch_up(name, TIMEOUT_S)
        assert caught_up is None or not caught_up.lost, caught_up
    for name, node in nodes.items():
        assert node.version() == version, name
        assert all(slot.state in ("free", "committed") for slot in node.store.slots()), name
    return report


async def run_seed(seed: int, mode: str, kind: str, rounds: int, holders: Callable[[int], list[str]]) -> None:
    for inode in await kill_some(seed, mode, kind, rounds):
        assert holders(inode) == [], "left behind"


async def kill_some(seed: int, mode: str, kind: str, rounds: int) -> list[int]:
    """Returns the inodes of the nodes' memory."""
    chance = random.Random(seed)
    async with processes(mode, kind) as (broadcaster, nodes, runtime):
        nodes["n0"].publish(0)
        (await broadcaster.broadcast("n0", 0, 0, TIMEOUT_S)).require_all()
        before = nodes["n0"].descriptors()
        seconds = 0.05
        for version in range(1, rounds + 1):
            victim = chance.choice(sorted(nodes))
            report = await round_with_a_kill(
                broadcaster, nodes, runtime, version, victim, chance.uniform(0, 2 * seconds)
            )
            if not report.lost:
                seconds = report.seconds
        for name, node in nodes.items():
            assert not node.descriptors() - before, name
    for node in nodes.values():
        assert not any(slot.leases for slot in node.store.slots() if slot.state == "free")
    return [os.fstat(node.segment.fd).st_ino for node in nodes.values()]


@pytest.mark.parametrize(("seed", "mode", "kind"), [(0, "full", "chain"), (1, "delta", "chain"), (2, "full", "tree")])
async def test_any_process_may_be_killed(seed: int, mode: str, kind: str, holders: Callable[[int], list[str]]) -> None:
    await run_seed(seed, mode, kind, 4, holders)


@pytest.mark.deep
@pytest.mark.timeout(4 * 3600)
async def test_two_hundred_seeds_of_kills(
    holders: Callable[[int], list[str]], record_property: Callable[[str, object], None]
) -> None:
    record_property("seeds", "100 to 299")
    record_property("kills_a_seed", 2)
    for seed in range(100, 300):
        mode, kind = ("full", "delta")[seed % 2], ("chain", "tree", "star")[seed % 3]
        try:
            await run_seed(seed, mode, kind, 2, holders)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def test_a_relay_that_falls_behind_is_passed_by_and_still_gets_it() -> None:
    """Stopped in the middle and let go on when the others are whole: nobody is lost."""
    async with processes("full") as (broadcaster, nodes, _):
        nodes["n0"].publish(0)
        (await broadcaster.broadcast("n0", 0, 0, TIMEOUT_S)).require_all()
        for version in range(1, 8):  # it may be whole before it can be stopped
            nodes["n0"].publish(version)
            running = asyncio.ensure_future(broadcaster.broadcast("n0", 0, version, TIMEOUT_S))
            await asyncio.to_thread(nodes["n2"].stop_when_it_receives, version)
            while nodes["n3"].store.newest().version < version:
                await asyncio.sleep(0.01)
            nodes["n2"].child.send_signal(signal.SIGCONT)
            report = await running
            report.require_all()
            assert [node.version() for node in nodes.values()] == [version] * NUM_NODES
            if report.passed_by:
                break
        assert report.passed_by == ("n2",)


async def test_a_relay_that_stands_still_is_left_and_catches_up() -> None:
    """SIGSTOP: it neither answers nor takes bytes; the nodes behind it get the version from its predecessor."""
    async with processes("full", call_timeout_s=5.0) as (broadcaster, nodes, _):
        nodes["n0"].publish(0)
        (await broadcaster.broadcast("n0", 0, 0, TIMEOUT_S)).require_all()
        nodes["n0"].publish(1)
        running = asyncio.ensure_future(broadcaster.broadcast("n0", 0, 1, TIMEOUT_S))
        nodes["n1"].child.send_signal(signal.SIGSTOP)
        try:
            report = await running
        finally:
            nodes["n1"].child.send_signal(signal.SIGCONT)
        assert set(report.lost) == {"n1"} or not report.lost
        assert {"n2", "n3"} <= set(report.have)
        await broadcaster.catch_up("n1", TIMEOUT_S)
        assert [node.version() for node in nodes.values()] == [1] * NUM_NODES


async def test_a_broadcaster_that_dies_leaves_nothing_begun() -> None:
    async with processes("full") as (broadcaster, nodes, _):
        nodes["n0"].publish(0)
        (await broadcaster.broadcast("n0", 0, 0, TIMEOUT_S)).require_all()
        nodes["n0"].publish(1)
        running = asyncio.ensure_future(broadcaster.broadcast("n0", 0, 1, TIMEOUT_S))
        await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        fresh = Broadcaster(broadcaster._patient, broadcaster.settings)
        (await fresh.broadcast("n0", 0, 1, TIMEOUT_S)).require_all()
        assert [node.version() for node in nodes.values()] == [1] * NUM_NODES
