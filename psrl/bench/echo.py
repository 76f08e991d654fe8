"""Who echoes in `psrl-bench rpc`: PSRL's actors, and bare sockets on the same loop as the limit. A process a side.

A contender has two sides: `serve` runs until its standard input ends and says first where it is; `calling` yields an
async function that makes one round trip to each of some places, all at once.

    python -m psrl.bench.echo serve NAME
    python -m psrl.bench.echo call NAME PLACES NUM_BYTES      reads how many calls to make, answers with their seconds

Nothing but the standard library is imported before a contender needs it: `bench/rpc_contenders.py` runs other
packages' sides by `main` in virtualenvs that have no requirement of PSRL's.
"""

import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

Ask = Callable[[], Awaitable[object]]
ENVELOPE_BYTES = 60  # what an actor's frames add to the payload, about


class Contender(Protocol):
    async def serve(self) -> None: ...
    def calling(self, places: list[Any], num_bytes: int) -> contextlib.AbstractAsyncContextManager[Ask]: ...


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


async def until_told() -> None:
    await asyncio.to_thread(sys.stdin.read)


def together(asks: list[Ask]) -> Ask:
    """One call to each."""
    if len(asks) == 1:
        return asks[0]

    async def ask() -> None:
        await asyncio.gather(*(one() for one in asks))

    return ask


# -- the machine's limit ----------------------------------------------------------------------------------------------


class RawEcho(asyncio.Protocol):
    """Sends back what comes: the least that a peer on this loop can do."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class RawCaller(asyncio.Protocol):
    """Sends `frame` and waits until as many bytes are back."""

    def __init__(self, frame: bytes) -> None:
        self._frame, self._left = frame, 0

    def connection_made(self, transport: Any) -> None:
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


@contextlib.asynccontextmanager
async def connected(over: str, where: Any, num_bytes: int) -> AsyncIterator[RawCaller]:
    loop = asyncio.get_running_loop()

    def make() -> RawCaller:
        return RawCaller(bytes(num_bytes + ENVELOPE_BYTES))

    if over == "tcp":
        transport, caller = await loop.create_connection(make, "127.0.0.1", where)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        transport, caller = await loop.create_unix_connection(make, where)
    try:
        yield caller
    finally:
        transport.close()


class Raw:
    def __init__(self, over: str) -> None:
        self._over = over

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory(prefix="psrl-") as folder:
            server: asyncio.AbstractServer
            if self._over == "tcp":
                server = tcp = await loop.create_server(RawEcho, "127.0.0.1", 0)
                say(tcp.sockets[0].getsockname()[1])
            else:
                server = await loop.create_unix_server(RawEcho, f"{folder}/raw")
                say(f"{folder}/raw")
            await until_told()
            server.close()

    @contextlib.asynccontextmanager
    async def calling(self, places: list[Any], num_bytes: int) -> AsyncIterator[Ask]:
        async with contextlib.AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(connected(self._over, place, num_bytes)) for place in places]
            yield together([caller.ask for caller in callers])


# -- PSRL -------------------------------------------------------------------------------------------------------------


class Psrl:
    """`waiting`: with a handler that awaits, so that it runs as a task."""

    def __init__(self, over: str, waiting: bool = False) -> None:
        self._over, self._waiting = over, waiting

    async def serve(self) -> None:
        from psrl.actor import Runtime, TcpAddress, Token, UnixAddress
        from psrl.bench.echo_actor import Echo

        with tempfile.TemporaryDirectory(prefix="psrl-") as folder:
            listen = TcpAddress("127.0.0.1", 0) if self._over == "tcp" else UnixAddress(f"{folder}/actor")
            async with Runtime("peer", listen=listen, token=Token(bytes(32))) as runtime:
                runtime.spawn("echo", Echo())
                say(runtime.address.port if isinstance(runtime.address, TcpAddress) else f"{folder}/actor")
                await until_told()

    @contextlib.asynccontextmanager
    async def calling(self, places: list[Any], num_bytes: int) -> AsyncIterator[Ask]:
        from psrl.actor import Runtime, TcpAddress, Token, UnixAddress
        from psrl.bench.echo_actor import Ask, Echo, Wait

        async with Runtime("caller", token=Token(bytes(32))) as runtime:
            refs = [
                await runtime.connect(
                    Echo, "echo", TcpAddress("127.0.0.1", place) if self._over == "tcp" else UnixAddress(place)
                )
                for place in places
            ]
            ask, wait = Ask(bytes(num_bytes)), Wait(bytes(num_bytes))
            if self._waiting:
                yield together([lambda ref=ref: ref.wait(wait) for ref in refs])  # type: ignore[misc]
            else:
                yield together([lambda ref=ref: ref.ask(ask) for ref in refs])  # type: ignore[misc]


class PsrlInProcess:
    async def serve(self) -> None:
        say(None)
        await until_told()

    @contextlib.asynccontextmanager
    async def calling(self, places: list[Any], num_bytes: int) -> AsyncIterator[Ask]:
        from psrl.actor import Runtime
        from psrl.bench.echo_actor import Ask, Echo

        message = Ask(bytes(num_bytes))
        async with Runtime("caller") as runtime:
            refs = [runtime.spawn(f"echo {i}", Echo()) for i in range(len(places))]
            yield together([lambda ref=ref: ref.ask(message) for ref in refs])  # type: ignore[misc]


CONTENDERS: dict[str, Contender] = {
    "raw_tcp": Raw("tcp"),
    "raw_unix": Raw("unix"),
    "psrl_tcp": Psrl("tcp"),
    "psrl_unix": Psrl("unix"),
    "psrl_tcp_waiting": Psrl("tcp", waiting=True),
    "psrl_in_process": PsrlInProcess(),
}


# -- a side -----------------------------------------------------------------------------------------------------------


async def _call(contender: Contender, places: list[Any], num_bytes: int) -> None:
    async with contender.calling(places, num_bytes) as ask:
        await ask()
        say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            times = []
            for _ in range(int(line)):
                started = time.perf_counter()
                await ask()
                times.append(time.perf_counter() - started)
            say(times)


def main(contenders: Mapping[str, Contender], new_loop: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
    """Runs the side that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input says it
    side, name, *rest = sys.argv[1:]
    contender = contenders[name]
    with asyncio.Runner(loop_factory=new_loop) as runner:
        if side == "serve":
            runner.run(contender.serve())
        else:
            runner.run(_call(contender, json.loads(rest[0]), int(rest[1])))


if __name__ == "__main__":
    import uvloop

    main(CONTENDERS, uvloop.new_event_loop)
