"""What a run directory says happened: `trajectories.jsonl`, `attempts.jsonl` and `metrics.jsonl`, read into values.

A process that is killed may leave a torn line; such lines are left out and counted. The structs here name the fields
that reports need; writers may add others.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from psrl.errors import DataError
from psrl.types import Purpose, VersionSpan

TRAINED, ROLLED_BACK, IN_FLIGHT = "trained", "rolled_back", "in_flight"
ENDS = (TRAINED, "filtered", "redundant", "stale_aborted", "failed", ROLLED_BACK, IN_FLIGHT)
"""How a group of the training set ends: the counters of a run, which add up to `offered`."""

T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory at its end."""

    key: str
    group: int
    index: int
    attempt: int
    purpose: Purpose
    outcome: str
    offer: int = 0
    spans: tuple[VersionSpan, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    num_response_tokens: int = 0
    raw_score: float | None = None
    shaped_reward: float | None = None
    trained_at: int | None = None

    @property
    def oldest(self) -> int | None:
        """V_traj: the version of the oldest token."""
        return min((span.version for span in self.spans), default=None)


class Start(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    attempt: int
    staleness: int
    rollout_n: int
    resumed_from: int | None = None


class Publish(msgspec.Struct, frozen=True, tag_field="kind", tag="publish"):
    attempt: int
    version: int
    at_s: float


class End(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    attempt: int
    counters: dict[str, int | str]
    reason: str = ""


@dataclass(frozen=True)
class RunFiles:
    """A run, in the order in which it was written. `damaged` counts torn lines by file."""

    lines: tuple[Line, ...]
    starts: tuple[Start, ...]
    publishes: tuple[Publish, ...]
    ends: tuple[End, ...]
    metrics: tuple[dict[str, float], ...]
    damaged: dict[str, int]

    def is_rolled_back(self, line: Line, last_attempt: int | None = None) -> bool:
        """Whether a later attempt (up to `last_attempt`) began at or before the step that trained this line."""
        return line.trained_at is not None and any(
            start.attempt > line.attempt
            and (last_attempt is None or start.attempt <= last_attempt)
            and (start.resumed_from or 0) <= line.trained_at
            for start in self.starts
        )

    def cut_groups(self) -> set[tuple[int, int]]:
        """By (attempt, group), groups of which the record may lack lines: the last written by an attempt without an
        end. A group is written in one call, and a full disk or a kill can cut that between two lines or in one.
        """
        ended = {end.attempt for end in self.ends}
        last = {line.attempt: line.group for line in self.lines if line.purpose is Purpose.TRAIN}
        return {(attempt, group) for attempt, group in last.items() if attempt not in ended}

    def ends_of_groups(self, last_attempt: int) -> Counter[str]:
        """How many training groups ended how, as it stood when `last_attempt` ended."""
        ends: dict[tuple[int, int], str] = {}
        for line in self.lines:
            if line.purpose is not Purpose.TRAIN or line.attempt > last_attempt:
                continue
            if line.outcome == IN_FLIGHT and line.attempt < last_attempt:
                continue  # offered again by the next attempt
            outcome = ROLLED_BACK if self.is_rolled_back(line, last_attempt) else line.outcome
            ends[line.attempt, line.group] = outcome
        return Counter(ends.values())

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric; for a step that was done again after a restart, the later value."""
        by_step: dict[int, float] = {}
        for record in self.metrics:
            if key in record:
                by_step[int(record["step"])] = record[key]
        steps = sorted(by_step)
        return steps, [by_step[step] for step in steps]

    def keys(self, prefix: str) -> list[str]:
        return sorted({key for record in self.metrics for key in record if key.startswith(prefix)})


def read_run(run_dir: Path) -> RunFiles:
    """Raises DataError, naming the file, when the directory has no record of a run."""
    damaged: dict[str, int] = {}

    def read(name: str, parse: Callable[[bytes], T], required: bool = True) -> list[T]:
        try:
            raw = (run_dir / name).read_bytes()
        except FileNotFoundError as error:
            if not required:
                return []
            raise DataError(f"{run_dir / name} is not there: is this the directory of a run?") from error
        values: list[T] = []
        for line in filter(bytes.strip, raw.split(b"\n")):
            try:
                values.append(parse(line))
            except (msgspec.MsgspecError, ValueError):
                damaged[name] = damaged.get(name, 0) + 1
        return values

    lines = read("trajectories.jsonl", msgspec.json.Decoder(Line).decode)
    attempts: list[Start | Publish | End] = read("attempts.jsonl", _attempt_decoder.decode)
    metrics = read("metrics.jsonl", _metrics, required=False)
    return RunFiles(
        lines=tuple(lines),
        starts=_only(Start, attempts),
        publishes=_only(Publish, attempts),
        ends=_only(End, attempts),
        metrics=tuple(metrics),
        damaged=damaged,
    )


_attempt_decoder = msgspec.json.Decoder(Start | Publish | End)
_metrics_decoder = msgspec.json.Decoder(dict[str, float])


def _metrics(line: bytes) -> dict[str, float]:
    record = _metrics_decoder.decode(line)
    if "step" not in record or not all(math.isfinite(value) for value in record.values()):
        raise ValueError("not a record of metrics")
    return record


def _only(kind: type[T], values: Iterable[object]) -> tuple[T, ...]:
    return tuple(value for value in values if isinstance(value, kind))
