"""`psrl report RUN_DIR`: what a run did, and whether its own record keeps its promises.

found = report(Path("runs/quickstart"))
print(found.text())
sys.exit(0 if found.ok else 1)
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from psrl.metrics.checks import Checked, Violation, check
from psrl.metrics.curves import draw
from psrl.metrics.run_files import TRAINED, RunFiles, read_run
from psrl.metrics.summary import Summary, summarise

CURVES = "curves.png"
_STEPS_NAMED = 5


@dataclass(frozen=True)
class Report:
    """`ok` is False when a check failed. Warnings are what a reader should know and no check is about."""

    run_dir: Path
    summary: Summary
    checked: Checked
    warnings: tuple[str, ...]
    curves: Path | None

    @property
    def violations(self) -> tuple[Violation, ...]:
        return self.checked.violations

    @property
    def ok(self) -> bool:
        return not self.violations

    def text(self) -> str:
        lines = self.summary.lines()
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"VIOLATION {violation}" for violation in self.violations]
        if self.checked.passed:
            lines.append(f"checks passed: {', '.join(self.checked.passed)}")
        lines += [f"not checked: {', '.join(names)} (there is no {subject})" for subject, names in self._idle().items()]
        if self.curves is not None:
            lines.append(f"curves: {self.curves}")
        return "\n".join(lines)

    def _idle(self) -> dict[str, list[str]]:
        """Idle checks by what they lack."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, subject in self.checked.idle.items():
            found[subject].append(name)
        return found


def report(run_dir: Path, *, with_curves: bool = True) -> Report:
    """Read, check and (unless told not to) draw `curves.png` into the directory. Raises DataError: not a run."""
    run = read_run(run_dir)
    curves = run_dir / CURVES if with_curves else None
    if curves is not None:
        draw(run, curves)
    return Report(run_dir, summarise(run), check(run), _warnings(run), curves)


def main(run_dir: Path | str) -> int:
    """Print the report; the exit status is 1 when a check failed."""
    found = report(Path(run_dir))
    print(found.text())
    return 0 if found.ok else 1


def _warnings(run: RunFiles) -> tuple[str, ...]:
    found = [
        f"{name}: {count} damaged {'line was' if count == 1 else 'lines were'} left out (each attempt that is killed, "
        "or finds the disk full, may leave one)"
        for name, count in sorted(run.damaged.items())
    ]
    ended = {end.attempt for end in run.ends}
    found += [
        f"attempt {start.attempt} did not end in good order, its counters are not known"
        for start in run.starts
        if start.attempt not in ended
    ]
    skipped = {step: int(number) for step, number in zip(*run.series("actor/skipped_updates"), strict=True) if number}
    if skipped:
        steps = ", ".join(map(str, list(skipped)[:_STEPS_NAMED])) + (", ..." if len(skipped) > _STEPS_NAMED else "")
        found.append(f"updates skipped for gradients that were not finite: {sum(skipped.values())}, at step {steps}")
    if not any(line.outcome == TRAINED for line in run.lines):
        found.append("nothing was trained")
    if not run.metrics:
        found.append("there is no metrics.jsonl")
    return tuple(found)
