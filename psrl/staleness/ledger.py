"""The staleness ledger: who may be generated under which version, and which step trains it.

Buffer b holds the `needed` groups (B) that train version b into b + 1. A group is one entry with n siblings; its
version V_traj is the oldest version of any of its tokens. Life of an entry:

    (none) --reserve--> RESERVED --occupy--> OCCUPIED --consume, publish--> trained
                           |  filter, release, abort
                           v
                        (none)

- Reserve takes the latest admissible buffer, b <= V + staleness, so that early buffers stay open for those that end
  early; Occupy takes the earliest with room, never later than the reservation.
- What is consumed and what is published is the trainer's: consume(V), then publish(V + 1), one after the other.

Invariants (`check()` asserts them; the tests state them as properties):
1. Bound: version <= b <= version + staleness for every entry of buffer b. A trained group keeps it.
2. At staleness 0 a group trained in buffer b has only reservations of version b.
3. A group is in at most one buffer, once. `filtered + occupied + reserved <= budget`.
4. Places cannot run dry: a group that holds a reservation can always be occupied.

Pure: no I/O, no clock. A call that the protocol forbids raises IllegalMove and changes nothing.
"""

from collections.abc import Iterable, Mapping

from psrl.staleness.buffer import Buffer, Entry
from psrl.staleness.events import (
    Advanced,
    Closed,
    Denied,
    Filtered,
    Held,
    IllegalMove,
    Occupied,
    Place,
    Reason,
)
from psrl.types import GroupId, Version


