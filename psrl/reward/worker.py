"""RewardWorker: scores samples in processes of their own, so that a function may hang or crash and nothing else does.

A sample waits for a free process, then has `timeout_s`: waiting does not count. A hanging function is killed and the
sample judged again, as is one whose process died, at most `retry_limit` times; then it fails by name. While a function
has failed so and has never given a score, later samples are tried once: it is broken, and the run should soon say so.
A function that raises fails its sample at once: asking again would only hide it. A failure is an answer of its own
kind, never a score.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from psrl.actor import Actor, handler
from psrl.errors import ConfigError, DataError, WireError
from psrl.reward.messages import GetRewardStats, RewardStats, Score, Scored, ScoreFailed
from psrl.reward.plan import RewardPlan
from psrl.reward.process import END_TIMEOUT_S, START_TIMEOUT_S, ProcessDied, ScoreTimeout, ScoringProcess
from psrl.reward.wire import Job, Raised

logger = logging.getLogger(__name__)

_MAX_TOLD = 20  # different errors of a function that are logged in full
_CALL_TIMEOUT_S = 600.0  # of a call that names none: a sample waits for its turn


def longest_s(timeout_s: float, retry_limit: int, num_samples: int) -> float:
    """The longest that a worker that lives may take for so many samples: all tries time out, each in a new process."""
    return num_samples * (1 + retry_limit) * (START_TIMEOUT_S + timeout_s + END_TIMEOUT_S)


class RewardWorker(Actor):
    """Judges by one plan. `num_processes` bounds how many samples are judged at a time."""

    def __init__(self, plan: RewardPlan, timeout_s: float = 30.0, retry_limit: int = 2, num_processes: int = 1) -> None:
        self._timeout_s = timeout_s
        self._retry_limit = retry_limit
        self._processes = [ScoringProcess(plan) for _ in range(num_processes)]
        self._free: asyncio.Queue[ScoringProcess] = asyncio.Queue()
        self._stats = dict.fromkeys(RewardStats.__struct_fields__, 0)
        self._told: set[str] = set()

    async def started(self) -> None:
        """Start one process, the others when they are needed. Raises ConfigError if a function cannot be loaded."""
        try:
            await self._processes[0].start()
        except ProcessDied:
            pass  # it is started again for the first sample, and counted there
        for process in self._processes:
            self._free.put_nowait(process)

    async def stopped(self) -> None:
        for process in self._processes:
            await process.kill()

    @handler(idempotent=True, timeout_s=_CALL_TIMEOUT_S)
    async def score(self, message: Score) -> Scored | ScoreFailed:
        """Judge one sample; answers when a process was free and has judged, or the sample is given up."""
        try:
            job = _job(message)
        except (DataError, msgspec.DecodeError) as failure:
            return self._failed(message, "error", str(failure))
        kind, reason = "", ""
        is_broken = self._stats["failed"] > self._stats["errors"] and not self._stats["scored"]
        num_tries = 1 if is_broken else 1 + self._retry_limit
        for _ in range(num_tries):
            process = await self._free.get()
            try:
                verdict = await process.judge(job, self._timeout_s)
            except ScoreTimeout as failure:
                self._count("timeouts")
                kind, reason = "timeout", str(failure)
            except (ProcessDied, ConfigError) as failure:  # ConfigError: the file was changed meanwhile
                self._count("deaths")
                kind, reason = "died", str(failure)
            except WireError as failure:
                return self._failed(message, "error", str(failure))
            else:
                if isinstance(verdict, Raised):
                    self._tell_once(verdict)
                    return self._failed(message, "error", verdict.error)
                self._count("scored")
                shaped = verdict.shaped
                return Scored(message.trajectory, shaped.raw_score, shaped.shaped_reward, shaped.metrics)
            finally:
                self._free.put_nowait(process)
        return self._failed(message, kind, reason + (f", {num_tries} times in a row" if num_tries > 1 else ""))

    @handler(idempotent=True)
    async def get_stats(self, message: GetRewardStats) -> RewardStats:
        """Counters since the worker started."""
        return RewardStats(**self._stats)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the scoring processes that run now."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def _tell_once(self, raised: Raised) -> None:
        """The traceback of each error, the first time that it is met: a broken function fails every sample alike."""
        if raised.traceback not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(raised.traceback)
            logger.warning("the reward function raised\n%s", raised.traceback.rstrip())

    def _failed(self, message: Score, kind: str, reason: str) -> ScoreFailed:
        self._count("failed")
        if kind == "error":
            self._count("errors")
        return ScoreFailed(message.trajectory, kind, reason)

    def _count(self, name: str) -> None:
        self._stats[name] += 1


def _job(message: Score) -> Job:
    """What the function gets. Its extra_info is the row's, with what is known of the answer added."""
    row: Mapping[str, Any] = msgspec.msgpack.decode(message.row)
    if not isinstance(row, dict) or not {"data_source", "ground_truth"} <= row.keys():
        raise DataError(f"{message.trajectory.key}: the row has no data_source and ground_truth")
    extra_info = {
        **(row.get("extra_info") or {}),
        "finish_reason": str(message.finish_reason),
        "num_response_tokens": message.num_response_tokens,
        "num_turns": message.num_turns,
    }
    return Job(message.solution, row["data_source"], row["ground_truth"], extra_info, message.num_response_tokens)
