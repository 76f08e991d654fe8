"""The launcher's view of a run: the console follows `metrics.jsonl` as the trainer writes it."""

import asyncio
from pathlib import Path

from psrl.launch.logs import print_line
from psrl.launch.spec import RunSpec
from psrl.metrics import ConsoleSink, JsonlReader
from psrl.metrics.logger import axis_of

POLL_S = 0.5


class Progress:
    """Shows steps and validations as they come; silent about them if trainer.logger has no console."""

    def __init__(self, run_dir: Path, spec: RunSpec) -> None:
        self._reader = JsonlReader(run_dir / "metrics.jsonl")
        self._reader.poll()  # what earlier attempts wrote
        self._console: ConsoleSink | None = None
        if "console" in spec.config.trainer.logger:
            self._console = ConsoleSink(spec.total_steps, first_step=spec.initial_version)

    def say(self, line: str) -> None:
        """A whole line above the bar."""
        if self._console is not None:
            self._console.say(line)
        else:
            print_line(line)

    async def follow(self) -> None:
        while True:
            self.poll()
            await asyncio.sleep(POLL_S)

    def poll(self) -> None:
        """Show what came since the last look."""
        for line in self._reader.poll():
            step = line.pop("step", None)
            if self._console is None or not isinstance(step, int):
                continue
            parts: dict[str, dict[str, float]] = {}
            for key, value in line.items():
                if isinstance(value, int | float):
                    parts.setdefault(axis_of(key), {})[key] = float(value)
            for axis, values in parts.items():
                self._console.write(axis, step, values)

    def close(self) -> None:
        if self._console is not None:
            self._console.close()
