"""Who the trainer waits for, in words: for logs, watchdogs and the person who looks at them. Pure."""

from psrl.control.group import Group, Phase
from psrl.control.inventory import Inventory
from psrl.control.validation import ValidationRound
from psrl.staleness import Ledger

_SHOWN = 5


class Waiting:
    """Describes what a buffer lacks."""

    def __init__(self, ledger: Ledger, inventory: Inventory, validation: ValidationRound | None) -> None:
        self._ledger, self._inventory, self._round = ledger, inventory, validation

    def describe(self, buffer: int, now: float) -> str:
        known = self._ledger.buffers.get(buffer)
        have = len(known.occupied) if known is not None else 0
        parts = [f"buffer {buffer} has {have} of {self._ledger.needed} groups"]
        groups = self._inventory.groups.values()
        running = [group for group in groups if group.phase is Phase.RUNNING]
        queued = sum(group.phase is Phase.QUEUED for group in groups)
        parts += [
            self._of_worker(worker, [group for group in running if group.worker == worker], now)
            for worker in sorted({group.worker for group in running})
        ]
        if queued:
            parts.append(f"{queued} wait for a worker to ask")
        if self._round is not None:
            parts.append(self._round.describe())
        if not running and not queued:
            parts.append("the data has ended" if self._inventory.dry else "no worker has asked for the rest")
        return "; ".join(parts)

    def _of_worker(self, worker: str, groups: list[Group], now: float) -> str:
        oldest = min(groups, key=lambda group: group.offered_s)
        shown = ", ".join(str(group.id) for group in groups[:_SHOWN]) + (", ..." if len(groups) > _SHOWN else "")
        without_place = sum(self._ledger.buffer_of(group.id) is None for group in groups)
        return (
            f"{worker} runs {len(groups)} (groups {shown}; {without_place} without a place yet; "
            f"group {oldest.id} for {now - oldest.offered_s:.1f} s)"
        )
