"""The inventory: every training group that was drawn from the feed and has not ended, and the count of those that have.

Conservation, in groups, at every instant: offered = trained + filtered + redundant + stale_aborted + failed +
rolled_back + in flight. A group is offered once, however often it is handed out; further offers are `retries`.
"""

import bisect

import msgspec

from psrl.control.effects import PromptFeed
from psrl.control.group import Group, Phase
from psrl.control.messages import Counters
from psrl.control.records import Outcome
from psrl.control.state import ControlState, UnfinishedGroup
from psrl.types import GroupId, Purpose, Version

_ENDS = ("trained", "filtered", "redundant", "stale_aborted", "failed", "rolled_back")


class Inventory:
    """Groups in the order of their ids, which is the order of drawing."""

    def __init__(self, feed: PromptFeed, size: int, origin: int) -> None:
        self.groups: dict[GroupId, Group] = {}
        self.unplaced: set[GroupId] = set()  # at a worker, without a place in the ledger yet
        self.dry = False  # the feed has ended
        self.num_drawn = 0
        self.origin = origin  # version at which drawing began
        self._feed, self._size = feed, size
        self._again: list[GroupId] = []  # sorted: to be offered again
        self._counts = dict.fromkeys((*_ENDS, "offered", "retries"), 0)

    @property
    def counters(self) -> Counters:
        return Counters(**self._counts, in_flight=len(self.groups))

    @property
    def has_unfinished_offers(self) -> bool:
        """Whether groups of a lost worker, or retries, wait to be offered again."""
        return bool(self._again)

    @property
    def idle(self) -> bool:
        """Nothing is on its way: each group is complete."""
        return all(group.phase is Phase.COMPLETE for group in self.groups.values())

    def hand_out(self, worker: str, life: int, now: float) -> Group | None:
        """The oldest group to be offered again, else a new prompt; None when the data has ended."""
        group = self.groups[self._again.pop(0)] if self._again else self._draw()
        if group is None:
            return None
        self._counts["offered" if group.offer < 0 else "retries"] += 1
        group.hand_out(worker, life, now)
        self.unplaced.add(group.id)
        return group

    def offer_again(self, group: Group) -> None:
        """The group goes back in line."""
        self.unplaced.discard(group.id)
        group.phase = Phase.QUEUED
        bisect.insort(self._again, group.id)

    def end(self, group: Group, outcome: Outcome) -> None:
        """The group reached its end: count it and forget it."""
        self.unplaced.discard(group.id)
        self._counts[outcome] += 1
        del self.groups[group.id]

    def add(self, counters: Counters) -> None:
        """Count what was before."""
        for name in self._counts:
            self._counts[name] += getattr(counters, name)

    def snapshot(self, version: Version, attempt: int, log_bytes: int) -> ControlState:
        return ControlState(
            version=version,
            attempt=attempt,
            feed=msgspec.msgpack.encode(self._feed.position),
            num_drawn=self.num_drawn,
            origin=self.origin,
            unfinished=tuple(UnfinishedGroup(g.prompt, g.offer) for _, g in sorted(self.groups.items())),
            counters=self.counters,
            log_bytes=log_bytes,
        )

    def restore(self, state: ControlState) -> None:
        """Begin where the snapshot was: its unfinished groups are first in line."""
        self._feed.restore(msgspec.msgpack.decode(state.feed, type=type(self._feed.position)))
        self.num_drawn, self.origin = state.num_drawn, state.origin
        self.add(state.counters)
        for saved in state.unfinished:
            group = Group(saved.prompt, Purpose.TRAIN, self._size, offer=saved.offer)
            self.groups[group.id] = group
            self._again.append(group.id)
        self._again.sort()

    def check(self) -> None:
        """Assert conservation; constant time."""
        ended = sum(self._counts[end] for end in _ENDS)
        assert self._counts["offered"] == ended + len(self.groups), self.counters

    def check_deeply(self) -> None:
        """Assert also that the lines agree with the groups; linear."""
        self.check()
        assert set(self._again) == {g for g, group in self.groups.items() if group.phase is Phase.QUEUED}
        assert len(self._again) == len(set(self._again))
        assert self.unplaced <= {g for g, group in self.groups.items() if group.phase is Phase.RUNNING}

    def _draw(self) -> Group | None:
        prompt = None if self.dry else self._feed.next()
        if prompt is None:
            self.dry = True
            return None
        assert prompt.group not in self.groups, f"the feed gave group {prompt.group} twice"
        self.num_drawn += 1
        group = Group(prompt, Purpose.TRAIN, self._size)
        self.groups[group.id] = group
        return group
