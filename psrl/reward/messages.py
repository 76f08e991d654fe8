"""What agent loop workers say to reward workers."""

import msgspec

from psrl.types import FinishReason, TrajectoryId


class Score(msgspec.Struct, frozen=True, tag=True):
    """Judge one finished answer. Idempotent: the same message gives the same answer."""

    trajectory: TrajectoryId
    solution: str  # the response decoded without special tokens
    row: bytes  # msgpack of data_source, ground_truth and extra_info, as in Prompt.row
    num_response_tokens: int  # with the end token, if one was produced; what the overlong penalty counts
    finish_reason: FinishReason  # reaches the scoring function as extra_info["finish_reason"]
    num_turns: int = 1


class Scored(msgspec.Struct, frozen=True, tag=True):
    """raw_score is what the function said, shaped_reward what is trained on (overlong penalty included).

    Both are sums over the scoring sources, weighted by reward_coef. `metrics` has the numeric extra info; acc is
    always there.
    """

    trajectory: TrajectoryId
    raw_score: float
    shaped_reward: float
    metrics: dict[str, float]


class ScoreFailed(msgspec.Struct, frozen=True, tag=True):
    """There is no score, which is not a score of 0. `kind`: error (it raised), timeout, or died (its process ended)."""

    trajectory: TrajectoryId
    kind: str
    reason: str  # with the function's traceback, if it raised


class GetRewardStats(msgspec.Struct, frozen=True, tag=True):
    """Ask a reward worker for its counters."""


class RewardStats(msgspec.Struct, frozen=True, tag=True):
    """Counted since the worker started; the metrics `reward/errors`, `reward/timeouts` and so on."""

    scored: int = 0
    errors: int = 0  # samples whose function raised or answered nonsense
    timeouts: int = 0  # attempts killed at the time limit
    deaths: int = 0  # attempts whose process ended by itself
    failed: int = 0  # samples given up, for any of these reasons
