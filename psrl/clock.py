"""The one source of time: the running event loop, so that a simulated loop can own it."""

import asyncio


def now() -> float:
    """Seconds on the running loop's monotonic clock. Raises RuntimeError outside a loop."""
    return asyncio.get_running_loop().time()
