"""A reward worker: scores answers in killable child processes."""

from psrl.actor import Runtime, UnixAddress
from psrl.launch.roles.failure import raise_when_failed
from psrl.launch.spec import RunSpec
from psrl.reward.plan import RewardPlan
from psrl.reward.worker import RewardWorker

ACTOR = "reward"
MAILBOX = 1 << 16  # samples wait here for a scoring process


async def run(spec: RunSpec, name: str) -> None:
    """Serve scores until told to stop."""
    scoring = spec.config.reward.reward_loop_worker
    worker = RewardWorker(RewardPlan.of(spec.config.reward, spec.config.data), scoring.timeout_s, scoring.retry_limit)
    async with Runtime(name, listen=UnixAddress(spec.socket_of(name))) as runtime:
        runtime.spawn(ACTOR, worker, mailbox=MAILBOX)
        await raise_when_failed(runtime)
