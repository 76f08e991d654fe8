"""What bench_rpc.py compares with PSRL's actors: packages that have calls of their own. See psrl/bench/echo.py.

Runs in a virtualenv of theirs, with this repository on its path.
"""

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from psrl.bench.echo import Ask, main, say, until_told


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


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
    async def calling(self, places: list[Any], num_bytes: int) -> AsyncIterator[Ask]:
        import grpc

        message = bytes(num_bytes)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{places[0]}") as channel:
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
    async def calling(self, places: list[Any], num_bytes: int) -> AsyncIterator[Ask]:
        import xoscar

        message = bytes(num_bytes)
        ref = await xoscar.actor_ref(address=places[0], uid="echo")
        yield lambda: ref.ask(message)


class Ray:
    """One node; `ray.get`, which is quicker than awaiting."""

    async def serve(self) -> None:
        say(None)
        await until_told()

    @contextlib.asynccontextmanager
    async def calling(self, places: list[Any], num_bytes: int) -> AsyncIterator[Ask]:
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


PEERS = {"grpc_aio": Grpc(), "xoscar": Xoscar(), "ray": Ray()}


if __name__ == "__main__":
    main(PEERS, None)  # on the loops they come with
