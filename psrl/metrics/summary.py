"""The figures of a run in a few lines. Pure.

Overlap is the time in which generation and training both ran, as a share of the time in which at least one did. A
trajectory counts as generation from its first place on a replica to its end; a training step from
`training/started_s` to `training/ended_s`.
"""

from dataclasses import dataclass

from psrl.metrics.intervals import Intervals, intersection, total, union
from psrl.metrics.run_files import TRAINED, RunFiles
from psrl.types import Purpose


@dataclass(frozen=True)
class Accuracy:
    """A validation score at the first and the last step at which it was taken."""

    name: str
    first_step: int
    before: float
    last_step: int
    after: float

    def __str__(self) -> str:
        before = f"{self.name}: {self.before:.3f} at step {self.first_step}"
        if self.last_step == self.first_step:
            return before
        return f"{before}, {self.after:.3f} at step {self.last_step} ({self.after - self.before:+.3f})"


@dataclass(frozen=True)
class Summary:
    accuracies: tuple[Accuracy, ...]
    num_steps: int
    num_groups: int
    """Trained and not rolled back."""
    num_attempts: int
    tokens_per_s: float | None
    step_s: float | None
    overlap: float | None
    max_staleness: int | None
    mean_staleness: float | None
    bound: int | None

    def lines(self) -> list[str]:
        found = [str(accuracy) for accuracy in self.accuracies] or ["no validation"]
        attempts = "1 attempt" if self.num_attempts == 1 else f"{self.num_attempts} attempts"
        found.append(f"{self.num_steps} steps, {self.num_groups} groups trained, {attempts}")
        if self.tokens_per_s is not None and self.step_s is not None:
            found.append(f"{self.tokens_per_s:,.0f} tokens/s trained, {self.step_s:.2f} s a step")
        if self.overlap is not None:
            found.append(f"generation and training overlapped {self.overlap:.0%} of the time")
        if self.max_staleness is not None and self.mean_staleness is not None:
            found.append(f"staleness {self.mean_staleness:.2f} mean, {self.max_staleness} max, bound {self.bound}")
        return found


def generation(run: RunFiles) -> Intervals:
    """When any training trajectory ran."""
    return union(
        (line.started_s, line.ended_s)
        for line in run.lines
        if line.purpose is Purpose.TRAIN and line.started_s is not None and line.ended_s is not None
    )


def training(run: RunFiles) -> Intervals:
    """When a training step ran, those that were rolled back included."""
    return union(
        (record["training/started_s"], record["training/ended_s"])
        for record in run.metrics
        if "training/started_s" in record and "training/ended_s" in record
    )


def overlap(first: Intervals, second: Intervals) -> float | None:
    """Share of the time in which both ran; None when nothing did."""
    either = total(union([*first, *second]))
    return total(intersection(first, second)) / either if either > 0 else None


def summarise(run: RunFiles) -> Summary:
    kept = [line for line in run.lines if line.outcome == TRAINED and not run.is_rolled_back(line)]
    staleness = [
        line.trained_at - line.oldest for line in kept if line.trained_at is not None and line.oldest is not None
    ]
    num_tokens, step_s = run.series("perf/total_num_tokens")[1], run.series("timing_s/step")[1]
    seconds = sum(step_s)
    return Summary(
        accuracies=accuracies(run),
        num_steps=len({line.trained_at for line in kept}),
        num_groups=len({line.group for line in kept}),
        num_attempts=len(run.starts),
        tokens_per_s=sum(num_tokens) / seconds if num_tokens and seconds > 0 else None,
        step_s=seconds / len(step_s) if step_s else None,
        overlap=overlap(generation(run), training(run)) if training(run) else None,
        max_staleness=max(staleness, default=None),
        mean_staleness=sum(staleness) / len(staleness) if staleness else None,
        bound=run.starts[-1].staleness if run.starts else None,
    )


def accuracies(run: RunFiles) -> tuple[Accuracy, ...]:
    """Each `val-core/<source>/<variable>/mean@N`."""
    found = []
    for key in run.keys("val-core/"):
        if "/mean@" in key:
            steps, values = run.series(key)
            found.append(Accuracy(key.removeprefix("val-core/"), steps[0], values[0], steps[-1], values[-1]))
    return tuple(found)
