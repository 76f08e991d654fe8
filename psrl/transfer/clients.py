"""Clients: notices the end of processes that use the queue on a node, and has what they held returned.

It is for programs without a node agent, which would tell the controller of each death itself. A process is watched by
its pidfd, so also one that nobody here has started is seen at once, however it ends.
"""

import asyncio
import logging
import os
from collections.abc import Callable

from psrl.actor import Actor, handler
from psrl.errors import ActorError
from psrl.transfer.controller import QueueController
from psrl.transfer.messages import ReleaseClient, WatchClient, Watched

logger = logging.getLogger(__name__)


class Clients(Actor):
    """Stands beside the node's storage. `on_ended(client)` is called when what the client held has been returned."""

    def __init__(self, controller: QueueController, on_ended: Callable[[str], None] | None = None) -> None:
        self._controller, self._on_ended = controller, on_ended
        self._watched: dict[str, int] = {}  # pidfds
        self._releasing: dict[str, asyncio.Task[None]] = {}

    async def stopped(self) -> None:
        for client in list(self._watched):
            self._forget(client)

    @handler(idempotent=True)
    async def watch_client(self, message: WatchClient) -> Watched:
        client = message.client
        self._forget(client)  # an earlier life of it
        if client in self._releasing:
            await self._releasing[client]
        if message.namespace != pid_namespace():
            logger.warning("queue client %s is of another pid namespace: its end will not be seen from here", client)
            return Watched(False)
        try:
            self._watched[client] = os.pidfd_open(message.pid)
        except ProcessLookupError:
            return Watched(False)
        asyncio.get_running_loop().add_reader(self._watched[client], self._ended, client)
        return Watched(True)

    def _forget(self, client: str) -> None:
        watched = self._watched.pop(client, None)
        if watched is not None:
            asyncio.get_running_loop().remove_reader(watched)
            os.close(watched)

    def _ended(self, client: str) -> None:
        self._forget(client)
        self._releasing[client] = self.spawn(self._release(client), f"release {client}")

    async def _release(self, client: str) -> None:
        try:
            await self._controller.release_client(ReleaseClient(client))
        except ActorError as error:
            logger.warning("queue client %s has ended, but what it held cannot be returned now: %s", client, error)
        finally:
            del self._releasing[client]
        if self._on_ended is not None:
            self._on_ended(client)


def pid_namespace() -> int:
    """Numbers of processes mean something within it alone."""
    return os.stat("/proc/self/ns/pid").st_ino


def introduction(client: str) -> WatchClient:
    """What this process says before it connects as `client`."""
    return WatchClient(client, os.getpid(), pid_namespace())
