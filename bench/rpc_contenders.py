"""What bench_rpc.py compares: each contender echoes `bytes` between two processes.

A contender has two sides: `serve` runs until its standard input ends and says first where it is; `calling` yields an
async function that makes one round trip. The program below runs one side. Only what a contender needs is imported, so
that the peers run in a virtualenv without PSRL.

    python rpc_contenders.py serve NAME
    python rpc_contenders.py call NAME WHERE NUM_BYTES      reads how many calls to make, answers with their seconds
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Ask = Callable[[], Awaitable[object]]


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


async def until_told() -> None:
    await asyncio.to_thread(sys.stdin.read)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


# The machine's limit: frames of the same size over a bare socket, on the same loop.

ENVELOPE_BYTES = 60  # what an actor's frames add to the payload, about


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


class Raw:
    def __init__(self, over: str) -> None:
        self._over = over

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory(prefix="psrl-") as folder:
            if self._over == "tcp":
                server = await loop.create_server(RawEcho, "127.0.0.1", 0)
                say(server.sockets[0].getsockname()[1])
            else:
                server = await loop.create_unix_server(RawEcho, f"{folder}/raw")
                say(f"{folder}/raw")
            await until_told()
            server.close()

    @contextlib.asynccontextmanager
    async def calling(self, where: Any, num_bytes: int) -> AsyncIterator[Ask]:
        def make() -> RawCaller:
            return RawCaller(bytes(num_bytes + ENVELOPE_BYTES))

        loop = asyncio.get_running_loop()
        if self._over == "tcp":
            transport, caller = await loop.create_connection(make, "127.0.0.1", where)
        else:
            transport, caller = await loop.create_unix_connection(make, where)
        yield caller.ask
        transport.close()


# PSRL


class Psrl:
    def __init__(self, over: str) -> None:
        self._over = over

    async def serve(self) -> None:
        from rpc_actor import Echo

        from psrl.actor import Runtime, TcpAddress, Token, UnixAddress

        with tempfile.TemporaryDirectory(prefix="psrl-") as folder:
            listen = TcpAddress("127.0.0.1", 0) if self._over == "tcp" else UnixAddress(f"{folder}/actor")
            async with Runtime("peer", listen=listen, token=Token(bytes(32))) as runtime:
                runtime.spawn("echo", Echo())
                say(runtime.address.port if isinstance(runtime.address, TcpAddress) else f"{folder}/actor")
                await until_told()

    @contextlib.asynccontextmanager
    async def calling(self, where: Any, num_bytes: int) -> AsyncIterator[Ask]:
        from rpc_actor import Ask as Message
        from rpc_actor import Echo

        from psrl.actor import Runtime, TcpAddress, Token, UnixAddress

        message = Message(bytes(num_bytes))
        address = TcpAddress("127.0.0.1", where) if self._over == "tcp" else UnixAddress(where)
        async with Runtime("caller", token=Token(bytes(32))) as runtime:
            ref = await runtime.connect(Echo, "echo", address)
            yield lambda: ref.ask(message)


class PsrlWaiting(Psrl):
    """With a handler that awaits, so that it runs as a task."""

    @contextlib.asynccontextmanager
    async def calling(self, where: Any, num_bytes: int) -> AsyncIterator[Ask]:
        from rpc_actor import Echo, Wait

        from psrl.actor import Runtime, TcpAddress, Token

        message = Wait(bytes(num_bytes))
        async with Runtime("caller", token=Token(bytes(32))) as runtime:
            ref = await runtime.connect(Echo, "echo", TcpAddress("127.0.0.1", where))
            yield lambda: ref.wait(message)


class PsrlInProcess:
    async def serve(self) -> None:
        say(None)
        await until_told()

    @contextlib.asynccontextmanager
    async def calling(self, where: Any, num_bytes: int) -> AsyncIterator[Ask]:
        from rpc_actor import Ask as Message
        from rpc_actor import Echo

        from psrl.actor import Runtime

        message = Message(bytes(num_bytes))
        async with Runtime("caller") as runtime:
            ref = runtime.spawn("echo", Echo())
            yield lambda: ref.ask(message)


# Peers


class Grpc:
    """grpc.aio with bare bytes as messages: no protobuf to encode."""

    METHOD = "/bench.Echo/Ask"

    async def serve(self) -> None:
        import grpc

        async def ask(request: bytes, context: Any) -> bytes:
            return request

        server = grpc.aio.server()
        handlers = {"Ask": grpc.unary_unary_rpc_method_handler(ask)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
        say(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await until_told()
        await server.stop(0)

    @contextlib.asynccontextmanager
    async def calling(self, where: Any, num_bytes: int) -> AsyncIterator[Ask]:
        import grpc

        message = bytes(num_bytes)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{where}") as channel:
            call = channel.unary_unary(self.METHOD)
            yield lambda: call(message, timeout=30)


class Xoscar:
    async def serve(self) -> None:
        import xoscar

        class Echo(xoscar.Actor):  # type: ignore[misc]
            async def ask(self, payload: bytes) -> bytes:
                return payload

        pool = await xoscar.create_actor_pool(f"127.0.0.1:{free_port()}", n_process=0)
        await xoscar.create_actor(Echo, address=pool.external_address, uid="echo")
        say(pool.external_address)
        await until_told()
        await pool.stop()

    @contextlib.asynccontextmanager
    async def calling(self, where: Any, num_bytes: int) -> AsyncIterator[Ask]:
        import xoscar

        message = bytes(num_bytes)
        ref = await xoscar.actor_ref(address=where, uid="echo")
        yield lambda: ref.ask(message)


class Ray:
    """One node; `ray.get`, which is quicker than awaiting."""

    async def serve(self) -> None:
        say(None)
        await until_told()

    @contextlib.asynccontextmanager
    async def calling(self, where: Any, num_bytes: int) -> AsyncIterator[Ask]:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray

        ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)

        @ray.remote
        class Echo:
            def ask(self, payload: bytes) -> bytes:
                return payload

        message, echo = bytes(num_bytes), Echo.remote()

        async def ask() -> None:
            ray.get(echo.ask.remote(message))

        yield ask
        ray.shutdown()


CONTENDERS: dict[str, Any] = {
    "raw_tcp": Raw("tcp"),
    "raw_unix": Raw("unix"),
    "psrl_tcp": Psrl("tcp"),
    "psrl_unix": Psrl("unix"),
    "psrl_tcp_waiting": PsrlWaiting("tcp"),
    "psrl_in_process": PsrlInProcess(),
    "grpc_aio": Grpc(),
    "xoscar": Xoscar(),
    "ray": Ray(),
}
PEERS = ("grpc_aio", "xoscar", "ray")


async def call(contender: Any, where: Any, num_bytes: int) -> None:
    async with contender.calling(where, num_bytes) as ask:
        await ask()
        say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            times = []
            for _ in range(int(line)):
                start = time.perf_counter()
                await ask()
                times.append(time.perf_counter() - start)
            say(times)


def main() -> None:
    side, name, *rest = sys.argv[1:]
    if name in PEERS:
        loop_factory = None  # as they come
    else:
        import uvloop

        loop_factory = uvloop.new_event_loop
    contender = CONTENDERS[name]
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        if side == "serve":
            runner.run(contender.serve())
        else:
            runner.run(call(contender, json.loads(rest[0]), int(rest[1])))


if __name__ == "__main__":
    main()
