"""The actor that the actor tests talk to. Also a program: a peer process that serves or calls it until it is killed.

python actors_under_test.py unix PATH
python actors_under_test.py tcp HOST            says the port
python actors_under_test.py call HOST PORT      holds one call to a `Sleep`
"""

import asyncio
import sys
from collections.abc import Callable

import msgspec

from psrl.actor import Actor, Address, Runtime, TcpAddress, Token, UnixAddress, handler, run, within
from psrl.errors import ConfigError

TOKEN = Token("of the peers of these tests")
HOST_TIMEOUT_S = 2.0


class Add(msgspec.Struct, frozen=True, tag=True):
    amount: int


class Added(msgspec.Struct, frozen=True, tag=True):
    total: int


class TooMuch(msgspec.Struct, frozen=True, tag=True):
    limit: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    pass


class Sleep(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class Break(msgspec.Struct, frozen=True, tag=True):
    how: str


class Occupy(msgspec.Struct, frozen=True, tag=True):
    """Count once. `wait`: until the actor's `release`. `cut`: break the callers' connections just before the answer."""

    wait: bool = False
    cut: bool = False


class Large(msgspec.Struct, frozen=True, tag=True):
    payload: bytes
    num_bytes_back: int = 0


class LargeBack(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Break the callers' connections before the answer."""


class Fall(msgspec.Struct, frozen=True, tag=True):
    """End the actor by an error in one of its own tasks."""


class Counter(Actor):
    def __init__(self) -> None:
        self.total = 0
        self.num_sleeping = 0
        self.num_cancelled = 0
        self.num_large = 0
        self.release = asyncio.Event()
        self.events: list[str] = []

    async def started(self) -> None:
        self.events.append("started")

    async def stopped(self) -> None:
        self.events.append("stopped")

    @handler
    async def add(self, message: Add) -> Added | TooMuch:
        if message.amount > 100:
            return TooMuch(100)
        self.total += message.amount
        return Added(self.total)

    @handler
    async def forget(self, message: Forget) -> None:
        self.total = 0

    @handler
    async def sleep(self, message: Sleep) -> Added:
        self.num_sleeping += 1
        try:
            await asyncio.sleep(message.seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cleaning up may take a while
            self.num_cancelled += 1
            raise
        finally:
            self.num_sleeping -= 1
        return Added(self.total)

    @handler(idempotent=True, timeout_s=20.0)
    async def occupy(self, message: Occupy) -> Added:
        self.num_sleeping += 1
        self.total += 1
        total = self.total
        if message.wait:
            await self.release.wait()
        self.num_sleeping -= 1
        if message.cut:
            cut_callers(self.runtime)
        return Added(total)

    @handler
    async def cut(self, message: Cut) -> Added:
        cut_callers(self.runtime)
        return Added(self.total)

    @handler
    async def large(self, message: Large) -> LargeBack:
        self.num_large += 1
        return LargeBack(bytes(message.num_bytes_back))

    @handler
    async def fall(self, message: Fall) -> None:
        async def falling() -> None:
            raise ZeroDivisionError("the floor")

        self.spawn(falling(), "falling")
        await asyncio.sleep(60)

    @handler
    async def break_it(self, message: Break) -> Added:
        if message.how == "config":
            raise ConfigError("set `a.b` to 1")
        if message.how == "cancel":
            raise asyncio.CancelledError
        if message.how == "surrogate":
            raise ValueError("half a pair: \udc00")
        if message.how == "reply":
            return message  # type: ignore[return-value]
        raise ZeroDivisionError(message.how)


def cut_callers(runtime: Runtime) -> None:
    for inbound in list(runtime._inbound):
        inbound.connection.abort("cut by the test")


async def until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.001)


async def serve(address: Address) -> None:
    async with Runtime("peer", listen=address, token=TOKEN, host_timeout_s=HOST_TIMEOUT_S) as runtime:
        runtime.spawn("counter", Counter())
        print(runtime.address.port if isinstance(runtime.address, TcpAddress) else "ready", flush=True)
        await asyncio.sleep(300)


async def call(address: Address) -> None:
    async with Runtime("peer", token=TOKEN, host_timeout_s=HOST_TIMEOUT_S) as runtime:
        ref = await runtime.connect(Counter, "counter", address)
        print("ready", flush=True)
        await within(ref, 60).sleep(Sleep(60))


def main() -> None:
    match sys.argv[1:]:
        case ["unix", path]:
            run(serve(UnixAddress(path)))
        case ["tcp", host]:
            run(serve(TcpAddress(host, 0)))
        case ["call", host, port]:
            run(call(TcpAddress(host, int(port))))


if __name__ == "__main__":
    main()
