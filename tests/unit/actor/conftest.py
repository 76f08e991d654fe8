"""Fixtures of the actor tests: one actor reached in process and over a Unix socket, on asyncio's loop and on uvloop."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from psrl.actor import Actor, Runtime, UnixAddress

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


@pytest.fixture(params=[in_process, over_unix], ids=["in-process", "unix"])
def reach(request: pytest.FixtureRequest, tmp_path: Path) -> Reach:
    """`async with reach(actor, mailbox=...) as ref`: the contract of a ref, whatever the transport."""
    return lambda actor, **options: request.param(actor, tmp_path, **options)
