"""A process on a node, and how it is started: `run_nodes` here, `python -m psrl.bench.node` there.

They speak in lines of JSON over the process's standard streams (`psrl.bench.messages`), which any shell carries, ssh's
too. What else a login prints is passed over. A process ends when its input ends, so none outlives who started it.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from psrl.actor import Runtime, TcpAddress, Token, run
from psrl.bench.hosts import Host
from psrl.bench.messages import LocalPlan, NodeAt, Outcome, QueueSetup, ReadPlan, SyncPlan, WeightSetup
from psrl.errors import BenchError

Setup = WeightSetup | QueueSetup
Plan = SyncPlan | LocalPlan | ReadPlan
T = TypeVar("T")

START_S = 120.0
_END_S = 10.0


def token() -> str:
    return secrets.token_hex(16)


def run_nodes(
    hosts: Sequence[Host],
    setups: Sequence[Setup],
    plan: Callable[[tuple[NodeAt, ...]], Plan],
    *,
    python: str,
    timeout_s: float,
) -> Outcome:
    """Start a process on each host; the first is the lead and gets the `plan`, made of where the others are.

    Raises BenchError naming the host whose process did not start, or ended early.
    """
    with contextlib.ExitStack() as stack:
        processes = [_Process(stack, host, python, setup) for host, setup in zip(hosts, setups, strict=True)]
        places = [process.hear(NodeAt, START_S) for process in processes]
        processes[0].say(plan(tuple(places[1:])))
        return processes[0].hear(Outcome, timeout_s)


class _Process:
    def __init__(self, stack: contextlib.ExitStack, host: Host, python: str, setup: Setup) -> None:
        self._host = host
        command = [*host.shell, f"exec {shlex.quote(python)} -m psrl.bench.node"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise BenchError(f"{host.name}: {command[0]}: {error.strerror}") from error
        stack.callback(self._end)
        self._unread = b""
        self.say(setup)

    def say(self, value: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(value) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BenchError(f"{self._host.name}: its process ended early; what it said is above") from error

    def hear(self, kind: type[T], timeout_s: float) -> T:
        late = threading.Timer(timeout_s, self._process.kill)
        late.start()
        try:
            while True:
                assert self._process.stdout is not None
                line = self._process.stdout.readline()
                if not line:
                    what = (
                        "ended early; what it said is above" if late.is_alive() else f"said nothing in {timeout_s:g} s"
                    )
                    raise BenchError(f"{self._host.name}: its process {what}")
                with contextlib.suppress(msgspec.DecodeError):  # what a login prints
                    return msgspec.json.decode(line, type=kind)
        finally:
            late.cancel()

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- there ------------------------------------------------------------------------------------------------------------

Hear = Callable[[], Awaitable[Plan | None]]
"""The plan, for the lead; None for all others, when it is time to end."""


def say(value: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def listening(setup: Setup) -> Runtime:
    return Runtime(setup.name, listen=TcpAddress(setup.host, 0), token=Token(bytes.fromhex(setup.token)))


def port_of(runtime: Runtime) -> int:
    assert isinstance(runtime.address, TcpAddress)
    return runtime.address.port


async def _main() -> None:
    setup = msgspec.json.decode(await asyncio.to_thread(sys.stdin.buffer.readline), type=Setup)
    os.environ.update(setup.environment)
    behave: Callable[[Any, Hear], Awaitable[None]]
    if isinstance(setup, WeightSetup):
        from psrl.bench.weight_node import be_node as behave
    else:
        from psrl.bench.queue_node import be_node as behave

    async def hear() -> Plan | None:
        line = await asyncio.to_thread(sys.stdin.buffer.readline)
        return msgspec.json.decode(line, type=Plan) if line else None

    await behave(setup, hear)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input says it
    run(_main())
