"""QueueNode: a node's part of the queue, in the caller's own event loop.

    with NodeSegments(f"{folder}/segments") as segments:                 # the process that houses the queue
        segments.create_queue(QueuePlan.of(64 << 20))
        async with Runtime("trainer", listen=UnixAddress(f"{folder}/trainer")) as runtime:
            node = await QueueNode.host(runtime, segments)
            queue = await node.connect("trainer")

    async with Runtime("consumer") as runtime:                           # another process of the same node
        source = SegmentSource(f"{folder}/segments")
        node = await QueueNode.attach(runtime, source, UnixAddress(f"{folder}/trainer"))
        queue = await node.connect("consumer")

    async with Runtime("far", listen=TcpAddress(host, 0), token=token) as runtime:      # another node
        async with QueueNode.join(runtime, segments, head, 1, bulk) as node:            # with segments of its own
            queue = await node.connect("far")

The memory ends with the last process that has it, however it ends. The actors end with their runtime.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Self

from psrl.actor import Address, Runtime, TcpAddress, within
from psrl.actor.bulk import Bulk
from psrl.errors import ActorError, ConfigError
from psrl.transfer.client import DEFAULT_PUT_TIMEOUT_S, DEFAULT_RESTART_WAIT_S, TransferQueue
from psrl.transfer.clients import Clients, introduction
from psrl.transfer.controller import QueueController
from psrl.transfer.messages import JoinNode, LeaveNode, NodeAt
from psrl.transfer.samplers import Sampler
from psrl.transfer.segments import QUEUE, Segments
from psrl.transfer.storage import StorageActor

CONTROLLER, STORAGE, CLIENTS = "queue", "storage", "clients"
"""Names of the actors."""

DEFAULT_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 5.0
_ANYWHERE = ("", "0.0.0.0", "::")

OnEnded = Callable[[str], None]


class QueueNode:
    """How a process reaches the queue: by `host`, `attach` or `join`. `controller` and `storage` are refs."""

    def __init__(
        self,
        runtime: Runtime,
        segments: Segments,
        controller: QueueController,
        storage: StorageActor,
        clients: Clients,
        bulk: Bulk | None,
    ) -> None:
        self.controller, self.storage = controller, storage
        self._runtime, self._segments, self._clients, self._bulk = runtime, segments, clients, bulk

    @classmethod
    async def host(
        cls,
        runtime: Runtime,
        segments: Segments,
        bulk: Bulk | None = None,
        *,
        samplers: Mapping[str, Sampler] | None = None,
        on_client_ended: OnEnded | None = None,
    ) -> Self:
        """Run controller and storage of node 0 here, over the segment QUEUE that is laid out.

        `bulk` lets other nodes join; then `runtime` must listen at a TcpAddress that they reach. A process that ends
        gives back what it held; then `on_client_ended(client)` is called.
        """
        segment = await asyncio.to_thread(segments.fetch, QUEUE)
        storage = runtime.spawn(STORAGE, StorageActor(segment, 0, bulk))
        controller = runtime.spawn(CONTROLLER, QueueController(storage, samplers=samplers))
        clients = runtime.spawn(CLIENTS, Clients(controller, on_client_ended))
        if bulk is not None:
            await controller.join_node(JoinNode(_place(runtime, 0)))
        return cls(runtime, segments, controller, storage, clients, bulk)

    @classmethod
    async def attach(
        cls,
        runtime: Runtime,
        segments: Segments,
        address: Address,
        bulk: Bulk | None = None,
        *,
        controller: Address | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """Use what the runtime at `address` houses, on the same node; the `controller` if it is elsewhere.

        Rows of other nodes are had over `bulk`. Raises an ActorError if it is not there within `timeout_s`.
        """
        found = await runtime.connect(QueueController, CONTROLLER, controller or address, timeout_s=timeout_s)
        storage = await runtime.connect(StorageActor, STORAGE, address, timeout_s=timeout_s)
        clients = await runtime.connect(Clients, CLIENTS, address, timeout_s=timeout_s)
        return cls(runtime, segments, found, storage, clients, bulk)

    @classmethod
    @contextlib.asynccontextmanager
    async def join(
        cls,
        runtime: Runtime,
        segments: Segments,
        head: TcpAddress,
        number: int,
        bulk: Bulk,
        *,
        on_client_ended: OnEnded | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> AsyncIterator[Self]:
        """Make this host node `number` of the queue that is housed at `head`: run its storage here, over the segment
        QUEUE. Leaving the block takes the node, and the rows on it, out of the queue.

        A node that is gone otherwise must be taken out by whoever knows it (LeaveNode to the controller). Raises an
        ActorError if nobody answers within `timeout_s`.
        """
        at = _place(runtime, number)
        controller = await runtime.connect(QueueController, CONTROLLER, head, timeout_s=timeout_s)
        segment = await asyncio.to_thread(segments.fetch, QUEUE)
        storage = runtime.spawn(STORAGE, StorageActor(segment, number, bulk))
        clients = runtime.spawn(CLIENTS, Clients(controller, on_client_ended))
        await within(controller, timeout_s).join_node(JoinNode(at))
        try:
            yield cls(runtime, segments, controller, storage, clients, bulk)
        finally:
            with contextlib.suppress(ActorError):  # the head is gone, and the queue with it
                await within(controller, LEAVE_TIMEOUT_S).leave_node(LeaveNode(number))

    async def connect(
        self,
        client: str,
        *,
        put_timeout_s: float = DEFAULT_PUT_TIMEOUT_S,
        restart_wait_s: float = DEFAULT_RESTART_WAIT_S,
    ) -> TransferQueue:
        """The queue for this process, as TransferQueue.connect."""
        await self._clients.watch_client(introduction(client))
        return await TransferQueue.connect(
            self._runtime,
            self.controller,
            self.storage,
            self._segments,
            client=client,
            put_timeout_s=put_timeout_s,
            restart_wait_s=restart_wait_s,
            bulk=self._bulk,
        )


def _place(runtime: Runtime, number: int) -> NodeAt:
    address = runtime.address
    if not isinstance(address, TcpAddress) or address.host in _ANYWHERE:
        raise ConfigError(f"runtime {runtime.name} must listen at a TcpAddress that other nodes reach, not {address}")
    return NodeAt(number, address.host, address.port, STORAGE)
