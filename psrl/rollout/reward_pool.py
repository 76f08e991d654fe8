"""The reward workers as an agent loop worker sees them: which one gets the next sample, and how long to wait.

A few samples are with a reward worker at a time, the others wait here for a place. So queueing is under no time limit
of a sample, and still has an end: each sample ahead is answered, or fails by the limit of its judgement, which the
reward worker keeps; a worker that is stuck itself is given up after `call_timeout_s`.
"""

import asyncio
from collections.abc import Sequence

from psrl.actor import within
from psrl.clock import now
from psrl.errors import ActorDied, ActorError, CallTimeout
from psrl.reward import RewardWorker
from psrl.reward.messages import Score, Scored, ScoreFailed

SAMPLES_PER_WORKER = 2  # one is judged, the next is there
_POLL_S = 0.1  # between looks for a reward worker that is back, longer each time
_MAX_POLL_S = 1.0


class ScoreMissing(ActorError):
    """A sample could not be scored. `final`: it was tried again already, another attempt would be one too many."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class RewardPool:
    """Shares samples among reward workers. `call_timeout_s` is over what a living one can take for all that is with
    it; `patience_s` is for how long a sample waits for a dead one to be started again."""

    def __init__(self, workers: Sequence[RewardWorker], *, call_timeout_s: float, patience_s: float) -> None:
        self._places: asyncio.Queue[RewardWorker] = asyncio.Queue()
        for worker in [*workers] * SAMPLES_PER_WORKER:
            self._places.put_nowait(worker)
        self._call_timeout_s = call_timeout_s
        self._patience_s = patience_s

    async def score(self, sample: Score) -> Scored:
        """The score, from whichever worker has a place first and lives. Raises ScoreMissing by name."""
        patient_until_s: float | None = None
        num_deaths = 0
        while True:
            worker = await self._places.get()
            try:
                answer = await within(worker, self._call_timeout_s).score(sample)
            except CallTimeout as late:
                raise ScoreMissing(f"a reward worker is stuck: {late}", final=True) from late
            except ActorDied as dead:
                patient_until_s = patient_until_s or now() + self._patience_s
                if now() > patient_until_s:
                    raise ScoreMissing(f"no reward worker lives: {dead}", final=False) from dead
                num_deaths += 1
                await asyncio.sleep(min(_POLL_S * num_deaths, _MAX_POLL_S))  # its place is kept: it can be of no use
            else:
                if isinstance(answer, ScoreFailed):
                    raise ScoreMissing(f"not scored: {answer.reason}", final=answer.kind != "error")
                return answer
            finally:
                self._places.put_nowait(worker)
