"""An actor: a mailbox with handlers.

Life cycle. The runtime sets `name` and `runtime`, awaits `started()`, then lets handlers run, interleaved at their
awaits: state is safe exactly between two of them. A handler that awaits is a task of its own on the loop, one that
never does runs to its end at once. Tasks made by `self.spawn` belong to the actor: when
one raises, the actor ends and its callers are told; when the actor ends they are cancelled. Then `stopped()` runs,
within a deadline.
"""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from psrl.actor.runtime import Runtime
    from psrl.actor.supervisor import Supervisor

T = TypeVar("T")


class Actor:
    """Base of all actors. Subclasses need not call `__init__`; what they hold is theirs until `stopped()`."""

    name: str
    runtime: "Runtime"
    _supervisor: "Supervisor | None" = None

    async def started(self) -> None:
        """Called once on the loop before the first message is handled. An error here ends the actor."""

    async def stopped(self) -> None:
        """Called once after the last handler and task ended, also after a failure."""

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """Run a task that this actor owns. An error in it ends the actor; the actor's end cancels it."""
        if self._supervisor is None:
            coroutine.close()
            raise RuntimeError(f"{type(self).__qualname__} has no runtime yet: spawn tasks from started() or later")
        return self._supervisor.own(coroutine, name)
