"""Fetcher: rows of other nodes, straight into memory of this process. How they are sent is in psrl.transfer.sender."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from psrl._core import QueueRecord
from psrl.actor import Runtime, TcpAddress, within
from psrl.actor.bulk import Bulk
from psrl.errors import ActorError, LinkError, UnknownKey
from psrl.transfer.controller import QueueController
from psrl.transfer.landing import Landing
from psrl.transfer.messages import (
    ListNodes,
    NodeAt,
    NotSent,
    NotThere,
    OpenRecords,
    RecordRef,
    SendRecords,
)
from psrl.transfer.patience import Patience
from psrl.transfer.storage import StorageActor

T = TypeVar("T")

DEFAULT_FETCH_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 15.0


class Reading:
    """Records of one node, leased there. `records` are their descriptions."""

    def __init__(self, node: int, number: int, records: list[QueueRecord]) -> None:
        self.node, self.number, self.records = node, number, records


class Fetcher:
    """Reads for one process. `bulk` is its endpoint."""

    def __init__(
        self,
        runtime: Runtime,
        controller: QueueController,
        bulk: Bulk,
        patience: Patience,
        timeout_s: float = DEFAULT_FETCH_TIMEOUT_S,
    ) -> None:
        """`timeout_s` is the deadline of one fetch."""
        self._runtime, self._controller, self._bulk = runtime, controller, bulk
        self._patience, self._timeout_s = patience, timeout_s
        self._storages: dict[int, tuple[NodeAt, StorageActor]] = {}
        self.landing = Landing(bulk)

    async def open(self, refs: dict[int, list[RecordRef]]) -> dict[int, Reading]:
        """Lease records, by node. Raises UnknownKey if one is gone, LinkError if its node is."""
        readings = await _all([self._open(node, records) for node, records in refs.items()])
        return {reading.node: reading for reading in readings}

    async def fetch(self, num_bytes: int, parts: Sequence[tuple[Reading, NDArray[np.int64]]]) -> NDArray[np.uint8]:
        """A buffer of `num_bytes` with these parts in it: of each reading rows (record, offset in it, length, place).

        Gives the leases back. Raises LinkError if a node cannot send, UnknownKey if it does not know the reading.
        """
        buffer, region = self.landing.take(num_bytes)
        assert region is not None
        if num_bytes == 0:
            return buffer
        advert = self._bulk.endpoint.advertise(region, 0, num_bytes, "put")
        try:
            await _all([self._send(reading, rows, advert) for reading, rows in parts])
        finally:
            self._bulk.endpoint.withdraw(advert)  # nothing is written there from here on
        return buffer

    async def _open(self, node: int, records: list[RecordRef]) -> Reading:
        storage = await self._storage(node)
        question = OpenRecords(tuple(records), self._timeout_s + CALL_TIMEOUT_S)
        opened = await self._ask(node, partial(within(storage, CALL_TIMEOUT_S).open_records, question))
        if isinstance(opened, NotThere):
            raise UnknownKey(opened.what)
        described = [
            QueueRecord.elsewhere(description, record.length)
            for description, record in zip(opened.descriptions, records, strict=True)
        ]
        return Reading(node, opened.reading, described)

    async def _send(self, reading: Reading, parts: NDArray[np.int64], advert: bytes) -> None:
        storage = await self._storage(reading.node)
        address = self._bulk.endpoint.address
        question = SendRecords(
            reading.number, np.ascontiguousarray(parts, "<i8").tobytes(), advert, address, self._timeout_s
        )
        sent = await self._ask(
            reading.node, partial(within(storage, self._timeout_s + CALL_TIMEOUT_S).send_records, question)
        )
        if isinstance(sent, NotThere):
            raise UnknownKey(sent.what)
        if isinstance(sent, NotSent):
            raise LinkError(f"node {reading.node} cannot send its rows to {address}: {sent.what}", sent.status)

    async def _ask(self, node: int, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._patience.insist(ask)
        except ActorError as error:
            self._storages.pop(node, None)
            raise LinkError(f"the rows of node {node} cannot be had: {error}", "peer_lost") from error

    async def _storage(self, node: int) -> StorageActor:
        if node not in self._storages:
            nodes = await self._patience.insist(lambda: self._controller.list_nodes(ListNodes()))
            found = [at for at in nodes.at if at.node == node]
            if not found:
                raise LinkError(f"the rows of node {node} cannot be had: no such node has joined", "peer_lost")
            (at,) = found
            try:
                address = TcpAddress(at.host, at.port)
                storage = await self._runtime.connect(StorageActor, at.actor, address, timeout_s=CALL_TIMEOUT_S)
            except (ActorError, OSError) as error:
                raise LinkError(f"the rows of node {node} cannot be had: {error}", "peer_lost") from error
            self._storages[node] = (at, storage)
        return self._storages[node][1]


async def _all(asked: Sequence[Awaitable[T]]) -> list[T]:
    """All results; or, when all have ended, the first error."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
