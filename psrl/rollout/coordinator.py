"""The rollout coordinator: knows all replicas, decides when each pulls a new version, never what is admitted.

Life of a replica here: registered (by its process, when its server is up) -> pulls the newest version -> routed to by
the gateway -> held, pulls, routed to again for each sync -> lost (its process ended). A replica that failed a sync
serves nothing until a later sync succeeds; each replica resumes only after its own confirmation, so a slow one holds up
no other.
"""

import asyncio
import logging

from psrl.actor import Actor, handler
from psrl.clock import now
from psrl.errors import ActorError, RunFailed
from psrl.rollout.gateway import RolloutGateway
from psrl.rollout.messages import (
    Ack,
    GetRolloutView,
    GetSyncView,
    HoldReplica,
    RegisterReplica,
    ReplicaLost,
    SetReplica,
    SyncView,
    VersionPublished,
)
from psrl.rollout.replica_client import ReplicaClient
from psrl.rollout.sync_policy import SyncCandidate, greedy
from psrl.types import Epoch, Version

logger = logging.getLogger(__name__)

MAX_FAILED_SYNCS = 5  # of one replica in a row; then the run ends by name


class _Replica:
    def __init__(self, name: str, address: str, max_num_seqs: int) -> None:
        self.name, self.address, self.max_num_seqs = name, address, max_num_seqs
        self.version = Version(-1)  # what it says of itself counts once a sync has confirmed it
        self.client = ReplicaClient(address)
        self.sync: asyncio.Task[None] | None = None
        self.num_failed_syncs = 0
        self.retry_at_s = 0.0


class RolloutCoordinator(Actor):
    """Greedy sync of replicas to the newest published version."""

    def __init__(
        self,
        gateway: RolloutGateway,
        *,
        epoch: Epoch,
        check_interval_s: float,
        partial_rollout: bool,
        running: str,
        sync_timeout_s: float,
    ) -> None:
        self._gateway = gateway
        self._epoch = epoch
        self._check_interval_s = check_interval_s
        self._partial_rollout = partial_rollout
        self._running = running
        self._sync_timeout_s = sync_timeout_s
        self._replicas: dict[str, _Replica] = {}
        self._newest = Version(-1)
        self._wake = asyncio.Event()
        self._num_syncs = self._num_failures = self._num_full_loads = self._num_bytes = 0
        self._pause_s = self._transfer_s = 0.0

    async def started(self) -> None:
        self.spawn(self._decide_for_ever(), "decide")

    async def stopped(self) -> None:
        for replica in self._replicas.values():
            await self._drop(replica)

    @handler(idempotent=True)
    async def register_replica(self, message: RegisterReplica) -> Ack:
        known = self._replicas.get(message.name)
        if known is not None and known.address == message.address:
            return Ack()
        if known is not None:
            await self._lose(known, "registered again at another address")
        self._replicas[message.name] = _Replica(message.name, message.address, message.max_num_seqs)
        self._wake.set()
        return Ack()

    @handler(idempotent=True)
    async def replica_lost(self, message: ReplicaLost) -> Ack:
        known = self._replicas.get(message.name)
        if known is not None:
            await self._lose(known, message.reason)
        return Ack()

    @handler(idempotent=True)
    async def version_published(self, message: VersionPublished) -> Ack:
        self._newest = Version(max(self._newest, message.version))
        self._wake.set()
        return Ack()

    @handler
    async def get_sync_view(self, message: GetSyncView) -> SyncView:
        return SyncView(
            newest=self._newest,
            versions={replica.name: replica.version for replica in self._replicas.values()},
            num_syncs=self._num_syncs,
            num_failures=self._num_failures,
            num_full_loads=self._num_full_loads,
            pause_s=self._pause_s,
            transfer_s=self._transfer_s,
            num_bytes=self._num_bytes,
        )

    # --- decisions ---

    async def _decide_for_ever(self) -> None:
        while True:
            if self._all_current():
                await self._wake.wait()
            else:  # somebody is behind but may not pull yet: look again soon
                try:
                    async with asyncio.timeout(self._check_interval_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            self._wake.clear()
            await self._start_syncs()

    def _all_current(self) -> bool:
        return all(replica.version >= self._newest for replica in self._replicas.values())

    async def _start_syncs(self) -> None:
        if self._all_current():
            return
        view = await self._gateway.get_rollout_view(GetRolloutView())
        loads = {load.name: load for load in view.replicas}
        candidates = [
            SyncCandidate(
                name=replica.name,
                version=replica.version,
                syncing=replica.sync is not None,
                num_running=loads[replica.name].num_running if replica.name in loads else 0,
                num_pinned=loads[replica.name].num_pinned if replica.name in loads else 0,
                retry_at_s=replica.retry_at_s,
            )
            for replica in self._replicas.values()
        ]
        for name in greedy(
            candidates,
            self._newest,
            partial_rollout=self._partial_rollout,
            pinned_waiting=frozenset(view.pinned_waiting),
            now_s=now(),
        ):
            replica = self._replicas[name]
            replica.sync = self.spawn(self._sync(replica), f"sync {name}")

    async def _sync(self, replica: _Replica) -> None:
        """Hold routing, let the replica pull, route to it again under what it now has."""
        wanted = self._newest
        try:
            await self._gateway.hold_replica(HoldReplica(replica.name))
            state = await replica.client.update(
                epoch=self._epoch, version=wanted, running=self._running, timeout_s=self._sync_timeout_s
            )
            replica.version = Version(state.version)
            await self._gateway.set_replica(
                SetReplica(replica.name, replica.address, replica.version, replica.max_num_seqs)
            )
        except ActorError as failure:
            self._failed(replica, wanted, failure)
        else:
            replica.num_failed_syncs = 0
            self._num_syncs += 1
            self._num_full_loads += bool(state.full_load)
            self._pause_s += state.pause_s
            self._transfer_s += state.transfer_s
            self._num_bytes += state.num_bytes
        finally:
            replica.sync = None
            self._wake.set()

    def _failed(self, replica: _Replica, wanted: Version, failure: ActorError) -> None:
        """Try again a little later; a replica whose process ended is taken out by replica_lost meanwhile."""
        if self._replicas.get(replica.name) is not replica:
            return
        self._num_failures += 1
        replica.num_failed_syncs += 1
        replica.retry_at_s = now() + min(2.0**replica.num_failed_syncs * 0.1, 10.0)
        logger.warning("%s could not pull version %d: %s", replica.name, wanted, failure)
        if replica.num_failed_syncs >= MAX_FAILED_SYNCS:
            raise RunFailed(
                f"{replica.name} failed {MAX_FAILED_SYNCS} syncs in a row; the last: {failure}"
            ) from failure

    async def _lose(self, replica: _Replica, reason: str) -> None:
        logger.warning("replica %s lost: %s", replica.name, reason)
        self._replicas.pop(replica.name, None)
        await self._drop(replica)
        await self._gateway.replica_lost(ReplicaLost(replica.name, reason))
        self._wake.set()

    async def _drop(self, replica: _Replica) -> None:
        if replica.sync is not None:
            replica.sync.cancel()
        await replica.client.close()
