"""Which fields of which rows are ready where. Pure: values in, values out.

partition -> key -> (field -> record, tag -> record). A field put again replaces the former; a record is in use while it
gives a row any field or its tag. Every change returns the records that it put out of use, for the caller to free.
Partitions share nothing.
"""

from collections.abc import Iterable, Sequence

import msgspec

from psrl.errors import UnknownKey
from psrl.transfer.messages import Piece, PutRow, RecordRef, StoredRecord

NUM_NAMED = 5  # unknown keys that an error names


class Row(msgspec.Struct):
    fields: dict[str, RecordRef]
    tag: bytes = b""
    tag_record: RecordRef | None = None

    def records(self) -> set[RecordRef]:
        used = set(self.fields.values())
        if self.tag_record is not None:
            used.add(self.tag_record)
        return used


class Index:
    """The rows of all partitions."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, Row]] = {}

    def put(self, partition: str, row: PutRow) -> list[RecordRef]:
        """Note what a record brings. Returns the records that it puts out of use. Idempotent."""
        rows = self._partitions.setdefault(partition, {})
        known = rows.setdefault(row.key, Row({}))
        before = known.records()
        known.fields.update(dict.fromkeys(row.fields, row.record))
        if row.tag:
            known.tag, known.tag_record = row.tag, row.record
        return sorted((before | {row.record}) - known.records(), key=lambda record: record.place)

    def locate(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None
    ) -> tuple[tuple[Piece, ...], ...]:
        """For each key the records that hold its fields. Raises UnknownKey if anything asked for is not there."""
        rows = self._partitions.get(partition)
        if not keys:
            return ()
        if rows is None:
            raise UnknownKey(f"no partition {partition!r}; there are {sorted(self._partitions) or 'none'}")
        unknown = [key for key in keys if key not in rows]
        if unknown:
            raise UnknownKey(f"partition {partition!r} has no key {_some(unknown)} (of {len(keys)} asked for)")
        located = []
        for key in keys:
            row = rows[key]
            wanted = tuple(row.fields) if fields is None else fields
            missing = [field for field in wanted if field not in row.fields]
            if missing:
                raise UnknownKey(
                    f"key {key!r} of partition {partition!r} has no field {_some(missing)} yet; "
                    f"it has {list(row.fields)}"
                )
            located.append(_pieces(row, wanted))
        return tuple(located)

    def clear(self, partition: str, keys: Iterable[str]) -> tuple[int, list[RecordRef]]:
        """Remove rows; unknown ones are passed over. Returns how many there were, and their records."""
        rows = self._partitions.get(partition, {})
        removed = [rows.pop(key) for key in dict.fromkeys(keys) if key in rows]
        if not rows:
            self._partitions.pop(partition, None)
        return len(removed), [record for row in removed for record in row.records()]

    def tags(self, partition: str | None = None) -> dict[str, dict[str, bytes]]:
        """partition -> key -> tag, of one partition or all. Keys in the order in which they first came."""
        names = self._partitions if partition is None else [partition]
        return {name: {key: row.tag for key, row in self._partitions.get(name, {}).items()} for name in names}

    def uses(self, stored: StoredRecord) -> bool:
        """Is the record in use by its row?"""
        row = self._partitions.get(stored.partition, {}).get(stored.key)
        return row is not None and stored.ref in row.records()


def _pieces(row: Row, fields: Sequence[str]) -> tuple[Piece, ...]:
    by_record: dict[RecordRef, list[str]] = {}
    for field in dict.fromkeys(fields):
        by_record.setdefault(row.fields[field], []).append(field)
    return tuple(Piece(record, tuple(names)) for record, names in by_record.items())


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(map(repr, names[:NUM_NAMED])) + rest
