"""Lines of `trajectories.jsonl` and `attempts.jsonl`. Other tools read them: their field names are a contract."""

from enum import StrEnum

import msgspec

from psrl.control.messages import Counters
from psrl.types import Epoch, FinishReason, GroupId, Purpose, Version, VersionSpan


class Outcome(StrEnum):
    """How a trajectory ended. All siblings of a group end alike."""

    TRAINED = "trained"
    FILTERED = "filtered"
    REDUNDANT = "redundant"
    STALE_ABORTED = "stale_aborted"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    IN_FLIGHT = "in_flight"  # written when an attempt ends in good order; its prompt is offered again by the next
    VALIDATED = "validated"


class TrajectoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory at its end. Of a sibling that was not complete only key, group and outcome are known."""

    key: str
    group: GroupId
    index: int
    offer: int
    attempt: int
    purpose: Purpose
    replicas: tuple[str, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    raw_score: float | None = None
    shaped_reward: float | None = None
    metrics: dict[str, float] = {}
    outcome: Outcome
    trained_at: int | None = None  # the buffer, which is the version it was trained on
    reason: str | None = None


class StartLine(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """An attempt begins. Lines of earlier attempts with trained_at >= resumed_from are rolled back from here on."""

    attempt: int
    epoch: Epoch
    resumed_from: int | None
    staleness: int
    rollout_n: int


class PublishLine(msgspec.Struct, frozen=True, tag_field="kind", tag="publish"):
    """A version was committed, at `at_s` of the loop's clock. The version that an attempt starts with has no line.

    `skipped`: its update was skipped, so it has the weights of the version before.
    """

    attempt: int
    version: Version
    at_s: float
    skipped: bool = False


class EndLine(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """An attempt ended in good order. Counters are since the run's first start."""

    attempt: int
    counters: Counters
    reason: str


AttemptLine = StartLine | PublishLine | EndLine