class Ledger:
    """Places for groups within the staleness bound.

    needed: groups of one batch (B). staleness: the bound, >= 0. version: what is published at the start.
    slots: places of one buffer, >= needed (more with redundancy). end: buffers `end` and later do not exist.
    budget: groups that may be generated for one buffer, >= needed; None: without limit.
    """

    def __init__(
        self,
        needed: int,
        staleness: int,
        *,
        version: int = 0,
        slots: int | None = None,
        end: int | None = None,
        budget: int | None = None,
    ) -> None:
        if needed < 1 or staleness < 0:
            raise ValueError(f"needed must be >= 1 and staleness >= 0, not {needed} and {staleness}")
        if slots is not None and slots < needed:
            raise ValueError(f"slots ({slots}) must be >= needed ({needed})")
        if budget is not None and budget < needed:
            raise ValueError(f"budget ({budget}) must be >= needed ({needed})")
        self.needed = needed
        self.staleness = staleness
        self.version = Version(version)
        self.max_aborted_version = version - staleness - 1  # up to it no buffer is left
        self._slots = needed if slots is None else slots
        self._end = end
        self._budget = budget
        self._buffers: dict[int, Buffer] = {}  # in id order, from `version` on
        self._where: dict[GroupId, tuple[Buffer, Entry]] = {}

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> Mapping[int, Buffer]:
        """Buffers that exist, by id; to look at, not to change."""
        return self._buffers

    def buffer_of(self, group: GroupId) -> int | None:
        """The buffer in which the group has an entry, if any."""
        return self._where[group][0].id if group in self._where else None

    def is_ready(self, buffer: int) -> bool:
        return buffer in self._buffers and self._buffers[buffer].ready

    def free(self) -> int:
        """Places that groups started under the published version could reserve now."""
        known = self._buffers
        unused = self._slots if self._budget is None else min(self._slots, self._budget)
        return sum(known[b].room if b in known else unused for b in self._window(self.version))

    # -- moves ----------------------------------------------------------------------------------------------------

    def reserve(self, group: GroupId, index: int, version: Version) -> Place | Denied:
        """A place for sibling `index`, before it starts under `version`.

        The first sibling takes the latest admissible buffer; the others join it if `version` allows. Asking again is
        harmless; with an older version the entry's version falls (a sibling was started again elsewhere).
        Raises IllegalMove when `version` is newer than what is published.
        """
        self._published(version)
        if group in self._where:
            return self._join(*self._where[group], index, version)
        if self._end is not None and self.version >= self._end:
            return Denied(Reason.END_OF_RUN, f"the last buffer was {self._end - 1}", final=True)
        if version <= self.max_aborted_version:
            return Denied(Reason.VERSION_ABORTED, f"version {version}; aborted up to {self.max_aborted_version}")
        window = self._window(version)
        self._create(window.stop)
        for b in reversed(window):
            buffer = self._buffers[b]
            if buffer.room > 0:
                entry = Entry(group, {index: version})
                self._where[group] = (buffer, entry)
                return Place(b, buffer.reserve(entry))
        return Denied(Reason.FULL, f"version {version} may serve buffers {window.start} to {window.stop - 1}")

    def occupy(self, group: GroupId, version: Version) -> Occupied:
        """The group is complete; `version` is the oldest of its siblings' tokens. It takes the earliest place.

        Raises IllegalMove when the group holds no reservation or `version` cannot be true or admitted.
        """
        buffer, entry = self._complete(group, version)
        self._vacate(buffer, entry)
        target = self._earliest(version)
        entry.occupied_version = version
        slot = target.occupy(entry)
        self._where[group] = (target, entry)
        if target.exhausted:
            target.closed = True
        aborted = self._abort_hopeless() if target.ready else ()
        return Occupied(target.id, slot, len(target.occupied), target.ready, aborted)

    def filter(self, group: GroupId, version: Version) -> Filtered:
        """The complete group carries no signal: drop it and charge the earliest buffer that could have taken it."""
        self._complete(group, version)
        self.release(group)
        target = self._earliest(version)
        target.filtered += 1
        if not target.exhausted:
            return Filtered(target.id, closed=False)
        assert not target.reserved, "the budget counts reservations, so none can be left"
        target.closed = True
        return Filtered(target.id, closed=True, aborted=self._abort_hopeless())

    def release(self, group: GroupId) -> int | None:
        """Give the group's reservation back (failed, aborted, offered again); the buffer it was in, if any.

        A group without an entry is not an error. Raises IllegalMove when the group is occupied.
        """
        if group not in self._where:
            return None
        buffer, entry = self._reserved(group)
        buffer.take_out(entry)
        del self._where[group]
        return buffer.id

    def close_short(self, buffer: int) -> Closed:
        """No more will come for `buffer`: READY with what it has, maybe nothing.

        Its reservations move to the latest other buffer that admits them; those that find none are aborted.
        """
        if buffer not in self._window(self.version):
            raise IllegalMove(Reason.OUTSIDE_WINDOW, f"buffer {buffer}, version {self.version}")
        self._create(buffer + 1)
        closing = self._buffers[buffer]
        if closing.ready:
            raise IllegalMove(Reason.ALREADY_READY, f"buffer {buffer}")
        closing.closed = True
        moved: list[GroupId] = []
        aborted: list[GroupId] = []
        for entry in list(closing.reserved):
            closing.take_out(entry)
            window = self._window(entry.version)
            self._create(window.stop)
            target = next((self._buffers[b] for b in reversed(window) if self._buffers[b].room > 0), None)
            if target is not None:
                target.reserve(entry)
                self._where[entry.group] = (target, entry)
                moved.append(entry.group)
            else:
                del self._where[entry.group]
                aborted.append(entry.group)
        aborted.extend(self._abort_hopeless())
        return Closed(buffer, len(closing.occupied), tuple(moved), tuple(aborted))

    def consume(self, buffer: int) -> tuple[Held, ...]:
        """The trainer takes the batch of `buffer`, which must be the published version's: groups sorted by id.

        Asking again gives the same until publish. Raises IllegalMove when it is not ready.
        """
        if buffer != self.version:
            raise IllegalMove(Reason.OUTSIDE_WINDOW, f"buffer {buffer} is not that of version {self.version}")
        if not self.is_ready(buffer):
            raise IllegalMove(Reason.NOT_READY, f"buffer {buffer}")
        self._buffers[buffer].consumed = True
        return self._content(self._buffers[buffer])

    def publish(self, version: Version) -> Advanced:
        """Weights `version` are out: the buffer before it is trained and deleted, reservations too old are aborted."""
        self.check_publish(version)
        trained = self._buffers[self.version]
        self.version = version
        del self._buffers[trained.id]
        for entry in trained.occupied:
            del self._where[entry.group]
        stale = [entry.group for entry in trained.reserved]  # only with redundancy: a place was left over
        for group in stale:
            del self._where[group]
        return Advanced(version, self._content(trained), (*stale, *self._abort_hopeless()))

    def check_publish(self, version: Version) -> None:
        """Raise what `publish` would; change nothing."""
        if version != self.version + 1:
            raise IllegalMove(Reason.VERSION_OUT_OF_ORDER, f"version {version} after {self.version}")
        if self.version not in self._buffers or not self._buffers[self.version].consumed:
            raise IllegalMove(Reason.NOT_CONSUMED, f"buffer {self.version}, before publishing version {version}")

    # -- how buffers move -----------------------------------------------------------------------------------------

    def _window(self, version: int) -> range:
        """Buffers that may train tokens of `version`: from the published version on, and within the bound."""
        stop = version + self.staleness + 1
        return range(self.version, stop if self._end is None else min(stop, self._end))

    def _create(self, stop: int) -> None:
        """Make the buffers that are missing below `stop`, in id order."""
        for b in range(self.version, stop):
            if b not in self._buffers:
                self._buffers[b] = Buffer(b, self.needed, self._slots, self._budget)

    def _join(self, buffer: Buffer, entry: Entry, index: int, version: Version) -> Place | Denied:
        if entry.occupied_version is not None:
            return Denied(Reason.GROUP_OCCUPIED, f"group {entry.group}", final=True)
        if version + self.staleness < buffer.id:
            return Denied(Reason.SIBLING_TOO_OLD, f"group {entry.group}, version {version}, buffer {buffer.id}")
        entry.versions[index] = min(version, entry.versions.get(index, version))
        return Place(buffer.id, buffer.slot_of(entry), joined=True)

    def _vacate(self, buffer: Buffer, entry: Entry) -> None:
        """Free a reservation. A reservation of the earliest buffer that may, moves into its slot and so makes room
        where the earliest step needs it; else the buffer's own lowest reservation fills the hole."""
        for earlier in self._until(buffer):
            for other in reversed(earlier.reserved):  # from the lowest slot up
                if other.version + self.staleness >= buffer.id:
                    earlier.take_out(other)
                    buffer.replace(entry, other)
                    self._where[other.group] = (buffer, other)
                    return
        buffer.take_out(entry)

    def _until(self, buffer: Buffer) -> Iterable[Buffer]:
        return (earlier for b, earlier in self._buffers.items() if b < buffer.id)

    def _earliest(self, version: Version) -> Buffer:
        """The earliest buffer with room for a group of `version` (its own freed place makes sure there is one)."""
        for b in self._window(version):
            buffer = self._buffers[b]
            if not buffer.ready and buffer.room > 0:
                return buffer
        raise AssertionError(f"no place for a group of version {version} that held a reservation")

    def _abort_hopeless(self) -> tuple[GroupId, ...]:
        """Abort the versions for which every buffer they may serve is ready; give their reservations back."""
        a = self.max_aborted_version
        while a < self.version and all(self.is_ready(b) for b in self._window(a + 1)):
            a += 1
        self.max_aborted_version = a
        hopeless = [entry.group for buffer in self._buffers.values() for entry in buffer.reserved if entry.version <= a]
        for group in hopeless:
            self.release(group)
        return tuple(hopeless)

    # -- guards ---------------------------------------------------------------------------------------------------

    def _published(self, version: Version) -> None:
        if version > self.version:
            raise IllegalMove(Reason.VERSION_UNPUBLISHED, f"version {version}, published is {self.version}")

    def _reserved(self, group: GroupId) -> tuple[Buffer, Entry]:
        if group not in self._where:
            raise IllegalMove(Reason.NOT_RESERVED, f"group {group}")
        buffer, entry = self._where[group]
        if entry.occupied_version is not None:
            raise IllegalMove(Reason.GROUP_OCCUPIED, f"group {group} in buffer {buffer.id}")
        return buffer, entry

    def _complete(self, group: GroupId, version: Version) -> tuple[Buffer, Entry]:
        buffer, entry = self._reserved(group)
        self._published(version)
        if version + self.staleness < buffer.id:
            raise IllegalMove(Reason.VERSION_TOO_OLD, f"group {group}, version {version}, buffer {buffer.id}")
        return buffer, entry

    @staticmethod
    def _content(buffer: Buffer) -> tuple[Held, ...]:
        return tuple(Held(e.group, e.version) for e in sorted(buffer.occupied, key=lambda e: e.group))

    def check(self) -> None:
        """Assert the invariants; linear in the number of entries."""
        seen: dict[GroupId, int] = {}
        assert list(self._buffers) == list(range(self.version, self.version + len(self._buffers)))
        for b, buffer in self._buffers.items():
            assert buffer.empty >= 0
            assert self._end is None or b < self._end
            assert buffer.budget is None or (
                buffer.filtered + len(buffer.occupied) + len(buffer.reserved) <= buffer.budget
            )
            for entry in (*buffer.occupied, *buffer.reserved):
                assert entry.version <= b <= entry.version + self.staleness, (entry, b)
                assert entry.group not in seen
                seen[entry.group] = b
            assert all(entry.occupied_version is not None for entry in buffer.occupied)
            assert all(entry.occupied_version is None for entry in buffer.reserved)
        assert seen == {group: buffer.id for group, (buffer, _) in self._where.items()}
