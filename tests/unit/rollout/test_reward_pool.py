"""What waits for a score is under no time limit: only a judgement is. With reward workers in processes of their own."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from psrl.actor import Runtime, UnixAddress
from psrl.reward import RewardWorker
from psrl.reward.messages import Score, Scored
from psrl.reward.worker import longest_s
from psrl.rollout.reward_pool import SAMPLES_PER_WORKER, RewardPool, ScoreMissing
from psrl.types import FinishReason, GroupId, TrajectoryId

TIMEOUT_S = 8.0
HOST = f"""
import asyncio, sys
from psrl.actor import Runtime, UnixAddress
from psrl.reward import RewardWorker
from psrl.reward.plan import Function, RewardPlan, Source
async def main():
    plan = RewardPlan((Source(Function(sys.argv[2], "judge"), None, 1.0),))
    async with Runtime("reward", listen=UnixAddress(sys.argv[1])) as runtime:
        runtime.spawn("reward", RewardWorker(plan, timeout_s={TIMEOUT_S}, retry_limit=0, num_processes=2), mailbox=1024)
        await asyncio.Event().wait()
asyncio.run(main())
"""
JUDGE = """
import os, time
def judge(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "exit":
        os._exit(3)
    time.sleep(2)
    return float(solution_str)
"""


@asynccontextmanager
async def reward_process(folder: Path, name: str) -> AsyncIterator[UnixAddress]:
    (folder / "judge.py").write_text(JUDGE)
    socket = str(folder / name)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOST, socket, str(folder / "judge.py"), env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    try:
        yield UnixAddress(socket)
    finally:
        process.kill()
        await process.wait()


def sample(index: int, solution: str) -> Score:
    row = msgspec.msgpack.encode({"data_source": "mine", "ground_truth": "1"})
    return Score(TrajectoryId(GroupId(0), index), solution, row, 1, FinishReason.STOP)


async def test_many_slow_samples_all_score_and_failures_have_their_own_cause(tmp_path: Path) -> None:
    """20 samples of 2 s each at a limit of 8 s, two at a time in each of two workers: the last ones wait longer than
    that. Among them one that hangs and one that exits.
    """
    async with (
        Runtime("agent") as runtime,
        reward_process(tmp_path, "a") as first,
        reward_process(tmp_path, "b") as second,
    ):
        workers = [await runtime.connect(RewardWorker, "reward", at, timeout_s=90) for at in (first, second)]
        call_timeout_s = longest_s(TIMEOUT_S, 0, SAMPLES_PER_WORKER)
        pool = RewardPool(workers, call_timeout_s=call_timeout_s, patience_s=90)
        samples = [sample(index, str(index)) for index in range(20)]
        samples[5:5] = [sample(20, "hang"), sample(21, "exit")]
        answers = await asyncio.gather(*map(pool.score, samples), return_exceptions=True)
        scored = {answer.trajectory.index: answer.raw_score for answer in answers if isinstance(answer, Scored)}
        assert scored == {index: float(index) for index in range(20)}
        hung, ended = (str(answer) for answer in answers if isinstance(answer, ScoreMissing))
        judge = f"not scored: reward.custom_reward_function: reward function judge of {tmp_path / 'judge.py'}"
        assert hung == f"{judge} gave no score within reward.reward_loop_worker.timeout_s=8 s"
        assert ended == f"{judge}: its process ended (exit code 3)"


async def test_a_dead_worker_keeps_nobody_from_the_living_and_patience_has_an_end(tmp_path: Path) -> None:
    async with Runtime("agent") as runtime, reward_process(tmp_path, "a") as first:
        living = await runtime.connect(RewardWorker, "reward", first, timeout_s=90)
        async with reward_process(tmp_path, "b") as second:
            dead = await runtime.connect(RewardWorker, "reward", second, timeout_s=90)
        pool = RewardPool([dead, living], call_timeout_s=60, patience_s=90)
        answers = await asyncio.gather(*(pool.score(sample(index, "1")) for index in range(4)))
        assert [answer.trajectory.index for answer in answers] == [0, 1, 2, 3]
        with pytest.raises(ScoreMissing, match="no reward worker lives"):
            await RewardPool([dead], call_timeout_s=60, patience_s=0.2).score(sample(0, "1"))
