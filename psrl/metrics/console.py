"""Progress for people: a bar with rates on a terminal, plain whole lines everywhere else.

Plain is also what a terminal gets that says it can do no better (TERM=dumb, or a C locale, whose output is ASCII).
"""

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from psrl.metrics.logger import VALIDATION

_MAX_STEPS_AVERAGED = 10


def _wants_plain(stream: TextIO) -> bool:
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG") or "C"
    return not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb" or locale in ("C", "POSIX")


class ConsoleSink:
    """Shows step `first_step + 1` to `num_steps` of a run. `plain` None: as the stream and the environment ask."""

    def __init__(
        self, num_steps: int, *, first_step: int = 0, stream: TextIO | None = None, plain: bool | None = None
    ) -> None:
        self._num_steps = num_steps
        self._stream = stream or sys.stdout
        self._step_s: list[float] = []
        self._bar: _Bar | None = None
        if not (_wants_plain(self._stream) if plain is None else plain):
            self._bar = _Bar(num_steps, first_step, self._stream)

    def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        if axis == VALIDATION:
            for key in sorted(key for key in values if key.startswith("val-core/") and "/mean@" in key):
                self.say(f"validation at step {step}: {key.removeprefix('val-core/')} {values[key]:.3f}")
            return
        if "timing_s/step" in values:
            self._step_s = [*self._step_s, values["timing_s/step"]][-_MAX_STEPS_AVERAGED:]
        text = described(values)
        if self._bar is not None:
            self._bar.show(step, text)
        elif text:
            self.say(f"step {step}/{self._num_steps}: {text}{self._remaining(step)}")

    def say(self, line: str) -> None:
        """A line of its own; on a terminal above the bar."""
        if self._bar is not None:
            self._bar.say(line)
        else:
            encoding = self._stream.encoding or "ascii"
            print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _remaining(self, step: int) -> str:
        left = self._num_steps - step
        if not self._step_s or left <= 0:
            return ""
        seconds = round(left * sum(self._step_s) / len(self._step_s))
        return f", {seconds // 60}:{seconds % 60:02d} left"


def described(values: Mapping[str, float]) -> str:
    """The few numbers by which one follows a run, as far as they are there."""
    parts = []
    for key, form in (
        ("critic/score/mean", "score {:.3f}"),
        ("response_length/mean", "length {:.1f}"),
        ("staleness/mean", "staleness {:.2f}"),
        ("actor/grad_norm", "grad norm {:.3f}"),
        ("timing_s/step", "{:.2f} s"),
        ("perf/throughput", "{:,.0f} tokens/s"),
    ):
        if key in values:
            parts.append(form.format(values[key]))
    return ", ".join(parts)


class _Bar:
    """rich's progress bar; imported here, because only terminals need it."""

    def __init__(self, num_steps: int, first_step: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining
        from rich.table import Column

        self._progress = Progress(
            TextColumn("steps"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            Remaining(table_column=Column(no_wrap=True)),
            # Takes what is left of the line, so that a narrow terminal cuts it and not the rest.
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=Console(file=stream),
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first_step)
        self._progress.start()

    def show(self, step: int, text: str) -> None:
        if text:
            self._progress.update(self._task, description=text)
        self._progress.update(self._task, completed=step)

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
