"""What clients, controller and storage of the TransferQueue say to each other. Handles travel here, bytes never.

Rows cross the wire by the thousand, so what repeats is `array_like`.
"""

import msgspec


class RecordRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a record is: some fields of one row, written once. Valid while its extent has that generation."""

    extent: int
    generation: int
    offset: int
    length: int  # bytes

    @property
    def place(self) -> tuple[int, int, int, int]:
        return (self.extent, self.generation, self.offset, self.length)


class QueueClient(msgspec.Struct, frozen=True, array_like=True):
    """A registered process. `incarnation` tells one life of it from the next."""

    number: int
    incarnation: int


class StoredRecord(msgspec.Struct, frozen=True, array_like=True):
    """A committed record as storage finds it, with what it says about itself."""

    ref: RecordRef
    partition: str
    key: str
    fields: tuple[str, ...]
    tag: bytes  # msgpack of the row's tag; empty: the record has none


# To StorageActor


class RegisterClient(msgspec.Struct, frozen=True, tag=True):
    """A process wants to read and write. An earlier one of the same name counts as dead."""

    name: str


class Registered(msgspec.Struct, frozen=True, tag=True):
    client: QueueClient
    segment: str  # the name to fetch
    generation: int  # of the segment


class GrantExtents(msgspec.Struct, frozen=True, tag=True):
    """A writer wants room for a record of `num_bytes`, waiting for it up to `wait_s`; `held` are its open extents."""

    client: QueueClient
    num_bytes: int
    held: tuple[int, ...]
    wait_s: float


class Granted(msgspec.Struct, frozen=True, tag=True):
    grants: tuple[tuple[int, int, int], ...]  # extent, generation, number of extents


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    needed_bytes: int
    free_bytes: int
    capacity: int


class FreeRecords(msgspec.Struct, frozen=True, tag=True):
    """Forget these records. Views of them stay valid; unknown ones are passed over."""

    records: tuple[RecordRef, ...]


class Freed(msgspec.Struct, frozen=True, tag=True):
    """Whatever of them was there."""


class ReleaseClient(msgspec.Struct, frozen=True, tag=True):
    """The process `client` has ended: return its leases and extents. Idempotent."""

    client: str


class ClientReleased(msgspec.Struct, frozen=True, tag=True):
    """`records` are what it had committed; they stay."""

    client: QueueClient | None  # None: nobody of that name
    num_extents: int
    num_leases: int
    records: tuple[StoredRecord, ...]


class ScanRecords(msgspec.Struct, frozen=True, tag=True):
    """List all committed records, oldest first."""


class Scanned(msgspec.Struct, frozen=True, tag=True):
    records: tuple[StoredRecord, ...]


class GetUsage(msgspec.Struct, frozen=True, tag=True):
    """For metrics and tests."""


class Usage(msgspec.Struct, frozen=True, tag=True):
    """Bytes. What is not free is in extents that hold rows, are leased, or are open at a writer."""

    capacity: int
    free_bytes: int
    extent_bytes: int


# To QueueController


class PutRow(msgspec.Struct, frozen=True, array_like=True):
    """`fields` of `key` are committed in `record`. An empty tag leaves the row's as it is."""

    key: str
    record: RecordRef
    fields: tuple[str, ...]
    tag: bytes


class AnnounceRows(msgspec.Struct, frozen=True, tag=True):
    client: QueueClient
    partition: str
    rows: tuple[PutRow, ...]


class Announced(msgspec.Struct, frozen=True, tag=True):
    """The rows are visible to all."""


class LocateRows(msgspec.Struct, frozen=True, tag=True):
    """Where are these fields (None: all that a row has) of these keys?"""

    partition: str
    keys: tuple[str, ...]
    fields: tuple[str, ...] | None


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a row that one record holds."""

    record: RecordRef
    fields: tuple[str, ...]


class Located(msgspec.Struct, frozen=True, tag=True):
    """As many rows as keys were asked for, in their order."""

    rows: tuple[tuple[Piece, ...], ...]


class NotThere(msgspec.Struct, frozen=True, tag=True):
    """`what` says which partition, keys or fields are unknown."""

    what: str


class ListKeys(msgspec.Struct, frozen=True, tag=True):
    partition: str | None


class Listing(msgspec.Struct, frozen=True, tag=True):
    """partition -> key -> msgpack of the tag (empty: none)."""

    partitions: dict[str, dict[str, bytes]]


class ClearKeys(msgspec.Struct, frozen=True, tag=True):
    """Remove rows. Unknown keys are passed over."""

    partition: str
    keys: tuple[str, ...]


class Cleared(msgspec.Struct, frozen=True, tag=True):
    num_keys: int
