"""Consumption against the dullest model of it: for each task the set of keys that it was given."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from psrl.errors import UnknownKey
from psrl.transfer import RankAwareSampler, SequentialSampler
from psrl.transfer.index import Index
from psrl.transfer.messages import RecordRef
from psrl.transfer.tasks import OWN, Changed, Draw, Tasks

KEYS, FIELDS, NAMES = tuple("abcdef"), ("x", "y"), ("update", "score")
keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=4)
partitions = st.sampled_from(("train", "val"))
tasks = st.sampled_from(NAMES)
fields = st.sets(st.sampled_from(FIELDS), min_size=1)


class TasksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.tasks = Tasks(self.index)
        self.fields: dict[tuple[str, str], set[str]] = {}  # in the order in which rows came
        self.consumed: dict[tuple[str, str], set[str]] = {}
        self.notes: dict[RecordRef, Draw] = {}
        self.number = 0

    def fresh(self) -> RecordRef:
        self.number += 1
        return RecordRef(0, self.number, 0, 0, 64)

    def renote(self, changed: Changed) -> None:
        for note in changed.notes:
            del self.notes[note]
        for draw in changed.draws:
            note = self.fresh()
            assert self.tasks.noted(draw.key, note)
            self.notes[note] = draw

    @rule(partition=partitions, key=st.sampled_from(KEYS), names=fields)
    def put(self, partition: str, key: str, names: set[str]) -> None:
        self.index.put(partition, key, self.fresh(), tuple(sorted(names)), b"")
        self.renote(self.tasks.row_put(partition, key))
        self.fields.setdefault((partition, key), set()).update(names)

    @rule(partition=partitions, chosen=keys)
    def clear(self, partition: str, chosen: list[str]) -> None:
        cleared, _ = self.index.clear(partition, chosen)
        for note in self.tasks.rows_cleared(partition, cleared):
            del self.notes[note]
        for key in cleared:
            del self.fields[partition, key]
            for done in (self.consumed.get((partition, task), set()) for task in NAMES):
                done.discard(key)

    @rule(partition=partitions, task=tasks, names=fields, size=st.integers(1, 4))
    def draw(self, partition: str, task: str, names: set[str], size: int) -> None:
        id = f"{OWN}{self.number}"
        done = self.consumed.setdefault((partition, task), set())
        ready = [k for (p, k), has in self.fields.items() if p == partition and names <= has and k not in done]
        assert self.tasks.num_ready(partition, task, frozenset(names)) == len(ready)
        drawn = self.tasks.draw(partition, task, frozenset(names), size, SequentialSampler(), id)
        assert (drawn is not None) == (len(ready) >= size)
        if drawn is None:
            return
        assert drawn.sampled == drawn.consumed == ready[:size]
        done.update(drawn.sampled)
        assert self.tasks.draw(partition, task, frozenset(names), size, SequentialSampler(), id) == drawn
        note = self.fresh()
        assert self.tasks.noted(drawn.key, note)
        self.notes[note] = drawn

    @rule(partition=partitions, task=st.none() | tasks, chosen=st.none() | keys)
    def reset(self, partition: str, task: str | None, chosen: list[str] | None) -> None:
        number, changed = self.tasks.reset(partition, task, chosen)
        self.renote(changed)
        expected = 0
        for name in NAMES if task is None else (task,):
            done = self.consumed.get((partition, name), set())
            again = done & set(done if chosen is None else chosen)
            expected += len(again)
            done -= again
        assert number == expected

    @invariant()
    def status_agrees(self) -> None:
        for partition in ("train", "val"):
            for task in NAMES:
                done = self.consumed.get((partition, task), set())
                expected = {k: k in done for p, k in self.fields if p == partition}
                assert self.tasks.consumed(partition, task) == expected
                assert self.tasks.unconsumed(partition, task) == [k for k, over in expected.items() if not over]

    @invariant()
    def a_restart_from_the_notes_gives_the_same(self) -> None:
        again = Tasks(self.index)
        for note, draw in self.notes.items():
            assert again.restore(draw, note)
        for partition in ("train", "val"):
            for task in NAMES:
                assert again.consumed(partition, task) == self.tasks.consumed(partition, task)


TestTasksMachine = TasksMachine.TestCase
TestTasksMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def filled(*names: str) -> tuple[Index, Tasks]:
    index = Index()
    for number, key in enumerate(names):
        index.put("train", key, RecordRef(0, number, 0, 0, 64), ("x",), b"")
    return index, Tasks(index)


def test_ranks_of_a_group_draw_the_same_and_groups_do_not() -> None:
    _, tasks = filled(*"abcd")
    drawn = [
        tasks.draw("train", "update", frozenset({"x"}), 2, RankAwareSampler(rank, 0), f"{OWN}{i}")
        for i, rank in enumerate([0, 1, 0, 1])
    ]
    assert [draw and draw.sampled for draw in drawn] == [["a", "b"], ["c", "d"]] * 2
    assert tasks.draw("train", "update", frozenset({"x"}), 2, RankAwareSampler(0, 1), "own 9") is None


def test_a_latecomer_to_a_cleared_shared_draw_is_told() -> None:
    index, tasks = filled(*"abcd")
    tasks.draw("train", "update", frozenset({"x"}), 2, RankAwareSampler(0, 0), "own 1")
    tasks.rows_cleared("train", index.clear("train", ["a", "b"])[0])
    with pytest.raises(UnknownKey, match=r"rank 0 batch 0 of task 'update' .* is cleared since"):
        tasks.draw("train", "update", frozenset({"x"}), 2, RankAwareSampler(0, 0), "own 2")
    tasks.rows_cleared("train", index.clear("train", ["c", "d"])[0])
    tasks.partition_cleared("train")
    assert tasks.draw("train", "update", frozenset({"x"}), 2, RankAwareSampler(0, 0), "own 3") is None


def test_an_undone_draw_never_was() -> None:
    _, tasks = filled(*"abc")
    draw = tasks.draw("train", "update", frozenset({"x"}), 2, SequentialSampler(), "own 1")
    assert draw is not None
    note = RecordRef(0, 99, 0, 0, 64)
    assert tasks.noted(draw.key, note)
    assert tasks.undo(draw.key) == [note]
    assert tasks.undo(draw.key) == []
    assert tasks.num_ready("train", "update", frozenset({"x"})) == 3
    assert not tasks.noted(draw.key, note)


def test_a_sampler_cannot_draw_what_is_not_ready() -> None:
    class Greedy(SequentialSampler, frozen=True):
        def sample(self, ready: object, batch_size: int) -> tuple[list[str], list[str]]:
            return ["a", "zz"], ["a"]

    _, tasks = filled("a")
    with pytest.raises(UnknownKey, match="zz"):
        tasks.draw("train", "update", frozenset({"x"}), 1, Greedy(), "own 1")
