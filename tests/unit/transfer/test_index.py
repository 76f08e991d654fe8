"""The index against the dullest model of it: a dict of dicts, and a count of what is in use."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from psrl.errors import UnknownKey
from psrl.transfer.index import Index
from psrl.transfer.messages import RecordRef, StoredRecord

PARTITIONS, KEYS, FIELDS = ("train", "val"), ("a", "b", "c"), ("x", "y", "z")


def ref(number: int) -> RecordRef:
    return RecordRef(0, number, 0, 0, 64)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.fields: dict[tuple[str, str], dict[str, RecordRef]] = {}
        self.tags: dict[tuple[str, str], tuple[bytes, RecordRef | None]] = {}
        self.in_use: set[RecordRef] = set()
        self.num_records = 0

    @rule(
        partition=st.sampled_from(PARTITIONS),
        key=st.sampled_from(KEYS),
        fields=st.sets(st.sampled_from(FIELDS)),
        tag=st.sampled_from([b"", b"t", b"u"]),
        again=st.booleans(),
    )
    def put(self, partition: str, key: str, fields: set[str], tag: bytes, again: bool) -> None:
        if not fields and not tag:
            return
        self.num_records += 1
        record = ref(self.num_records)
        names = tuple(sorted(fields))
        freed = self.index.put(partition, key, record, names, tag)
        if again:
            assert self.index.put(partition, key, record, names, tag) == []
        place = (partition, key)
        self.fields.setdefault(place, {}).update(dict.fromkeys(fields, record))
        if tag:
            self.tags[place] = (tag, record)
        else:
            self.tags.setdefault(place, (b"", None))
        self.in_use.add(record)
        assert self.in_use >= set(freed)
        assert len(set(freed)) == len(freed)
        self.in_use -= set(freed)

    @rule(partition=st.sampled_from(PARTITIONS), keys=st.lists(st.sampled_from(KEYS)))
    def clear(self, partition: str, keys: list[str]) -> None:
        present = {key for key in keys if (partition, key) in self.fields}
        cleared, freed = self.index.clear(partition, keys)
        assert set(cleared) == present
        assert len(cleared) == len(present)
        for key in present:
            del self.fields[partition, key], self.tags[partition, key]
        assert self.in_use >= set(freed)
        assert len(set(freed)) == len(freed)
        self.in_use -= set(freed)
        assert self.index.clear(partition, keys) == ([], [])

    @rule(
        partition=st.sampled_from(PARTITIONS),
        keys=st.lists(st.sampled_from(KEYS), max_size=3),
        fields=st.none() | st.lists(st.sampled_from(FIELDS), unique=True),
    )
    def locate(self, partition: str, keys: list[str], fields: list[str] | None) -> None:
        rows = [self.fields.get((partition, key)) for key in keys]
        complete = all(row is not None and set(fields or ()) <= set(row) for row in rows)
        if not complete:
            with pytest.raises(UnknownKey):
                self.index.locate(partition, keys, fields)
            return
        located = self.index.locate(partition, keys, fields)
        assert len(located.rows) == len(keys)
        for row, pieces in zip(rows, located.rows):
            assert row is not None
            found = {name: piece.record for piece in pieces for name in located.names[piece.names]}
            assert found == {name: row[name] for name in (row if fields is None else fields)}

    @invariant()
    def what_is_in_use_is_what_rows_need(self) -> None:
        needed = {record for row in self.fields.values() for record in row.values()}
        needed |= {record for _, record in self.tags.values() if record is not None}
        assert self.in_use == needed

    @invariant()
    def partitions_and_tags_agree(self) -> None:
        expected: dict[str, dict[str, bytes]] = {}
        for (partition, key), (tag, _) in self.tags.items():
            expected.setdefault(partition, {})[key] = tag
        assert self.index.tags() == expected
        for partition in PARTITIONS:
            assert self.index.tags(partition) == {partition: expected.get(partition, {})}


TestIndexMachine = IndexMachine.TestCase


def test_errors_name_what_is_missing_and_what_is_there() -> None:
    index = Index()
    with pytest.raises(UnknownKey, match=r"no partition 'train'; there are none"):
        index.locate("train", ["a"], None)
    index.put("train", "a", ref(1), ("x",), b"")
    with pytest.raises(UnknownKey, match=r"no partition 'val'; there are \['train'\]"):
        index.locate("val", ["a"], None)
    with pytest.raises(UnknownKey, match=r"no key 'b', 'c' \(of 3 asked for\)"):
        index.locate("train", ["a", "b", "c"], None)
    with pytest.raises(UnknownKey, match=r"key 'a' of partition 'train' has no field 'y' yet; it has \['x'\]"):
        index.locate("train", ["a"], ["x", "y"])
    with pytest.raises(UnknownKey, match="and 95 more"):
        index.locate("train", [str(i) for i in range(100)], None)


def test_knows_which_records_are_in_use() -> None:
    index = Index()
    index.put("train", "a", ref(1), ("x", "y"), b"tag")
    index.put("train", "a", ref(2), ("x",), b"")
    first = StoredRecord(ref(1), "train", "a", ("x", "y"), b"tag", 0)
    assert index.uses(first)
    assert not index.uses(StoredRecord(ref(3), "train", "a", ("z",), b"", 0))
    assert not index.uses(StoredRecord(ref(1), "val", "a", ("x",), b"", 0))
    assert index.put("train", "a", ref(3), ("y",), b"") == []  # still gives the tag
    assert index.put("train", "a", ref(4), (), b"new") == [ref(1)]
    assert not index.uses(first)
