"""The head's face to the node agent, who tells it of lost processes, and to the trainer, who asks it for metrics."""

import asyncio
from collections.abc import Mapping

from psrl.actor import Actor, Address, Runtime, handler, within
from psrl.control import PSManager
from psrl.control.messages import WorkerLost
from psrl.errors import ActorError
from psrl.launch.messages import Ack, CollectMetrics, Metrics, ProcessLost
from psrl.launch.roles import reward
from psrl.reward import RewardWorker
from psrl.reward.messages import GetRewardStats, RewardStats
from psrl.rollout.coordinator import RolloutCoordinator
from psrl.rollout.gateway import RolloutGateway
from psrl.rollout.messages import GetRolloutView, GetSyncView, ReplicaLost
from psrl.weights.store import WeightStore

STATS_TIMEOUT_S = 1.0  # a reward worker that is being started again is asked at the next step


class Node(Actor):
    """The head's face to the node agent and to the trainer's metrics."""

    def __init__(
        self,
        manager: PSManager,
        gateway: RolloutGateway,
        coordinator: RolloutCoordinator,
        weights: WeightStore,
        rewards: Mapping[str, Address],
    ) -> None:
        """All but `weights` and `rewards` (where each reward worker listens) are refs."""
        self._manager = manager
        self._gateway = gateway
        self._coordinator = coordinator
        self._weights = weights
        self._num_lost: dict[str, int] = {}
        self._scoring = {name: _Scoring(address) for name, address in rewards.items()}

    @handler(idempotent=True)
    async def process_lost(self, message: ProcessLost) -> Ack:
        """Offer the work of a dead process again. What it held of the queue is given back by psrl.transfer.clients."""
        self._num_lost[message.role] = self._num_lost.get(message.role, 0) + 1
        if message.role == "replica":
            self._weights.release_client(message.name)
            await self._coordinator.replica_lost(ReplicaLost(message.name, message.reason))
        elif message.role == "agent":
            await self._manager.worker_lost(WorkerLost(message.name, message.reason))
        return Ack()

    @handler
    async def collect_metrics(self, message: CollectMetrics) -> Metrics:
        """Totals since the head's start; rates are for the reader to form."""
        rollout = await self._gateway.get_rollout_view(GetRolloutView())
        sync = await self._coordinator.get_sync_view(GetSyncView())
        await asyncio.gather(*(scoring.look(self.runtime) for scoring in self._scoring.values()))
        values = {
            "rollout/num_generated_tokens": float(rollout.num_generated_tokens),
            "rollout/num_finished": float(rollout.num_finished),
            "rollout/num_redispatched": float(rollout.num_redispatched),
            "rollout/num_running": float(sum(replica.num_running for replica in rollout.replicas)),
            "rollout/num_waiting": float(rollout.num_waiting),
            "rollout/num_replicas": float(len(rollout.replicas)),
            "rollout/busy_s": rollout.busy_s,
            "sync/num_syncs": float(sync.num_syncs),
            "sync/num_failures": float(sync.num_failures),
            "sync/num_full_loads": float(sync.num_full_loads),
            "sync/pause_s": sync.pause_s,
            "sync/transfer_s": sync.transfer_s,
            "sync/num_bytes": float(sync.num_bytes),
        }
        for name in RewardStats.__struct_fields__:
            values[f"reward/{name}"] = float(sum(scoring.totals[name] for scoring in self._scoring.values()))
        for role, count in self._num_lost.items():
            values[f"processes/lost_{role}"] = float(count)
        return Metrics(values)


class _Scoring:
    """What one reward worker has counted over all its lives, as far as it was asked."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._worker: RewardWorker | None = None
        self._last = RewardStats()
        self.totals = dict.fromkeys(RewardStats.__struct_fields__, 0)

    async def look(self, runtime: Runtime) -> None:
        try:
            if self._worker is None:
                found = await runtime.connect(RewardWorker, reward.ACTOR, self._address, timeout_s=STATS_TIMEOUT_S)
                self._worker = within(found, STATS_TIMEOUT_S)
            stats = await self._worker.get_stats(GetRewardStats())
        except ActorError:
            return
        for name in self.totals:
            before, now = getattr(self._last, name), getattr(stats, name)
            self.totals[name] += now - before if now >= before else now  # a new life counts from 0
        self._last = stats
