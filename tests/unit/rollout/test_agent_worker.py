"""The agent loop worker beside a real PSManager: what PSManager has counted is on the queue, whatever goes wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl.actor import Actor, Runtime, handler
from psrl.control import ControlSettings, PSManager, TrajectoryLog
from psrl.control.memory import MemoryEffects, MemoryFeed
from psrl.control.messages import (
    Batch,
    Complete,
    Completed,
    Consume,
    Counters,
    Finish,
    GetStatus,
    Publish,
    Refused,
    Reserve,
)
from psrl.errors import CallTimeout
from psrl.reward.messages import Score, Scored
from psrl.rollout.agent_loop import SingleTurn
from psrl.rollout.messages import Generate, Generated
from psrl.rollout.worker import AgentLoopWorker, WorkerSettings
from psrl.types import Epoch, FinishReason, TrajectoryId, Version, VersionSpan

E0 = Epoch(0)
SETTINGS = ControlSettings(total_steps=1, batch_size=2, rollout_n=2, staleness=0)


class Gateway(Actor):
    """Answers at once, if PSManager admits the trajectory."""

    def __init__(self, manager: PSManager) -> None:
        self._manager = manager
        self.seeds: dict[TrajectoryId, set[int]] = {}

    @handler
    async def generate(self, message: Generate) -> Generated:
        self.seeds.setdefault(message.trajectory, set()).add(message.sampling.seed)
        answer = await self._manager.reserve(Reserve(E0, message.trajectory, Version(0), "r0"))
        reason = FinishReason.ABORT if isinstance(answer, Refused) else FinishReason.STOP
        ids, log_probs = np.array([3, 4], "<i4").tobytes(), np.array([-1, -1], "<f4").tobytes()
        spans = (VersionSpan(Version(0), 2, "r0"),)
        return Generated(message.trajectory, ids, log_probs, spans, reason, 0.0, 1.0, 1)


class Manager:
    """PSManager as it is reached when answers to Complete are late: `losing(n)` says what becomes of the n-th."""

    def __init__(self, manager: PSManager, losing: dict[int, str]) -> None:
        self._manager, self._losing, self._num_calls = manager, losing, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def complete(self, message: Complete) -> Completed:
        self._num_calls += 1
        lost = self._losing.get(self._num_calls)
        if lost == "question":
            raise CallTimeout("PSManager never saw it")
        answer = await self._manager.complete(message)
        if lost == "answer":
            raise CallTimeout("PSManager counted it")
        return answer


class Queue:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, np.ndarray]] = {}

    async def kv_put(self, key: str, partition_id: str, fields: dict[str, np.ndarray], tag: Any = None) -> None:
        self.rows.setdefault(key, {}).update(fields)

    async def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop(key, None)


class Rewards:
    async def score(self, sample: Score) -> Scored:
        return Scored(sample.trajectory, 1.0, 1.0, {"acc": 1.0})


class Tokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("lost", ["question", "answer"])
@pytest.mark.parametrize("which", [1, 4])
@pytest.mark.parametrize("retry_limit", [0, 1])
async def test_rows_that_were_counted_stay_although_the_answer_came_too_late(
    tmp_path: Path, lost: str, which: int, retry_limit: int
) -> None:
    queue = Queue()
    async with Runtime("head") as runtime:
        actor = PSManager(SETTINGS, MemoryFeed(), MemoryEffects(), TrajectoryLog(tmp_path))
        manager = runtime.spawn("psmanager", actor)
        gateway = Gateway(manager)
        worker: Any = AgentLoopWorker(
            "a",
            manager=Manager(manager, {which: lost}),
            gateway=runtime.spawn("gateway", gateway),
            queue=queue,
            rewards=Rewards(),
            tokenizer=Tokenizer(),
            loop=SingleTurn(),
            settings=WorkerSettings(1, retry_limit, 10.0, 0),
        )
        await manager.publish(Publish(E0, Version(0), 0, "h"))
        running = actor.spawn(worker.run(), "worker")
        batch = await manager.consume(Consume(E0, 0, wait_s=10.0))
        assert isinstance(batch, Batch)
        keys = [key for group in batch.groups for key in group.keys]
        assert len(keys) == 4
        assert set(keys) <= queue.rows.keys()
        assert all({"responses", "reward"} <= queue.rows[key].keys() for key in keys)
        await manager.publish(Publish(E0, Version(1), 1, "h"))
        await manager.finish(Finish(E0, "done"))
        await running
        counters: Counters = (await manager.get_status(GetStatus())).counters
        assert counters.trained == 2
        assert counters.failed == 0 or not retry_limit
        assert all(len(seeds) == 1 for seeds in gateway.seeds.values()), "another try draws the same"
        assert len(set.union(*gateway.seeds.values())) == len(gateway.seeds), "siblings draw apart"
