"""Which fields of which rows are ready where. Pure: values in, values out.

partition -> key -> (record -> the fields it gives, tag -> record). A field put again replaces the former; a record is
in use while it gives a row any field or its tag. Every change returns the records that it put out of use, for the
caller to free. Partitions share nothing. Tuples of field names are shared by all rows that have the same ones.
"""

from collections.abc import Iterable, Sequence

import msgspec

from psrl.errors import UnknownKey
from psrl.transfer.messages import Located, Piece, RecordRef, StoredRecord

NUM_NAMED = 5  # unknown keys that an error names

Names = tuple[str, ...]


class Row(msgspec.Struct):
    """`index` counts the rows of the partition in the order in which they came; `fields` are those of all pieces."""

    index: int
    pieces: dict[RecordRef, Names]
    fields: frozenset[str]
    tag: bytes = b""
    tag_record: RecordRef | None = None


class Index:
    """The rows of all partitions."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, Row]] = {}
        self._next_index: dict[str, int] = {}
        self._sets: dict[Names, frozenset[str]] = {}

    def rows(self, partition: str) -> dict[str, Row]:
        """By key, in the order in which they came. Not to be changed."""
        return self._partitions.get(partition, {})

    def partitions(self) -> list[str]:
        return list(self._partitions)

    def insert(self, partition: str, num_rows: int) -> list[str]:
        """New rows without fields; their keys are their numbers, as far as those are not taken."""
        rows = self._partitions.setdefault(partition, {})
        keys: list[str] = []
        while len(keys) < num_rows:
            index = self._count(partition)
            if str(index) not in rows:
                rows[str(index)] = Row(index, {}, frozenset())
                keys.append(str(index))
        return keys

    def put(self, partition: str, key: str, record: RecordRef, names: Names, tag: bytes) -> list[RecordRef]:
        """Note what a record brings. Returns the records that it puts out of use. Idempotent."""
        new = self._sets.get(names)
        if new is None:
            new = self._sets[names] = frozenset(names)
        rows = self._partitions.setdefault(partition, {})
        row = rows.get(key)
        if row is None:
            rows[key] = Row(self._count(partition), {record: names}, new, tag, record if tag else None)
            return []
        unused = []
        for other, given in list(row.pieces.items()):
            if other == record:
                continue
            left = given if new.isdisjoint(given) else tuple(name for name in given if name not in new)
            if left or (other == row.tag_record and not tag):
                row.pieces[other] = left
            else:
                del row.pieces[other]
                unused.append(other)
        row.pieces[record] = names
        if not new <= row.fields:
            row.fields = row.fields | new
        if tag:
            row.tag, row.tag_record = tag, record
        return unused

    def locate(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None) -> Located:
        """For each key the records that hold its fields. Raises UnknownKey if anything asked for is not there."""
        rows = self._partitions.get(partition)
        if not keys:
            return Located((), ())
        if rows is None:
            raise UnknownKey(f"no partition {partition!r}; there are {sorted(self._partitions) or 'none'}")
        wanted = None if fields is None else frozenset(fields)
        numbers: dict[Names, int] = {}
        chosen: dict[Names, int] = {}  # names that a record gives -> number of those that are wanted
        located = []
        for key in keys:
            row = rows.get(key)
            if row is None:
                unknown = [key for key in keys if key not in rows]
                raise UnknownKey(f"partition {partition!r} has no key {_some(unknown)} (of {len(keys)} asked for)")
            if wanted is not None and not wanted <= row.fields:
                missing = [field for field in fields or () if field not in row.fields]
                raise UnknownKey(
                    f"key {key!r} of partition {partition!r} has no field {_some(missing)} yet; "
                    f"it has {sorted(row.fields)}"
                )
            pieces = []
            for record, names in row.pieces.items():
                number = chosen.get(names)
                if number is None:
                    kept = names if wanted is None else tuple(name for name in names if name in wanted)
                    number = chosen[names] = numbers.setdefault(kept, len(numbers)) if kept else -1
                if number >= 0:
                    pieces.append(Piece(record, number))
            located.append(tuple(pieces))
        return Located(tuple(located), tuple(numbers))

    def clear(self, partition: str, keys: Iterable[str]) -> tuple[list[str], list[RecordRef]]:
        """Remove rows; unknown ones are passed over. Returns the keys that there were, and their records."""
        rows = self._partitions.get(partition, {})
        removed = {key: rows.pop(key) for key in dict.fromkeys(keys) if key in rows}
        if not rows:
            self._partitions.pop(partition, None)
        return list(removed), [record for row in removed.values() for record in row.pieces]

    def tags(self, partition: str | None = None) -> dict[str, dict[str, bytes]]:
        """partition -> key -> tag, of one partition or all. Keys in the order in which they first came."""
        names = self._partitions if partition is None else [partition]
        return {name: {key: row.tag for key, row in self._partitions.get(name, {}).items()} for name in names}

    def uses(self, stored: StoredRecord) -> bool:
        """Is the record in use by its row?"""
        row = self._partitions.get(stored.partition, {}).get(stored.key)
        return row is not None and stored.ref in row.pieces

    def _count(self, partition: str) -> int:
        index = self._next_index.get(partition, 0)
        self._next_index[partition] = index + 1
        return index


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(map(repr, names[:NUM_NAMED])) + rest
