"""Publishing and pulling from an event loop, as programs without PSManager do."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from psrl._core import Segment, WeightStore
from psrl.errors import StaleMessage, StorageError
from psrl.types import Epoch, Version
from psrl.weights.client import WeightClient
from psrl.weights.publish import describe

MakeStore = Callable[[int], tuple[WeightStore, Segment]]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 3))


def clients(make_store: MakeStore) -> tuple[WeightClient, WeightClient]:
    manifest = describe(model().state_dict().items())
    _, segment = make_store(manifest.total_bytes)
    return WeightClient(segment, manifest, "trainer"), WeightClient(segment, manifest, "consumer")


async def test_another_client_gets_what_was_published(make_store: MakeStore) -> None:
    trainer, consumer = clients(make_store)
    theirs, mine = model(), model()
    waiting = asyncio.create_task(pulled_into(consumer, mine, 1))
    await asyncio.sleep(0.05)  # the loop goes on while a pull waits
    await trainer.publish(Version(1), theirs.state_dict().items())
    assert await waiting == 1
    assert all(torch.equal(value, mine.state_dict()[name]) for name, value in theirs.state_dict().items())
    async with consumer.pull(Version(1), 10, views=True) as pulled:
        assert torch.equal(pulled.tensors["0.weight"], theirs.state_dict()["0.weight"])
    assert [slot.leases for slot in trainer.store.slots()] == [0, 0, 0]


async def pulled_into(client: WeightClient, into: torch.nn.Module, version: int) -> int:
    async with client.pull(Version(version), 30) as pulled:
        into.load_state_dict(dict(pulled.tensors))
        return pulled.version


async def test_what_fails_leaves_the_version_before(make_store: MakeStore) -> None:
    trainer, consumer = clients(make_store)
    theirs = model()
    await trainer.publish(Version(1), theirs.state_dict().items())
    with pytest.raises(StorageError, match=r"0\.bias, .* is missing"):
        await trainer.publish(Version(2), [("0.weight", theirs.state_dict()["0.weight"])])
    with pytest.raises(StorageError, match="version 3"):
        await trainer.publish(Version(3), theirs.state_dict().items())
    async with consumer.pull(Version(0), 10) as pulled:
        assert pulled.version == 1
    await trainer.publish(Version(7), theirs.state_dict().items(), epoch=Epoch(1))  # the program started anew
    with pytest.raises(StaleMessage):
        await trainer.publish(Version(2), theirs.state_dict().items())


async def test_a_pull_that_waits_can_be_cancelled_and_its_body_may_fail(make_store: MakeStore) -> None:
    trainer, consumer = clients(make_store)
    for pause in (0.0, 0.1):
        waiting = asyncio.create_task(pulled_into(consumer, model(), 1))
        await asyncio.sleep(pause)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 10)
    with pytest.raises(StorageError, match="no version >= 1"):
        await asyncio.wait_for(pulled_into_within(consumer, 0.05), 10)
    await trainer.publish(Version(1), model().state_dict().items())
    with pytest.raises(ZeroDivisionError):
        async with consumer.pull(Version(1), 10, views=True):
            raise ZeroDivisionError
    assert await pulled_into(consumer, model(), 1) == 1
    assert [slot.leases for slot in trainer.store.slots()] == [0, 0, 0]


async def pulled_into_within(client: WeightClient, timeout_s: float) -> None:
    async with client.pull(Version(1), timeout_s):
        pass


async def test_a_cancelled_publish_leaves_a_free_slot(make_store: MakeStore) -> None:
    trainer, consumer = clients(make_store)
    theirs = model().state_dict()
    await trainer.publish(Version(1), theirs.items())
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        assert go_on.wait(30)
        yield from theirs.items()

    publishing = asyncio.create_task(trainer.publish(Version(2), slowly()))
    await asyncio.to_thread(begun.wait, 30)
    publishing.cancel()
    await asyncio.sleep(0.05)
    assert not publishing.done()  # the tensors are still being read
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(publishing, 10)
    await trainer.publish(Version(2), theirs.items())
    assert await pulled_into(consumer, model(), 2) == 2
