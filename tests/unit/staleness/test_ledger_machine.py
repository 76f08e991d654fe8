"""The ledger under random legal calls: siblings on different versions, late ones, restarts, filters, failures, closing.

A reference model keeps, per group, the versions its tokens were made under. After every call: bound, one place per
group, packed layout, no lost group. At the end: whatever the state, finishing what is reserved and refilling gives the
trainer every batch (progress).
"""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from psrl.staleness import Denied, Ledger, Place, Status
from psrl.types import GroupId, Version

pick = st.randoms(use_true_random=False)


class LedgerRun(RuleBasedStateMachine):
    @initialize(
        needed=st.integers(1, 4),
        staleness=st.integers(0, 3),
        size=st.integers(1, 3),
        start=st.integers(0, 5),
        steps=st.integers(1, 6),
        batches=st.one_of(st.none(), st.integers(1, 3)),
    )
    def begin(self, needed, staleness, size, start, steps, batches):
        self.size, self.staleness, self.needed = size, staleness, needed
        self.end = start + steps
        self.ledger = Ledger(
            needed, staleness, version=start, end=self.end, budget=None if batches is None else batches * needed
        )
        self.budget = batches
        self.next = 0
        self.tokens: dict[GroupId, dict[int, list[int]]] = {}  # reserved groups: sibling -> versions of its tokens
        self.occupied: dict[GroupId, int] = {}
        self.closed_by_hand: set[int] = set()

    def version(self, lag: int) -> Version:
        return Version(max(0, self.ledger.version - lag))

    @rule(lag=st.integers(0, 4))
    def new_group(self, lag: int) -> None:
        group, version = GroupId(self.next), self.version(lag)
        free = self.ledger.free()
        place = self.ledger.reserve(group, 0, version)
        if isinstance(place, Place):
            assert self.ledger.version <= place.buffer <= version + self.staleness
            assert not place.joined
            assert self.ledger.free() == free - 1
            self.next += 1
            self.tokens[group] = {0: [version]}
        else:
            assert lag > 0 or free == 0, place

    @rule(random=pick, index=st.integers(0, 2), lag=st.integers(0, 4))
    def sibling(self, random, index: int, lag: int) -> None:
        """Another sibling, or the same again on another replica with what it had streamed."""
        if not self.tokens:
            return
        group, index, version = random.choice(sorted(self.tokens)), index % self.size, self.version(lag)
        buffer = self.ledger.buffer_of(group)
        place = self.ledger.reserve(group, index, version)
        admitted = version + self.staleness >= buffer
        assert isinstance(place, Place if admitted else Denied)
        if admitted:
            self.tokens[group].setdefault(index, []).append(version)

    @rule(random=pick, sync=st.booleans())
    def occupy(self, random, sync: bool) -> None:
        complete = sorted(g for g, siblings in self.tokens.items() if len(siblings) == self.size)
        if complete:
            self.occupy_it(random.choice(complete))

    def occupy_it(self, group: GroupId) -> None:
        version = Version(min(v for versions in self.tokens.pop(group).values() for v in versions))
        before = self.ledger.buffer_of(group)
        got = self.ledger.occupy(group, version)
        assert got.buffer <= before, "never later than the reservation"
        assert got.aborted == ()
        self.occupied[group] = version

    @rule(random=pick)
    def filter(self, random) -> None:
        complete = sorted(g for g, siblings in self.tokens.items() if len(siblings) == self.size)
        if complete and self.budget is not None:
            group = random.choice(complete)
            version = Version(min(v for versions in self.tokens.pop(group).values() for v in versions))
            got = self.ledger.filter(group, version)
            assert self.ledger.version <= got.buffer <= version + self.staleness
            assert got.aborted == ()

    @rule(random=pick)
    def release(self, random) -> None:
        if self.tokens:
            group = random.choice(sorted(self.tokens))
            del self.tokens[group]
            assert self.ledger.release(group) is not None
            assert self.ledger.release(group) is None

    @rule()
    def train(self) -> None:
        version = self.ledger.version
        if not self.ledger.is_ready(version):
            return
        batch = self.ledger.consume(version)
        assert batch == self.ledger.consume(version)
        for held in batch:
            assert held.version == self.occupied[held.group]
            assert 0 <= version - held.version <= self.staleness
        closed = self.budget is not None or version in self.closed_by_hand
        assert len(batch) == self.needed or (closed and len(batch) < self.needed)
        advanced = self.ledger.publish(Version(version + 1))
        assert advanced.trained == batch
        assert advanced.aborted == ()
        for held in batch:
            del self.occupied[held.group]

    @rule(ahead=st.integers(0, 3))
    def close(self, ahead: int) -> None:
        buffer = self.ledger.version + ahead
        if ahead <= self.staleness and buffer < self.end and not self.ledger.is_ready(buffer):
            self.closed_by_hand.add(buffer)
            for group in self.ledger.close_short(buffer).aborted:
                del self.tokens[group]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        for group in (*self.tokens, *self.occupied):
            assert self.ledger.buffer_of(group) is not None
        held = sum(len(b.occupied) + len(b.reserved) for b in self.ledger.buffers.values())
        assert held == len(self.tokens) + len(self.occupied)
        for group, siblings in self.tokens.items():
            buffer = self.ledger.buffer_of(group)
            assert all(buffer - v <= self.staleness for versions in siblings.values() for v in versions)
            if self.staleness == 0:
                assert all(v == buffer for versions in siblings.values() for v in versions)
        for buffer in self.ledger.buffers.values():
            assert buffer.status in (Status.READY, Status.PENDING, Status.STUCK)
            assert (buffer.status is Status.READY) == buffer.ready

    def teardown(self) -> None:
        """Progress: complete what is reserved, refill what is free; each step's batch comes."""
        if not hasattr(self, "ledger"):
            return
        while self.ledger.version < self.end:
            before = self.ledger.version
            for group in sorted(self.tokens):
                for index in range(self.size):
                    if index not in self.tokens[group]:
                        assert isinstance(self.ledger.reserve(group, index, self.ledger.version), Place)
                        self.tokens[group][index] = [self.ledger.version]
                self.occupy_it(group)
            while self.ledger.free():
                self.new_group(0)
                group = GroupId(self.next - 1)
                for index in range(self.size):
                    self.tokens[group][index] = [self.ledger.version]
                self.occupy_it(group)
            self.holds()
            self.train()
            assert self.ledger.version == before + 1, "the trainer waits for ever"
        assert self.ledger.free() == 0
        assert not self.tokens
        assert not self.occupied


TestLedgerRun = LedgerRun.TestCase
TestLedgerRun.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
