"""WeightClient: publishes and pulls versions from an asyncio loop, for programs without PSManager.

    segments.create_weights(manifest.total_bytes)                              # psrl.transfer.segments, once per node
    weights = WeightClient(segments.fetch(WEIGHTS), manifest, "trainer")       # in each process of the node
    await weights.publish(Version(1), model.state_dict().items())

    async with weights.pull(Version(1), timeout_s=30) as pulled:
        model.load_state_dict(dict(pulled.tensors))

Here who publishes also commits, so one process of all nodes does. To other nodes versions go by a ParameterServer on
each (`psrl.weights.server`) and a Broadcaster (`psrl.weights.broadcast`).
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from psrl._core import Segment
from psrl.types import Epoch, Version
from psrl.weights.manifest import Manifest
from psrl.weights.publish import Named, WeightPublisher
from psrl.weights.stage import Device
from psrl.weights.store import WeightStore
from psrl.weights.subscribe import Pulled, WeightSubscriber

CANCEL_AGAIN_S = 0.02


class WeightClient:
    """One process's way to the versions in `segment`. `client` is its name, under which its leases are counted."""

    def __init__(self, segment: Segment, manifest: Manifest, client: str, device: Device | None = None) -> None:
        """`device` is where pulled tensors are wanted; the host if None. Raises StorageError unless the segment is laid
        out for the manifest's versions."""
        self.store = WeightStore.open(segment)
        self.manifest = manifest
        self._publisher = WeightPublisher(self.store, manifest)
        self._client, self._device = client, device
        self._subscriber: WeightSubscriber | None = None

    async def publish(self, version: Version, tensors: Iterable[Named], *, epoch: Epoch = Epoch(0)) -> None:
        """Write a version, and make it the newest one of this node when it is whole.

        `tensors` must stay as they are until this returns. Versions of an epoch follow each other; a program that
        starts anew over the same segment takes a higher epoch, and begins where it likes. Raises StorageError or
        StaleMessage; the version before is then newest, as when this is cancelled.
        """
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(None, self._publisher.write, epoch, version, tensors)
        try:
            slot = await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # the tensors are the caller's again
            if writing.exception() is None:
                self.store.abandon(writing.result())
            raise
        self.store.commit(epoch, version, slot)

    @asynccontextmanager
    async def pull(
        self, min_version: Version, timeout_s: float, *, min_epoch: Epoch = Epoch(0), views: bool = False
    ) -> AsyncIterator[Pulled]:
        """WeightSubscriber.pull, while the loop goes on: the newest version, waiting for one of at least `min_version`.

        Cancelled, it stops after the chunk in flight.
        """
        if self._subscriber is None:
            self._subscriber = WeightSubscriber(self.store, self.manifest, self._client, self._device)
        pull = self._subscriber.pull(min_version, timeout_s, min_epoch=min_epoch, views=views)
        entering = asyncio.get_running_loop().run_in_executor(None, pull.__enter__)
        try:
            pulled = await asyncio.shield(entering)
        except asyncio.CancelledError:
            while not entering.done():  # its thread may not have begun yet
                self._subscriber.cancel()
                await asyncio.wait([entering], timeout=CANCEL_AGAIN_S)
            if entering.exception() is None:
                pull.__exit__(None, None, None)
            raise
        try:
            yield pulled
        except BaseException:
            pull.__exit__(*sys.exc_info())
            raise
        pull.__exit__(None, None, None)
