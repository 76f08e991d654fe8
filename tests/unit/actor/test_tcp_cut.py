"""A host that goes away without a word: a peer in a network namespace of its own, whose cable is pulled."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from actors_under_test import HOST_TIMEOUT_S, TOKEN, Add, Added, Counter, Occupy, Sleep, until

import psrl
from psrl.actor import Runtime, TcpAddress, tcp, within
from psrl.clock import now
from psrl.errors import ActorDied, CallTimeout

PROGRAM = Path(__file__).parent / "actors_under_test.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
SLACK_S = 4.0
"""The kernel's timers count whole seconds, and this machine may be busy."""


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Cable:
    """From this host (`near`) to another one (`far`)."""

    name: str
    near: str
    far: str

    def pull(self) -> None:
        ip("-n", self.name, "link", "set", "far", "down")

    def plug(self) -> None:
        ip("-n", self.name, "link", "set", "far", "up")


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    name, net = f"psrl{os.getpid() % 100000}", f"10.213.{os.getpid() % 250}"
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "far", "netns", name)
        ip("addr", "add", f"{net}.1/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{net}.2/30", "dev", "far")
        ip("-n", name, "link", "set", "far", "up")
        yield Cable(name, f"{net}.1", f"{net}.2")
    finally:
        ip("link", "del", name, check=False)
        ip("netns", "del", name)


@contextlib.asynccontextmanager
async def peer(cable: Cable, *arguments: str) -> AsyncIterator[str]:
    """A process on the other host; yields its first line."""
    process = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", cable.name, sys.executable, str(PROGRAM), *arguments),
        stdout=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        yield (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.wait(), 10)


async def test_calls_to_a_host_that_is_cut_off_fail_in_time_and_work_again_after(cable: Cable) -> None:
    reasons: list[str] = []
    async with (
        peer(cable, "tcp", cable.far) as port,
        Runtime("here", token=TOKEN, host_timeout_s=HOST_TIMEOUT_S) as here,
    ):
        ref = await here.connect(Counter, "counter", TcpAddress(cable.far, int(port)))
        here.watch(ref, reasons.append)
        assert await ref.add(Add(1)) == Added(1)
        patient = within(ref, 60)
        ordinary = [asyncio.create_task(patient.sleep(Sleep(60))) for _ in range(5)]
        again = [asyncio.create_task(patient.occupy(Occupy(wait=True))) for _ in range(5)]
        assert (await ref.add(Add(1))).total >= 2  # the calls before it are there
        cable.pull()
        start = now()
        with pytest.raises(CallTimeout):
            await within(ref, 0.5).add(Add(100))  # never beyond its own deadline
        assert now() - start < SLACK_S
        done, _ = await asyncio.wait(ordinary, timeout=HOST_TIMEOUT_S + SLACK_S)
        assert len(done) == 5
        assert now() - start >= HOST_TIMEOUT_S / 2
        for call in ordinary:
            with pytest.raises(ActorDied, match=r"counter\.sleep at tcp:.* is gone"):
                await call
        done, _ = await asyncio.wait(again, timeout=tcp.CONNECT_TIMEOUT_S + SLACK_S)  # it is looked for once more
        assert len(done) == 5
        for call in again:
            with pytest.raises(ActorDied, match=r"counter\.occupy at tcp:.* is gone: tcp:.* cannot be reached"):
                await call
        await until(lambda: len(reasons) == 1)
        with pytest.raises((CallTimeout, ActorDied)):
            await within(ref, 0.2).add(Add(100))
        cable.plug()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(ActorDied, CallTimeout):
                    reply = await within(ref, 2.0).add(Add(1))
                    break
        assert isinstance(reply, Added)  # the same life goes on
        assert reply.total >= 8


async def test_an_idle_connection_to_a_host_that_is_cut_off_is_noticed_too(cable: Cable) -> None:
    reasons: list[str] = []
    async with (
        peer(cable, "tcp", cable.far) as port,
        Runtime("here", token=TOKEN, host_timeout_s=HOST_TIMEOUT_S) as here,
    ):
        here.watch(await here.connect(Counter, "counter", TcpAddress(cable.far, int(port))), reasons.append)
        await asyncio.sleep(0.2)
        cable.pull()
        await until(lambda: len(reasons) == 1, timeout_s=HOST_TIMEOUT_S + tcp.CONNECT_TIMEOUT_S + SLACK_S)
        assert "counter at tcp:" in reasons[0]


async def test_a_listener_notices_that_its_callers_host_is_gone(cable: Cable) -> None:
    counter = Counter()
    listen = TcpAddress(cable.near, 0)
    async with Runtime("there", listen=listen, token=TOKEN, host_timeout_s=HOST_TIMEOUT_S) as there:
        there.spawn("counter", counter)
        assert isinstance(there.address, TcpAddress)
        async with peer(cable, "call", cable.near, str(there.address.port)) as line:
            assert line == "ready"
            await until(lambda: counter.num_sleeping == 1)
            cable.pull()
            await until(lambda: counter.num_cancelled == 1, timeout_s=HOST_TIMEOUT_S + SLACK_S)
            assert there._inbound == set()


async def test_a_host_that_was_never_there_costs_a_call_its_deadline_at_most(cable: Cable) -> None:
    cable.pull()
    async with Runtime("here", token=TOKEN) as here:
        start = now()
        with pytest.raises(CallTimeout, match=r"counter at tcp:.* was not there within 1 s"):
            await here.connect(Counter, "counter", TcpAddress(cable.far, 4711), timeout_s=1)
        assert now() - start < 1 + SLACK_S
