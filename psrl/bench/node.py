"""A process on a node, and how it is started: `run_nodes` here, `python -m psrl.bench.node` there.

They speak as `psrl.bench.process` does, in the messages of `psrl.bench.messages`.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from psrl.actor import Runtime, TcpAddress, Token, run
from psrl.bench.hosts import Host
from psrl.bench.messages import LocalPlan, NodeAt, Outcome, QueueSetup, ReadPlan, SyncPlan, WeightSetup
from psrl.bench.process import Process

Setup = WeightSetup | QueueSetup
Plan = SyncPlan | LocalPlan | ReadPlan

START_S = 120.0
_END_S = 3.0
_LINE_BYTES = 64 << 20


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
        processes = []
        for host, setup in zip(hosts, setups, strict=True):
            command = [*host.shell, f"exec {shlex.quote(python)} -m psrl.bench.node"]
            processes.append(stack.enter_context(Process(host.name, command)))
            processes[-1].say(setup)
        places = [process.hear(NodeAt, START_S) for process in processes]
        processes[0].say(plan(tuple(places[1:])))
        outcome: Outcome = processes[0].hear(Outcome, timeout_s)
        return outcome


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
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = msgspec.json.decode(await reader.readline(), type=Setup)
    os.environ.update(setup.environment)
    behave: Callable[[Any, Hear], Coroutine[Any, Any, None]]
    if isinstance(setup, WeightSetup):
        from psrl.bench.weight_node import be_node as behave
    else:
        from psrl.bench.queue_node import be_node as behave
    plans: asyncio.Queue[Plan | None] = asyncio.Queue()
    work = asyncio.create_task(behave(setup, plans.get))
    listening = asyncio.create_task(_listen(reader, plans, work))
    with contextlib.suppress(asyncio.CancelledError):  # told to end in the middle of a plan
        await work
    listening.cancel()


async def _listen(
    reader: asyncio.StreamReader, plans: "asyncio.Queue[Plan | None]", work: "asyncio.Task[None]"
) -> None:
    """Passes on what comes. At the end of the input there is some time to end in order, then in any way."""
    while line := await reader.readline():
        plans.put_nowait(msgspec.json.decode(line, type=Plan))
    plans.put_nowait(None)
    last = threading.Timer(3 * _END_S, os._exit, [1])  # also where a thread is in the middle of a long send
    last.daemon = True
    last.start()
    await asyncio.sleep(_END_S)
    work.cancel()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input says it
    run(_main())
