"""Ctrl-C and its kin: the first asks for an orderly end, the second ends at once."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The run was asked to end by a signal."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"interrupted by {self.signal.name}")


async def until_interrupted(work: Coroutine[Any, Any, int], at_once: Callable[[], None]) -> int:
    """Run `work`; the first SIGINT, SIGTERM or SIGHUP cancels it, any later one also calls `at_once`.

    `work` cleans up as it is cancelled, with its own time limits. Returns what `work` returns; raises Interrupted when
    it ended because of a signal. From then on the signals are ignored: the process is about to end, and one more must
    not tear a traceback into that. Must run on the main thread.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    seen: list[int] = []

    def told(number: int) -> None:
        seen.append(number)
        if len(seen) == 1:
            task.cancel()
        else:
            at_once()

    for number in _SIGNALS:
        loop.add_signal_handler(number, told, number)
    try:
        return await task
    except asyncio.CancelledError:
        if seen:
            raise Interrupted(seen[0]) from None
        raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            if seen:
                signal.signal(number, signal.SIG_IGN)
