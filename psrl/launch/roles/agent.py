"""An agent loop worker: pulls groups and runs their trajectories."""

import asyncio

from psrl.actor import Runtime, UnixAddress
from psrl.control import PSManager
from psrl.data import ChatTokenizer
from psrl.launch.roles import head, reward
from psrl.launch.roles.failure import raise_when_failed
from psrl.launch.spec import RunSpec
from psrl.reward.worker import RewardWorker, longest_s
from psrl.rollout.agent_loop import SingleTurn
from psrl.rollout.gateway import RolloutGateway
from psrl.rollout.reward_pool import SAMPLES_PER_WORKER, RewardPool
from psrl.rollout.worker import AgentLoopWorker, WorkerSettings


async def run(spec: RunSpec, name: str) -> None:
    """Work until PSManager says that nothing more will come."""
    config = spec.config
    agent = config.gen_actor_rollout_ref.rollout.agent
    scoring = config.reward.reward_loop_worker
    tokenizer = ChatTokenizer.load(config.train_actor_rollout_ref.model.path, config.data.apply_chat_template_kwargs)
    async with Runtime(name) as runtime:
        address = UnixAddress(spec.head_socket)
        manager = await runtime.connect(PSManager, head.MANAGER, address, timeout_s=head.START_TIMEOUT_S)
        gateway = await runtime.connect(RolloutGateway, head.GATEWAY, address, timeout_s=head.START_TIMEOUT_S)
        queue = await head.connect_queue(runtime, spec, name)
        rewards = await asyncio.gather(
            *(
                runtime.connect(
                    RewardWorker, reward.ACTOR, UnixAddress(spec.socket_of(worker)), timeout_s=head.START_TIMEOUT_S
                )
                for worker in spec.rewards
            )
        )
        worker = AgentLoopWorker(
            name,
            manager=manager,
            gateway=gateway,
            queue=queue,
            rewards=RewardPool(
                rewards,
                call_timeout_s=longest_s(
                    scoring.timeout_s, scoring.retry_limit, SAMPLES_PER_WORKER * agent.num_workers
                ),
                patience_s=head.START_TIMEOUT_S,
            ),
            tokenizer=tokenizer,
            loop=SingleTurn(),
            settings=WorkerSettings(
                max_concurrent_groups=agent.max_concurrent_groups,
                retry_limit=agent.retry_limit,
                trajectory_timeout_s=agent.trajectory_timeout_s,
                seed=config.gen_actor_rollout_ref.rollout.seed,
            ),
        )
        running = asyncio.create_task(worker.run())
        failing = asyncio.create_task(raise_when_failed(runtime))
        try:
            await asyncio.wait((running, failing), return_when=asyncio.FIRST_COMPLETED)
            for task in (running, failing):
                if task.done():
                    task.result()
        finally:
            running.cancel()
            failing.cancel()
            await asyncio.gather(running, failing, return_exceptions=True)
