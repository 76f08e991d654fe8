"""Runtimes: names, ends, refs from outside the loop, forks."""

import asyncio
import copy
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from actors_under_test import Add, Added, Break, Counter, Occupy, Sleep, until

import psrl
from psrl.actor import BlockingRuntime, Runtime, UnixAddress, run, within
from psrl.errors import ActorDied, CallTimeout, ConfigError, RemoteError


async def test_a_name_and_an_actor_are_used_once() -> None:
    async with Runtime("here") as runtime:
        counter = Counter()
        ref = runtime.spawn("counter", counter)
        with pytest.raises(ValueError, match="already has an actor counter"):
            runtime.spawn("counter", Counter())
        with pytest.raises(ValueError, match="an actor lives once"):
            runtime.spawn("another", counter)
        with pytest.raises(ValueError, match="room for at least one call"):
            runtime.spawn("tiny", Counter(), mailbox=0)
        with pytest.raises(TypeError, match="a ref belongs to its runtime"):
            copy.copy(ref)
        with pytest.raises(TypeError, match="is no ref"):
            within(counter, 1.0)
        assert (counter.name, counter.runtime) == ("counter", runtime)


async def test_a_runtime_is_used_while_it_is_open() -> None:
    runtime = Runtime("here")
    with pytest.raises(RuntimeError, match="runtime here is not entered"):
        runtime.spawn("counter", Counter())
    async with runtime:
        ref = runtime.spawn("counter", Counter())
    with pytest.raises(RuntimeError, match="runtime here is closed"):
        runtime.spawn("counter", Counter())
    with pytest.raises(ActorDied, match="runtime here closed"):
        await ref.add(Add(1))
    with pytest.raises(RuntimeError, match="was entered before"):
        await runtime.__aenter__()
    with pytest.raises(ConfigError, match="max_frame_bytes must be from 65536"):
        Runtime("small", max_frame_bytes=10)


async def test_a_failed_actor_can_be_spawned_again_under_its_name() -> None:
    class Short(Counter):
        async def started(self) -> None:
            raise OSError("gone")

    async with Runtime("here") as runtime:
        runtime.spawn("counter", Short())
        assert (await asyncio.wait_for(runtime.wait_failed(), 30)).actor == "counter"
        assert await runtime.spawn("counter", Counter()).add(Add(1)) == Added(1)


async def test_a_task_that_will_not_end_is_named_and_closing_goes_on(caplog) -> None:
    release = asyncio.Event()

    class Stubborn(Counter):
        async def started(self) -> None:
            self.spawn(self.cling(), "clinging")
            await super().started()

        async def cling(self) -> None:
            self.events.append("clings")
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

    runtime = Runtime("here")
    await runtime.__aenter__()
    other, stubborn = Counter(), Stubborn()
    runtime.spawn("other", other)
    runtime.spawn("stubborn", stubborn)
    await until(lambda: other.events == ["started"] and "clings" in stubborn.events)
    await runtime.close(timeout_s=0.1)
    assert "actor stubborn did not stop in" in caplog.text
    assert "stubborn/clinging" in caplog.text
    await until(lambda: other.events == ["started", "stopped"])
    release.set()
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_an_error_in_stopped_is_logged_and_closing_goes_on(caplog) -> None:
    class Sour(Counter):
        async def stopped(self) -> None:
            raise OSError("sour")

    sour = Sour()
    async with Runtime("here") as runtime:
        runtime.spawn("sour", sour)
        await until(lambda: sour.events == ["started"])
    assert "actor sour: stopped() failed" in caplog.text


def test_a_blocking_runtime_answers_while_its_thread_computes(tmp_path: Path) -> None:
    address, counter = UnixAddress(str(tmp_path / "s")), Counter()
    with BlockingRuntime("trainer", listen=address) as blocking:

        async def spawn() -> Counter:
            return blocking.runtime.spawn("counter", counter)

        ref = blocking.call(spawn(), timeout_s=30)
        assert blocking.call(ref.add(Add(2)), timeout_s=30) == Added(2)
        with pytest.raises(RemoteError, match="boom"):
            blocking.call(ref.break_it(Break("boom")), timeout_s=30)
        with pytest.raises(CallTimeout, match="no result on runtime trainer within"):
            blocking.call(ref.sleep(Sleep(60)), timeout_s=0.05)
        with pytest.raises(CallTimeout, match=r"counter\.sleep did not answer"):
            blocking.call(within(ref, 0.05).sleep(Sleep(60)), timeout_s=30)

        async def ask_from_elsewhere() -> Added:
            async with Runtime("elsewhere") as elsewhere:
                other = await elsewhere.connect(Counter, "counter", address)
                reply = await other.add(Add(1))
                assert isinstance(reply, Added)
                return reply

        assert run(ask_from_elsewhere()) == Added(3)  # this thread's own loop; the runtime answers on its own

        async def call_itself() -> None:
            blocking.call(ref.add(Add(1)), timeout_s=30)

        with pytest.raises(RuntimeError, match="would wait for its own thread"):
            blocking.call(call_itself(), timeout_s=30)

        def close_during_the_call() -> None:
            while counter.total == 3:
                time.sleep(0.001)
            blocking.close()

        closing = threading.Thread(target=close_during_the_call, daemon=True)
        closing.start()
        with pytest.raises(ActorDied, match="runtime trainer closed"):
            blocking.call(ref.occupy(Occupy(wait=True)), timeout_s=60)
        closing.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "runtime trainer"]
    assert not (tmp_path / "s").exists()
    with pytest.raises(ActorDied, match="does not run"):
        blocking.call(ref.add(Add(1)), timeout_s=30)


def test_a_blocking_runtime_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the kernel allows"), BlockingRuntime("x", UnixAddress("/tmp/" + "x" * 200)):
        pass


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from psrl.actor import BlockingRuntime
from psrl.errors import ActorDied
sys.path.insert(0, sys.argv[1])
from actors_under_test import Add, Counter
with BlockingRuntime("parent") as blocking:
    async def spawn():
        return blocking.runtime.spawn("counter", Counter())
    ref = blocking.call(spawn(), 30)
    child = os.fork()
    if child == 0:
        try:
            blocking.call(ref.add(Add(1)), 30)
        except ActorDied:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print(blocking.call(ref.add(Add(1)), 30).total)
"""


def test_a_forked_child_is_told_at_once() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(Path(__file__).parent)], env=environment, capture_output=True, timeout=110
    )
    assert (done.returncode, done.stdout) == (0, b"1\n"), done.stderr


def test_importing_brings_neither_torch_nor_uvloop() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    program = "import psrl.actor, sys; assert not {'torch', 'uvloop', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=110)
