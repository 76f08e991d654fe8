"""The one writer of a run's metrics: checks what is logged and hands it to the sinks.

`log(step, values)` writes at once, so a killed run has all steps that it finished. A step may be added to while it is
the newest of its axis: a key twice, or a key for a step that a later one has closed, is a mistake of the caller and
raises; nothing of that call is written. Metric families have their own step axis (`axis_of`): a validation of step 10
may come after training step 12.

A value that is not finite is left out, never written as NaN. The log names it, and each training step carries the
number left out so far as `metrics/num_left_out`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, SupportsFloat

logger = logging.getLogger(__name__)

NUM_LEFT_OUT = "metrics/num_left_out"
TRAINING, VALIDATION = "training", "validation"

_AXES = {"val-core": VALIDATION, "val-aux": VALIDATION}


def axis_of(key: str) -> str:
    """The step axis of a key's family."""
    return _AXES.get(key.partition("/")[0], TRAINING)


class Sink(Protocol):
    """A place that metrics are written to. `values` are finite and all on one axis."""

    def write(self, axis: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLogger:
    """Rank 0 of the trainer has the only one. Not to be shared by threads."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._newest: dict[str, tuple[int, frozenset[str]]] = {}  # axis -> its newest step, keys that it has
        self.num_left_out = 0

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Write values of a step. Raises ValueError for a key twice, a closed step, or a negative one."""
        parts: dict[str, dict[str, float]] = {}
        for key, value in values.items():
            parts.setdefault(axis_of(key), {})[key] = float(value)
        opened = {axis: self._checked(axis, step, part) for axis, part in parts.items()}

        left_out = [key for part in parts.values() for key, value in part.items() if not math.isfinite(value)]
        if left_out:
            logger.warning("step %d: left out, not finite: %s", step, ", ".join(sorted(left_out)))
            self.num_left_out += len(left_out)
        for axis, part in parts.items():
            finite = {key: value for key, value in part.items() if math.isfinite(value)}
            if axis == TRAINING and self._is_new(axis, step):
                finite[NUM_LEFT_OUT] = float(self.num_left_out)
            self._newest[axis] = (step, opened[axis])
            for sink in self._sinks:
                sink.write(axis, step, finite)

    def close(self) -> None:
        """Close all sinks; the first error is raised when all were tried."""
        errors: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_new(self, axis: str, step: int) -> bool:
        return axis not in self._newest or step > self._newest[axis][0]

    def _checked(self, axis: str, step: int, part: Mapping[str, float]) -> frozenset[str]:
        """All keys that the step has with `part`."""
        if step < 0:
            raise ValueError(f"metrics of step {step}")
        if self._is_new(axis, step):
            return frozenset(part)
        newest, keys = self._newest[axis]
        if step < newest:
            raise ValueError(f"{min(part)}: step {step} of {axis} is closed, the newest is {newest}")
        if twice := keys & part.keys():
            raise ValueError(f"{', '.join(sorted(twice))}: logged twice for step {step}")
        return keys | part.keys()
