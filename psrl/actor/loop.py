"""How a process that we start runs its event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh uvloop. Like asyncio.run: cancels what is left, closes the loop."""
    import uvloop  # here, not above: embedding PSRL in another loop must not load it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
