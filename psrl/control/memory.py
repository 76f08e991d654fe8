"""In-memory twins of what PSManager is wired to: for tests, simulation and debugging."""

from collections.abc import Sequence

import msgspec
import numpy as np

from psrl.control.messages import Prompt, Publish
from psrl.types import Epoch, GroupId, TrajectoryId, Version


def synthetic_prompt(group: int, data_source: str = "memory") -> Prompt:
    """A prompt of one token: its own group id."""
    row = msgspec.msgpack.encode({"data_source": data_source, "ground_truth": str(group), "extra_info": {}})
    return Prompt(GroupId(group), np.array([group], "<i4").tobytes(), row)


class Drawn(msgspec.Struct, frozen=True):
    """Position of a MemoryFeed."""

    count: int


class MemoryFeed:
    """`num_prompts` prompts, numbered from 0; endless when None."""

    def __init__(self, num_prompts: int | None = None) -> None:
        self._num_prompts, self._count = num_prompts, 0

    @property
    def position(self) -> Drawn:
        return Drawn(self._count)

    def restore(self, position: Drawn) -> None:
        self._count = position.count

    def next(self) -> Prompt | None:
        if self._num_prompts is not None and self._count >= self._num_prompts:
            return None
        self._count += 1
        return synthetic_prompt(self._count - 1)


class MemoryEffects:
    """Remembers what PSManager had done."""

    def __init__(self) -> None:
        self.committed: list[tuple[Epoch, Version, int]] = []
        self.announced: list[Version] = []
        self.aborted: list[TrajectoryId] = []
        self.cleared: list[tuple[str, str]] = []  # (partition, key)
        self.num_ledger_changes = 0

    async def commit_weights(self, message: Publish) -> None:
        self.committed.append((message.epoch, message.version, message.slot))

    async def version_published(self, epoch: Epoch, version: Version, slot: int) -> None:
        self.announced.append(version)

    async def abort(self, trajectories: Sequence[TrajectoryId], reason: str) -> None:
        self.aborted += trajectories

    async def clear_rows(self, keys: Sequence[str], partition: str) -> None:
        self.cleared += [(partition, key) for key in keys]

    def ledger_changed(self) -> None:
        self.num_ledger_changes += 1
