"""What PSManager needs from around it: a source of prompts, and hands in the layers above.

Effects as values (`Effect`) are what the pure `Control` decides; `Effects` is what carries them out. The wiring
implements it over refs, tests in memory.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from psrl.control.messages import Prompt, Publish
from psrl.types import Epoch, TrajectoryId, Version


class PromptFeed(Protocol):
    """Prompts in order, each with its group id. Ids rise; a feed restored to a position goes on with the same ids."""

    def next(self) -> Prompt | None:
        """The next prompt, or None when the data has ended. Neither waits nor does I/O."""

    @property
    def position(self) -> msgspec.Struct:
        """Where the next draw is. Always of the same type, which `restore` takes."""

    def restore(self, position: Any) -> None:
        """Go on from `position`."""


class Effects(Protocol):
    """Carries out what PSManager decides. An error in any of them ends PSManager, loudly.

    `commit_weights` is awaited inside Publish and `ledger_changed` called at once; the others run one after the other,
    in the order in which they were decided.
    """

    async def commit_weights(self, message: Publish) -> None:
        """Make the slot the newest version. If it raises, the version is not published."""

    async def version_published(self, epoch: Epoch, version: Version, slot: int) -> None:
        """Replicas may sync to it."""

    async def abort(self, trajectories: Sequence[TrajectoryId], reason: str) -> None:
        """Stop these wherever they run; unknown ones are ignored."""

    async def clear_rows(self, keys: Sequence[str], partition: str) -> None:
        """Remove rows from the queue; unknown ones are ignored."""

    def ledger_changed(self) -> None:
        """A Reserve that was refused may succeed now."""


class Abort(msgspec.Struct, frozen=True):
    trajectories: tuple[TrajectoryId, ...]
    reason: str


class ClearRows(msgspec.Struct, frozen=True):
    keys: tuple[str, ...]
    partition: str


class AnnounceVersion(msgspec.Struct, frozen=True):
    version: Version
    slot: int


class LedgerChanged(msgspec.Struct, frozen=True):
    pass


Effect = Abort | ClearRows | AnnounceVersion | LedgerChanged
