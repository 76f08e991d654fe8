"""One buffer: the places for the groups of one training step.

Layout, as seen from outside: OCCUPIED entries from slot 0 up, RESERVED ones from the last slot down, EMPTY
between. It is kept as two lists: `occupied[i]` is slot i, `reserved[k]` is slot `slots - 1 - k`; so a reservation
taken out is replaced by the one of the lowest slot, which is the list's last.

Budget (dynamic sampling): `filtered` groups were dropped on the way to this buffer. While
`filtered + occupied + reserved < budget` a place may be given away; when `filtered + occupied` reaches the budget
nothing is reserved any more and the buffer is closed with what it has.
"""

from dataclasses import dataclass, field

from psrl.staleness.events import Status
from psrl.types import GroupId, Version


@dataclass(slots=True, eq=False)
class Entry:
    """A group in a buffer. `versions` has, by sibling index, the version that the sibling was reserved under."""

    group: GroupId
    versions: dict[int, Version]
    occupied_version: Version | None = None

    @property
    def version(self) -> Version:
        """The oldest version of the group: of its tokens once it is occupied, of its reservations before."""
        return min(self.versions.values()) if self.occupied_version is None else self.occupied_version


@dataclass(slots=True)
class Buffer:
    """Places of buffer `id`: `needed` groups make it ready, `slots` fit."""

    id: int
    needed: int
    slots: int
    budget: int | None = None
    occupied: list[Entry] = field(default_factory=list)
    reserved: list[Entry] = field(default_factory=list)
    filtered: int = 0
    closed: bool = False
    consumed: bool = False

    @property
    def empty(self) -> int:
        """Slots that hold nothing."""
        return self.slots - len(self.occupied) - len(self.reserved)

    @property
    def room(self) -> int:
        """Places that may be reserved now."""
        if self.closed or self.consumed:
            return 0
        if self.budget is None:
            return self.empty
        return min(self.empty, self.budget - self.filtered - len(self.occupied) - len(self.reserved))

    @property
    def ready(self) -> bool:
        return self.closed or len(self.occupied) >= self.needed

    @property
    def exhausted(self) -> bool:
        """The refill budget is used up: what is occupied is all that will come."""
        return self.budget is not None and self.filtered + len(self.occupied) >= self.budget

    @property
    def status(self) -> Status:
        if self.closed:
            return Status.READY
        if self.ready:
            return Status.READY_WITH_CAPACITY if self.empty else Status.READY
        return Status.PENDING if self.empty else Status.STUCK

    def slot_of(self, entry: Entry) -> int:
        return self.slots - 1 - self.reserved.index(entry)

    def reserve(self, entry: Entry) -> int:
        """Take the last slot that is not reserved; return it."""
        assert self.empty > 0
        self.reserved.append(entry)
        return self.slots - len(self.reserved)

    def occupy(self, entry: Entry) -> int:
        """Append after the last occupied slot; return it."""
        assert self.empty > 0
        self.occupied.append(entry)
        return len(self.occupied) - 1

    def take_out(self, entry: Entry) -> None:
        """Remove a reservation; the one in the lowest slot fills the hole."""
        hole = self.reserved.index(entry)
        last = self.reserved.pop()
        if last is not entry:
            self.reserved[hole] = last

    def replace(self, entry: Entry, other: Entry) -> None:
        """Put `other` in exactly the slot that `entry` had reserved."""
        self.reserved[self.reserved.index(entry)] = other
