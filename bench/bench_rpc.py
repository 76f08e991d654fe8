"""What does a call between two processes cost, against the socket itself?

Round trips one after another, in one run, interleaved in rounds: a call to an actor over a Unix socket; a raw asyncio
echo of a frame of the same size over a Unix socket; a call to an actor in the same process. Both peers live in one
other process, all loops are uvloop. Prints one JSON object; `ratio` is the actor call's p50 over the echo's p50.

    python bench/bench_rpc.py [--rounds N] [--calls N] [--bytes N]
"""

import argparse
import asyncio
import contextlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from psrl.actor import Actor, Runtime, UnixAddress, handler, run

ROOT = Path(__file__).resolve().parents[1]


class Ask(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Echo(Actor):
    @handler
    async def ask(self, message: Ask) -> Answer:
        return Answer(message.payload)


class RawEcho(asyncio.Protocol):
    """Sends back what comes: the least that a peer on this loop can do."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class RawCaller(asyncio.Protocol):
    """Sends `frame` and waits until as many bytes are back."""

    def __init__(self, frame: bytes) -> None:
        self._frame, self._left = frame, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left == 0:
            self._back.set_result(None)

    async def ask(self) -> None:
        self._left = len(self._frame)
        self._back = asyncio.get_running_loop().create_future()
        self._transport.write(self._frame)
        await self._back


async def serve(folder: Path) -> None:
    """The other process: both peers, until it is told to end."""
    server = await asyncio.get_running_loop().create_unix_server(RawEcho, str(folder / "raw"))
    async with Runtime("peer", listen=UnixAddress(str(folder / "actor"))) as runtime:
        runtime.spawn("echo", Echo())
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    server.close()


async def measure(ask: Callable[[], Awaitable[object]], num_calls: int) -> list[float]:
    """Seconds of each of `num_calls` round trips."""
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        await ask()
        times.append(time.perf_counter() - start)
    return times


async def compare(folder: Path, rounds: int, num_calls: int, num_bytes: int) -> dict[str, object]:
    message = Ask(bytes(num_bytes))
    frame = bytes(len(msgspec.msgpack.encode(message)) + 40)  # about what an envelope adds
    _, raw = await asyncio.get_running_loop().create_unix_connection(lambda: RawCaller(frame), str(folder / "raw"))
    async with Runtime("caller") as runtime:
        remote = await runtime.connect(Echo, "echo", UnixAddress(str(folder / "actor")))
        local = runtime.spawn("echo", Echo())
        asks = {"actor": lambda: remote.ask(message), "raw": raw.ask, "in_process": lambda: local.ask(message)}
        times: dict[str, list[float]] = {name: [] for name in asks}
        for ask in asks.values():
            await measure(ask, num_calls // 10)  # warm
        for _ in range(rounds):
            for name, ask in asks.items():
                times[name] += await measure(ask, num_calls)
        concurrent = []
        for _ in range(rounds):
            start = time.perf_counter()
            await asyncio.gather(*(remote.ask(message) for _ in range(1000)))
            concurrent.append(time.perf_counter() - start)
    p50 = {name: sorted(found)[len(found) // 2] * 1e6 for name, found in times.items()}
    return {
        "bytes": num_bytes,
        "actor_p50_us": round(p50["actor"], 1),
        "raw_p50_us": round(p50["raw"], 1),
        "in_process_p50_us": round(p50["in_process"], 1),
        "ratio": round(p50["actor"] / p50["raw"], 2),
        "concurrent_us_per_call": round(sorted(concurrent)[rounds // 2] * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=300, help="of each kind in a round")
    parser.add_argument("--bytes", type=int, default=100, help="payload of a message")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        run(serve(options.serve))
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psrl-")))
        command = [sys.executable, __file__, "--serve", str(folder)]
        peer = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT))
        stack.callback(peer.terminate)
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"ready\n"
        result = run(compare(folder, options.rounds, options.calls, options.bytes))
    print(json.dumps({"bench": "rpc", **result, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
