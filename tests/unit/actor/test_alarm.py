"""One timer for many deadlines."""

import asyncio
import math

from actors_under_test import until

from psrl.actor.alarm import Alarm
from psrl.clock import now


class Deadlines:
    def __init__(self) -> None:
        self.left: list[float] = []
        self.rung: list[float] = []
        self.alarm = Alarm(self.sweep)

    def add(self, deadline: float) -> None:
        self.left.append(deadline)
        self.alarm.set(deadline)

    def sweep(self, time: float) -> float:
        self.rung.append(time)
        self.left = [deadline for deadline in self.left if deadline > time]
        return min(self.left, default=math.inf)


async def test_it_rings_for_the_earliest_and_then_for_the_next() -> None:
    deadlines, start = Deadlines(), now()
    for delay in (0.3, 0.05, 0.15):
        deadlines.add(start + delay)
    assert deadlines.alarm.when == start + 0.05
    await until(lambda: not deadlines.left)
    num_rung = len(deadlines.rung)
    assert 1 <= num_rung <= 3  # less than three if this machine was busy elsewhere
    assert deadlines.rung[-1] >= start + 0.3
    assert deadlines.alarm.when == math.inf
    await asyncio.sleep(0.02)
    assert len(deadlines.rung) == num_rung  # nothing left to ring for


async def test_many_deadlines_in_a_row_are_few_sweeps() -> None:
    deadlines, start = Deadlines(), now()
    for count in range(1000):
        deadlines.add(start + 0.02 + count * 1e-5)
    await until(lambda: not deadlines.left)
    assert len(deadlines.rung) <= 5


async def test_a_cancelled_alarm_is_silent() -> None:
    deadlines = Deadlines()
    deadlines.add(now() + 0.01)
    deadlines.alarm.cancel()
    await asyncio.sleep(0.05)
    assert deadlines.rung == []
    assert deadlines.alarm.when == math.inf
