"""Fixtures of the actor tests: one actor reached in process, over a Unix socket and over TCP, on both kinds of loop."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from psrl.actor import Actor, Runtime, TcpAddress, Token, UnixAddress

sys.path.append(str(Path(__file__).parent))  # for actors_under_test, which is also a program

A = TypeVar("A", bound=Actor)

Reach = Callable[..., AbstractAsyncContextManager[Any]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@contextlib.asynccontextmanager
async def in_process(actor: A, path: Path, **options: Any) -> AsyncIterator[A]:
    async with Runtime("here", **options.pop("runtime", {})) as runtime:
        yield runtime.spawn("actor", actor, **options)


@contextlib.asynccontextmanager
async def over_unix(actor: A, path: Path, **options: Any) -> AsyncIterator[A]:
    address = UnixAddress(str(path / "s"))
    async with (
        Runtime("there", listen=address, **options.pop("runtime", {})) as there,
        Runtime("here") as here,
    ):
        there.spawn("actor", actor, **options)
        yield await here.connect(type(actor), "actor", address, timeout_s=30)


@contextlib.asynccontextmanager
async def over_tcp(actor: A, path: Path, **options: Any) -> AsyncIterator[A]:
    token = Token("known to both of them")
    async with (
        Runtime("there", listen=TcpAddress("127.0.0.1", 0), token=token, **options.pop("runtime", {})) as there,
        Runtime("here", token=token) as here,
    ):
        there.spawn("actor", actor, **options)
        yield await here.connect(type(actor), "actor", there.address, timeout_s=5)


@pytest.fixture(params=[in_process, over_unix, over_tcp], ids=["in-process", "unix", "tcp"])
def reach(request: pytest.FixtureRequest, tmp_path: Path) -> Reach:
    """`async with reach(actor, mailbox=...) as ref`: the contract of a ref, whatever the transport."""
    return lambda actor, **options: request.param(actor, tmp_path, **options)
