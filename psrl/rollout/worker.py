"""The agent loop worker: pulls groups from PSManager and runs their trajectories.

One trajectory's way: agent loop (generation through the gateway) -> row on the queue -> score -> score fields on the
row -> `Complete`. So what PSManager has counted is on the queue. A trajectory that cannot be finished is tried again up
to `retry_limit` times, then failed by name; a failure is never a score of 0.
"""

import asyncio
import logging
import os

import msgspec
import numpy as np

from psrl.actor import within
from psrl.control import PSManager
from psrl.control.messages import Complete, Completed, Fail, GroupOffer, NextGroup, NoGroup
from psrl.data import ChatTokenizer
from psrl.errors import CallTimeout, EngineError, StorageError
from psrl.reward.messages import Score, Scored
from psrl.rollout.agent_loop import AgentLoop, Rollout
from psrl.rollout.gateway import RolloutGateway
from psrl.rollout.messages import Generate, Generated
from psrl.rollout.reward_pool import RewardPool, ScoreMissing
from psrl.transfer import TransferQueue
from psrl.types import FinishReason, SamplingParams, TrajectoryId

logger = logging.getLogger(__name__)

_MAX_TOLD = 100  # different reasons for giving a trajectory up that are warned of


class WorkerSettings(msgspec.Struct, frozen=True):
    max_concurrent_groups: int
    retry_limit: int  # further attempts at a failed trajectory
    trajectory_timeout_s: float
    seed: int


class AgentLoopWorker:
    """Runs until PSManager says that nothing more will come."""

    def __init__(
        self,
        name: str,
        *,
        manager: PSManager,
        gateway: RolloutGateway,
        queue: TransferQueue,
        rewards: RewardPool,
        tokenizer: ChatTokenizer,
        loop: AgentLoop,
        settings: WorkerSettings,
    ) -> None:
        self._name = name
        self._manager = manager
        self._gateway = gateway
        self._queue = queue
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._loop = loop
        self._settings = settings
        self._told: set[str] = set()

    async def run(self) -> None:
        """Pull and run groups, `max_concurrent_groups` at a time."""
        places = asyncio.Semaphore(self._settings.max_concurrent_groups)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await places.acquire()
                offer = await self._manager.next_group(NextGroup(self._name, life=os.getpid()))
                if isinstance(offer, NoGroup):
                    places.release()
                    if offer.end:
                        return
                    continue
                task = tasks.create_task(self._run_group(offer), name=f"group {offer.prompt.group}")
                task.add_done_callback(lambda _: places.release())

    async def _run_group(self, offer: GroupOffer) -> None:
        async with asyncio.TaskGroup() as siblings:
            for index in range(offer.num_trajectories):
                trajectory = TrajectoryId(offer.prompt.group, index, offer.offer, offer.purpose)
                siblings.create_task(self._run_trajectory(offer, trajectory), name=trajectory.key)

    async def _run_trajectory(self, offer: GroupOffer, trajectory: TrajectoryId) -> None:
        for attempt in range(self._settings.retry_limit + 1):
            try:
                await self._attempt(offer, trajectory)
                return
            except (EngineError, StorageError, CallTimeout, ScoreMissing) as failure:
                reason = str(failure) if isinstance(failure, ScoreMissing) else f"{type(failure).__name__}: {failure}"
                logger.info("%s, attempt %d: %s", trajectory.key, attempt + 1, reason)
                if isinstance(failure, ScoreMissing) and failure.final:
                    break
        self._tell_once(trajectory, reason)
        await self._manager.fail(Fail(offer.epoch, trajectory, self._name, reason))

    def _tell_once(self, trajectory: TrajectoryId, reason: str) -> None:
        """A warning for each new reason: what is wrong with every trajectory alike must not bury the rest."""
        if reason not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(reason)
            logger.warning("%s is given up: %s", trajectory.key, reason)

    async def _attempt(self, offer: GroupOffer, trajectory: TrajectoryId) -> None:
        """One try. Returns when the trajectory is complete or no longer wanted; raises what a retry may cure."""
        sampling = msgspec.structs.replace(offer.sampling, seed=trajectory_seed(self._settings.seed, trajectory))
        gateway = within(self._gateway, self._settings.trajectory_timeout_s)

        async def generate(prompt_ids: bytes, params: SamplingParams) -> Generated:
            return await gateway.generate(
                Generate(offer.epoch, trajectory, prompt_ids, params, pinned_version=offer.pinned_version)
            )

        rollout = await self._loop.run(offer.prompt.prompt_ids, sampling, generate)
        if rollout.finish_reason is FinishReason.ABORT:
            return
        partition = str(trajectory.purpose)
        await self._queue.kv_put(
            trajectory.key,
            partition_id=partition,
            fields=row_fields(offer.prompt.prompt_ids, rollout),
            tag={"uid": trajectory.key, "parent_id": str(trajectory.group)},
        )
        kept = False
        try:
            scored = await self._score(offer, trajectory, rollout)
            await self._queue.kv_put(
                trajectory.key,
                partition_id=partition,
                fields={
                    "raw_score": np.array(scored.raw_score, np.float32),
                    "reward": np.array(scored.shaped_reward, np.float32),
                },
            )
            kept = True  # an answer that is late may say so: then PSManager removes the row, if its group is not kept
            kept = (await self._complete(offer, trajectory, rollout, scored)).kept
        finally:
            if not kept:
                await self._queue.kv_clear([trajectory.key], partition)

    async def _score(self, offer: GroupOffer, trajectory: TrajectoryId, rollout: Rollout) -> Scored:
        return await self._rewards.score(
            Score(
                trajectory=trajectory,
                solution=self._tokenizer.decode(rollout.response_ids.tolist()),
                row=offer.prompt.row,
                num_response_tokens=len(rollout.response_ids),
                finish_reason=rollout.finish_reason,
                num_turns=rollout.num_turns,
            )
        )

    async def _complete(
        self, offer: GroupOffer, trajectory: TrajectoryId, rollout: Rollout, scored: Scored
    ) -> Completed:
        return await self._manager.complete(
            Complete(
                epoch=offer.epoch,
                trajectory=trajectory,
                worker=self._name,
                spans=rollout.spans,
                num_prompt_tokens=len(offer.prompt.prompt_ids) // 4,
                num_response_tokens=len(rollout.response_ids),
                finish_reason=rollout.finish_reason,
                started_s=rollout.started_s,
                ended_s=rollout.ended_s,
                num_dispatches=rollout.num_dispatches,
                raw_score=scored.raw_score,
                shaped_reward=scored.shaped_reward,
                metrics=scored.metrics,
            )
        )


def row_fields(prompt_ids: bytes, rollout: Rollout) -> dict[str, np.ndarray]:
    """The fields of a trajectory's row that generation makes: P prompt and T response tokens."""
    return {
        "prompts": np.frombuffer(prompt_ids, np.int32),
        "responses": rollout.response_ids,
        "response_mask": rollout.response_mask,
        "rollout_log_probs": rollout.log_probs,
        "rollout_versions": rollout.versions,
        "mixed_cache": rollout.mixed_cache,
    }


def trajectory_seed(run_seed: int, trajectory: TrajectoryId) -> int:
    """63 bits that depend on nothing but the run's seed and the trajectory's place, so that a run can be repeated."""
    state = run_seed & _MASK
    for part in (trajectory.group, trajectory.index, 0 if trajectory.purpose == "train" else 1):
        state = _mix((state ^ part) + 0x9E3779B97F4A7C15)
    return state >> 1


_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, section 4)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
