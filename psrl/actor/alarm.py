"""An alarm: one loop timer for many deadlines.

A timer of its own for each call costs more than the rest of the call, and nearly all are cancelled. So whoever holds
the calls keeps their deadlines, and an alarm that is set to the earliest; when it rings, `sweep(now)` ends what is
late and returns the earliest deadline that is left (inf: none). A deadline that goes away is not told to the alarm:
it then rings once for nothing.
"""

import asyncio
import math
from collections.abc import Callable

from psrl.clock import now

EARLY_S = 0.001  # a timer may ring a little before its time
PAUSE_S = 0.005  # between two rings, so that a thousand deadlines in a row are a few sweeps


class Alarm:
    """Belongs to the running loop. `when` is the time it rings; check `deadline < when` before you call `set`."""

    __slots__ = ("_sweep", "_timer", "when")

    def __init__(self, sweep: Callable[[float], float]) -> None:
        self.when = math.inf
        self._sweep = sweep
        self._timer: asyncio.TimerHandle | None = None

    def set(self, deadline: float) -> None:
        """Ring at `deadline`, if not before."""
        if deadline < self.when:
            self.cancel()
            self.when = deadline
            self._timer = asyncio.get_running_loop().call_at(deadline, self._ring)

    def cancel(self) -> None:
        self.when = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self.when, self._timer = math.inf, None
        time = now()
        following = self._sweep(time + EARLY_S)
        if following < math.inf:
            self.set(max(following, time + PAUSE_S))
