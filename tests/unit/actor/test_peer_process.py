"""Another process as the peer: killed, restarted, stopped; connections cut under calls."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from actors_under_test import Add, Added, Counter, Cut, Large, LargeBack, Occupy, Sleep, cut_callers, until

import psrl
from psrl.actor import Runtime, UnixAddress, handler, within
from psrl.errors import ActorDied, CallTimeout, WireError

PROGRAM = Path(__file__).parent / "actors_under_test.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}


@contextlib.asynccontextmanager
async def peer(path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), "unix", str(path), stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.wait(), 30)


async def test_kill_9_fails_pending_calls_at_once_and_a_new_peer_is_found_again(tmp_path: Path) -> None:
    path, reasons = tmp_path / "s", []
    address = UnixAddress(str(path))
    async with Runtime("here") as runtime:
        async with peer(path) as process:
            ref = await runtime.connect(Counter, "counter", address)
            runtime.watch(ref, reasons.append)
            assert await ref.add(Add(1)) == Added(1)
            calls = [asyncio.create_task(within(ref, 60).sleep(Sleep(60))) for _ in range(10)]
            calls += [asyncio.create_task(within(ref, 60).occupy(Occupy(wait=True))) for _ in range(10)]
            assert (await ref.add(Add(1))).total >= 2  # the calls before it are there
            process.kill()
            done, _ = await asyncio.wait(calls, timeout=30)  # not their own 60 s
            assert len(done) == 20
            for call in calls:
                with pytest.raises(ActorDied, match=rf"counter\.(sleep|occupy) at unix:{path}"):
                    await call
            await until(lambda: len(reasons) == 1)
            assert str(path) in reasons[0]
            with pytest.raises(ActorDied, match="nobody listens on"):
                await ref.add(Add(1))
        assert path.exists()  # left by the killed peer; the next one replaces it
        async with peer(path):
            assert await ref.add(Add(1)) == Added(1)
    assert len(reasons) == 1
    assert len(asyncio.all_tasks()) == 1


async def test_a_stopped_peer_costs_its_callers_their_deadline_and_bounded_memory(tmp_path: Path) -> None:
    async with Runtime("here") as runtime, peer(tmp_path / "s") as process:
        ref = await runtime.connect(Counter, "counter", UnixAddress(str(tmp_path / "s")))
        process.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        calls = [asyncio.create_task(within(ref, 0.5).large(Large(bytes(1_000_000)))) for _ in range(64)]
        await asyncio.sleep(0.1)
        (link,) = runtime._links.values()
        assert link._line.connection._transport.get_write_buffer_size() < 3_000_000
        await asyncio.wait(calls, timeout=30)
        for call in calls:
            with pytest.raises(CallTimeout):
                await call
        process.send_signal(signal.SIGCONT)
        assert await ref.add(Add(1)) == Added(1)


@contextlib.asynccontextmanager
async def pair(path: Path, **options: int) -> AsyncIterator[tuple[Runtime, Counter, Counter]]:
    """The calling runtime, the ref, and the actor itself behind a socket."""
    address, counter = UnixAddress(str(path / "s")), Counter()
    async with Runtime("there", listen=address, **options) as there, Runtime("here") as here:
        there.spawn("counter", counter)
        yield here, await here.connect(Counter, "counter", address), counter


@pytest.mark.parametrize("moment", ["while it runs", "before the answer"])
async def test_an_idempotent_call_over_broken_connections_counts_once(tmp_path: Path, moment: str) -> None:
    async with pair(tmp_path) as (_, ref, counter):
        for count in range(1, 6):
            if moment == "before the answer":
                assert await ref.occupy(Occupy(cut=True)) == Added(count)
            else:
                counter.release.clear()
                call = asyncio.create_task(ref.occupy(Occupy(wait=True)))
                for _ in range(3):
                    await until(lambda: counter.num_sleeping == 1 and bool(counter.runtime._inbound))
                    cut_callers(counter.runtime)
                counter.release.set()
                assert await call == Added(count)
        assert counter.total == 5


async def test_another_call_over_a_broken_connection_fails_by_name_and_the_next_reconnects(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with pair(tmp_path) as (here, ref, counter):
        here.watch(ref, reasons.append)
        call = asyncio.create_task(ref.sleep(Sleep(60)))
        await until(lambda: counter.num_sleeping == 1)
        with pytest.raises(ActorDied, match=r"counter\.cut at unix:.* is gone"):
            await ref.cut(Cut())
        with pytest.raises(ActorDied):
            await call
        await until(lambda: counter.num_cancelled == 1)  # its caller is gone
        assert await ref.add(Add(1)) == Added(1)
        assert reasons == []  # a broken connection is no death


async def test_a_call_over_the_frame_limit_fails_alone(tmp_path: Path) -> None:
    async with pair(tmp_path, max_frame_bytes=100_000) as (_, ref, _counter):
        other = asyncio.create_task(ref.sleep(Sleep(0.2)))
        with pytest.raises(WireError, match="over the limit of 100000 bytes"):
            await ref.large(Large(bytes(200_000)))
        with pytest.raises(WireError, match="the reply did not go out"):
            await ref.large(Large(b"", num_bytes_back=200_000))
        assert await ref.large(Large(bytes(90_000), num_bytes_back=90_000)) == LargeBack(bytes(90_000))
        assert await other == Added(0)


async def test_connect_waits_for_the_listener_and_for_the_actor(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "s"))
    async with Runtime("here") as here:
        with pytest.raises(CallTimeout, match=r"counter at unix:.* was not there within 0\.05 s: .*nobody listens"):
            await here.connect(Counter, "counter", address, timeout_s=0.05)
        connecting = asyncio.create_task(here.connect(Counter, "counter", address, timeout_s=60))
        await asyncio.sleep(0.05)
        async with Runtime("there", listen=address) as there:
            said = ""
            for patience_s in (0.05, 1.0, 20.0):  # the first may end before there is any answer
                with pytest.raises(CallTimeout) as caught:
                    await here.connect(Counter, "counter", address, timeout_s=patience_s)
                if "has no actor counter" in (said := str(caught.value)):
                    break
            assert "has no actor counter" in said
            there.spawn("counter", Counter())
            ref = await connecting
            assert await ref.add(Add(2)) == Added(2)
            assert await (await there.connect(Counter, "counter", address)).add(Add(2)) == Added(4)
        with pytest.raises(ActorDied, match=r"runtime there closed|nobody listens"):
            await ref.add(Add(2))


class Extra(msgspec.Struct, frozen=True, tag=True):
    pass


class Wider(Counter):
    @handler
    async def extra(self, message: Extra) -> None: ...


async def test_connect_refuses_an_actor_of_another_class(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, _ref, _counter):
        with pytest.raises(WireError, match="counter is a Counter here and has no handler for Extra"):
            await here.connect(Wider, "counter", UnixAddress(str(tmp_path / "s")))
