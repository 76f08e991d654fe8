"""Does a run's own record keep the promises of the staleness protocol? Pure.

A check that finds nothing to look at in a record has neither passed nor failed: it is idle, and says what it lacks.

| check | what must hold |
|---|---|
| attempts | every line belongs to an attempt that was started, attempts are numbered one by one |
| damage | no more torn lines in a file than attempts that may have been killed while writing |
| spans | a trained or validated line accounts for each of its tokens |
| bound | trained_at - version of the oldest token is in 0..staleness, and no token is newer than trained_at |
| siblings | all rollout_n siblings of a group end alike, a trained one's at the same step, each in one line; fewer |
|          | lines are taken where a killed attempt was cut off writing its last group |
| once | what the run was in the end trained on has each group once |
| versions | published versions of an attempt follow each other from the one that it started with |
| conservation | groups by outcome, counted from the lines, are the counters at each attempt's end |
| synchronous | staleness 0: all tokens are of the version trained on, none begun before it was published |
| validation | a validated trajectory is of one version |
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from psrl.metrics.run_files import ENDS, TRAINED, Line, RunFiles, Start
from psrl.types import Purpose

_EXAMPLES = 3


@dataclass(frozen=True)
class Violation:
    """`check` is a name from the table; `texts` has a sentence for each place."""

    check: str
    texts: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.texts) - _EXAMPLES
        shown = "; ".join(self.texts[:_EXAMPLES]) + (f"; and {more} more" if more > 0 else "")
        return f"{self.check}: {shown}"


@dataclass(frozen=True)
class Check:
    """`look` yields a sentence for each place where the promise is broken; `subject` names what it looks at."""

    look: Callable[[RunFiles], Iterable[str]]
    subject: str
    has_subject: Callable[[RunFiles], bool]


@dataclass(frozen=True)
class Checked:
    """What the checks found, each in the order of the table. `idle` maps checks to the subject that is not there."""

    violations: tuple[Violation, ...]
    passed: tuple[str, ...]
    idle: dict[str, str]


def check(run: RunFiles) -> Checked:
    """Do all checks. One that fails is never idle, whatever it looked at."""
    found = {name: tuple(one.look(run)) for name, one in CHECKS.items()}
    idle = {name: CHECKS[name].subject for name in CHECKS if not found[name] and not CHECKS[name].has_subject(run)}
    return Checked(
        violations=tuple(Violation(name, texts) for name, texts in found.items() if texts),
        passed=tuple(name for name, texts in found.items() if not texts and name not in idle),
        idle=idle,
    )


def _attempts(run: RunFiles) -> Iterator[str]:
    numbers = [start.attempt for start in run.starts]
    if numbers != list(range(len(numbers))):
        yield f"attempts are numbered {numbers}"
    if not numbers:
        yield "no attempt was started"
    for attempt in sorted({line.attempt for line in run.lines} - set(numbers)):
        yield f"lines of attempt {attempt}, which was not started"


def _damage(run: RunFiles) -> Iterator[str]:
    for name, count in run.damaged.items():
        if count > len(run.starts):
            yield f"{name} has {count} damaged lines, {len(run.starts)} attempts explain no more than as many"


def _spans(run: RunFiles) -> Iterator[str]:
    for line in run.lines:
        if line.outcome not in (TRAINED, "validated"):
            continue
        if (line.trained_at is None) == (line.outcome == TRAINED):
            yield f"{_named(line)} is {line.outcome} at {line.trained_at}"
        num_tokens = sum(span.num_tokens for span in line.spans)
        if num_tokens != line.num_response_tokens:
            yield f"{_named(line)} has {line.num_response_tokens} tokens, versions are known of {num_tokens}"
        if line.started_s is None or line.ended_s is None or line.started_s > line.ended_s:
            yield f"{_named(line)} ran from {line.started_s} to {line.ended_s}"


def _bound(run: RunFiles) -> Iterator[str]:
    for line, start, step in _trained(run):
        for span in line.spans:
            if not 0 <= step - span.version <= start.staleness:
                yield (
                    f"{_named(line)} was trained at {step} with tokens of version {span.version}, "
                    f"the bound is {start.staleness}"
                )
                break


def _siblings(run: RunFiles) -> Iterator[str]:
    groups: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in run.lines:
        if line.purpose is Purpose.TRAIN:
            groups[line.attempt, line.group].append(line)
    started, cut = {start.attempt: start for start in run.starts}, run.cut_groups()
    for (attempt, group), lines in groups.items():
        where = f"group {group} of attempt {attempt}"
        ends = {(line.outcome, line.trained_at) for line in lines}
        if len(ends) > 1:
            yield f"{where} ended as {sorted(map(str, ends))}"
        elif lines[0].outcome == TRAINED and attempt in started:
            indices, expected = sorted(line.index for line in lines), list(range(started[attempt].rollout_n))
            if (attempt, group) in cut:
                expected = sorted(set(indices) & set(expected))
            if indices != expected or len({line.offer for line in lines}) > 1:
                keys = ", ".join(line.key for line in lines)
                yield f"{where} was trained with siblings {keys} instead of {started[attempt].rollout_n} of one offer"


def _once(run: RunFiles) -> Iterator[str]:
    trained: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for line, _, step in _trained(run):
        if not run.is_rolled_back(line):
            trained[line.group].add((line.attempt, step))
    for group, times in sorted(trained.items()):
        if len(times) > 1:
            yield f"group {group} was trained {len(times)} times: (attempt, step) {sorted(times)}"


def _versions(run: RunFiles) -> Iterator[str]:
    for start in run.starts:
        expected = (start.resumed_from or 0) + 1
        for publish in run.publishes:
            if publish.attempt != start.attempt:
                continue
            if publish.version != expected:
                yield f"attempt {start.attempt} published {publish.version} where {expected} was due"
            expected = publish.version + 1


def _conservation(run: RunFiles) -> Iterator[str]:
    for end in run.ends:
        counters = {name: int(end.counters.get(name, 0)) for name in ("offered", *ENDS)}
        total = sum(counters[name] for name in ENDS)
        if counters["offered"] != total:
            yield f"attempt {end.attempt}: {counters['offered']} groups were offered, {total} are accounted for"
        counted = run.ends_of_groups(end.attempt)
        for name in sorted({*ENDS, *counted}):
            if counted[name] != counters.get(name, 0):
                yield (
                    f"attempt {end.attempt}: {counted[name]} groups {name} in the lines, "
                    f"{counters.get(name, 0)} in the counters"
                )


def _synchronous(run: RunFiles) -> Iterator[str]:
    published = {(publish.attempt, publish.version): publish.at_s for publish in run.publishes}
    for line, start, step in _trained(run):
        if start.staleness != 0:
            continue
        if any(span.version != step for span in line.spans):
            yield f"{_named(line)} was trained at {step} with tokens of {[span.version for span in line.spans]}"
        if step == (start.resumed_from or 0):
            continue  # the version that the attempt started with
        at_s = published.get((line.attempt, step))
        if at_s is None:
            yield f"{_named(line)} was trained at {step}, which was never published"
        elif line.started_s is not None and line.started_s < at_s:
            yield f"{_named(line)}, trained at {step}, began {at_s - line.started_s:.3f} s before that was published"


def _validation(run: RunFiles) -> Iterator[str]:
    for line in run.lines:
        versions = sorted({span.version for span in line.spans})
        if line.outcome == "validated" and len(versions) > 1:
            yield f"{_named(line)} was validated over versions {versions}"


def _trained(run: RunFiles) -> Iterator[tuple[Line, Start, int]]:
    """Trained lines with the start of their attempt and the step; rolled back ones too, they kept the same promise."""
    started = {start.attempt: start for start in run.starts}
    for line in run.lines:
        if line.outcome == TRAINED and line.trained_at is not None and line.attempt in started:
            yield line, started[line.attempt], line.trained_at


def _named(line: Line) -> str:
    return f"trajectory {line.key} of attempt {line.attempt}"


def _has_trained(run: RunFiles) -> bool:
    return any(True for _ in _trained(run))


def _has_groups(run: RunFiles) -> bool:
    return any(line.purpose is Purpose.TRAIN for line in run.lines)


def _has_validated(run: RunFiles) -> bool:
    return any(line.outcome == "validated" for line in run.lines)


CHECKS: dict[str, Check] = {
    "attempts": Check(_attempts, "attempt", lambda run: bool(run.starts)),
    "damage": Check(_damage, "attempt", lambda run: bool(run.starts)),
    "spans": Check(_spans, "trajectory", lambda run: _has_trained(run) or _has_validated(run)),
    "bound": Check(_bound, "trained trajectory", _has_trained),
    "siblings": Check(_siblings, "group", _has_groups),
    "once": Check(_once, "trained trajectory", _has_trained),
    "versions": Check(_versions, "published version", lambda run: bool(run.publishes)),
    "conservation": Check(_conservation, "attempt that ended in good order", lambda run: bool(run.ends)),
    "synchronous": Check(
        _synchronous,
        "trajectory trained under psrl.staleness=0",
        lambda run: any(start.staleness == 0 for _, start, _ in _trained(run)),
    ),
    "validation": Check(_validation, "validated trajectory", _has_validated),
}
