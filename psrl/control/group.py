"""A group on its way from the feed to its end, and the rule that filters groups without signal.

Life: QUEUED (waits for a worker to ask) -> RUNNING (a worker has it) -> COMPLETE (all siblings done; for training: in
the ledger, occupied). A lost worker or a retry takes RUNNING back to QUEUED; each offer has its number, and messages of
an older offer are refused.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from psrl.control.messages import Complete, Prompt
from psrl.control.records import Outcome, TrajectoryLine
from psrl.control.settings import ControlSettings
from psrl.errors import RunFailed
from psrl.types import GroupId, Purpose, TrajectoryId, Version


class Phase(Enum):
    QUEUED = auto()
    RUNNING = auto()
    COMPLETE = auto()


@dataclass(slots=True, eq=False)
class Group:
    """`offer` is the number of the last offer, -1 before the first."""

    prompt: Prompt
    purpose: Purpose
    size: int
    offer: int = -1
    phase: Phase = Phase.QUEUED
    worker: str = ""
    life: int = 0
    offered_s: float = 0.0
    failures: int = 0
    reserved: dict[int, Version] = field(default_factory=dict)
    completed: dict[int, Complete] = field(default_factory=dict)

    @property
    def id(self) -> GroupId:
        return self.prompt.group

    def hand_out(self, worker: str, life: int, now: float) -> None:
        self.offer += 1
        self.phase, self.worker, self.life, self.offered_s = Phase.RUNNING, worker, life, now
        self.reserved.clear()
        self.completed.clear()

    def trajectories(self) -> tuple[TrajectoryId, ...]:
        return tuple(TrajectoryId(self.id, index, self.offer, self.purpose) for index in range(self.size))

    def unfinished(self) -> tuple[TrajectoryId, ...]:
        """Siblings that a worker may still be running."""
        return tuple(trajectory for trajectory in self.trajectories() if trajectory.index not in self.completed)

    def keys(self) -> tuple[str, ...]:
        """Rows of the siblings on the queue, by index."""
        return tuple(trajectory.key for trajectory in self.trajectories())

    def version_of(self, index: int) -> Version:
        """V_traj of a sibling: its oldest token's version; of an empty response, the version it was reserved under."""
        spans = self.completed[index].spans if index in self.completed else ()
        return min((span.version for span in spans), default=self.reserved[index])

    def version(self) -> Version:
        """V_traj of the complete group."""
        return min(self.version_of(index) for index in range(self.size))

    def lines(
        self, attempt: int, outcome: Outcome, *, trained_at: int | None = None, reason: str | None = None
    ) -> tuple[TrajectoryLine, ...]:
        """A line of the trajectory log for each sibling, with what is known of it."""
        return tuple(
            _line(trajectory, self.completed.get(trajectory.index), attempt, outcome, trained_at, reason)
            for trajectory in self.trajectories()
        )


def _line(
    trajectory: TrajectoryId,
    complete: Complete | None,
    attempt: int,
    outcome: Outcome,
    trained_at: int | None,
    reason: str | None,
) -> TrajectoryLine:
    line = TrajectoryLine(
        key=trajectory.key,
        group=trajectory.group,
        index=trajectory.index,
        offer=trajectory.offer,
        attempt=attempt,
        purpose=trajectory.purpose,
        outcome=outcome,
        trained_at=trained_at,
        reason=reason,
    )
    if complete is None:
        return line
    return msgspec.structs.replace(
        line,
        replicas=tuple(dict.fromkeys(span.replica for span in complete.spans)),
        spans=complete.spans,
        started_s=complete.started_s,
        ended_s=complete.ended_s,
        finish_reason=complete.finish_reason,
        num_prompt_tokens=complete.num_prompt_tokens,
        num_response_tokens=complete.num_response_tokens,
        raw_score=complete.raw_score,
        shaped_reward=complete.shaped_reward,
        metrics=complete.metrics,
    )


def not_finite(complete: Complete) -> str | None:
    """Names a score that is no number; such a trajectory fails, it is not a wrong answer."""
    values = {"raw_score": complete.raw_score, "shaped_reward": complete.shaped_reward, **complete.metrics}
    return next((f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)), None)


def without_signal(group: Group, settings: ControlSettings) -> bool:
    """Dynamic sampling: whether the siblings' metric differs by no more than `min_spread`.

    Raises RunFailed when the reward does not report the metric.
    """
    if not settings.filter_enabled:
        return False
    values = [_metric(group.completed[index], settings.filter_metric) for index in range(group.size)]
    return max(values) - min(values) <= settings.min_spread


def _metric(complete: Complete, name: str) -> float:
    if name == "score":
        return complete.raw_score
    if name not in complete.metrics:
        known = ", ".join(sorted(complete.metrics)) or "none"
        raise RunFailed(
            f"algorithm.filter_groups.metric={name} is not among the reward's metrics ({known}): use one of them, "
            "or score"
        )
    return complete.metrics[name]
