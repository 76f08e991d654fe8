"""What clients, controller and storage of the TransferQueue say to each other. Handles travel here, bytes never.

Rows cross the wire by the thousand, so what repeats is `array_like`, and names of fields are sent once.
"""

import msgspec

from psrl.transfer.samplers import AnySampler


class RecordRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a record is: some fields of one row, written once. Valid while its extent has that generation."""

    node: int
    extent: int
    generation: int
    offset: int
    length: int  # bytes

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Within its node's arena."""
        return (self.extent, self.generation, self.offset, self.length)


class QueueClient(msgspec.Struct, frozen=True, array_like=True):
    """A registered process of a node. `incarnation` tells one life of it from the next."""

    node: int
    number: int
    incarnation: int


class StoredRecord(msgspec.Struct, frozen=True, array_like=True):
    """A committed record as storage finds it, with what it says about itself."""

    ref: RecordRef
    partition: str
    key: str
    fields: tuple[str, ...]
    tag: bytes  # msgpack of the row's tag; empty: the record has none
    written_ns: int  # orders the records of a key


# To StorageActor


class RegisterClient(msgspec.Struct, frozen=True, tag=True):
    """A process wants to read and write. An earlier one of the same name counts as dead."""

    name: str


class Registered(msgspec.Struct, frozen=True, tag=True):
    client: QueueClient
    segment: str  # the name to fetch
    generation: int  # of the segment


class GrantExtents(msgspec.Struct, frozen=True, tag=True):
    """A writer wants room for a record of `num_bytes`, waiting for it up to `wait_s`; `held` are its open extents. It
    will fill `num_extents` at once, if those are more than a few."""

    client: QueueClient
    num_bytes: int
    num_extents: int
    held: tuple[int, ...]
    wait_s: float


class Granted(msgspec.Struct, frozen=True, tag=True):
    grants: tuple[tuple[int, int, int], ...]  # extent, generation, number of extents


class Usage(msgspec.Struct, frozen=True, tag=True):
    """Where a node's bytes are, in whole extents."""

    capacity: int
    extent_bytes: int
    free_bytes: int
    row_bytes: int  # hold rows
    open_bytes: int  # at writers, partly written
    leased_bytes: int  # cleared, but readers still look at them


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    usage: Usage


class FreeRecords(msgspec.Struct, frozen=True, tag=True):
    """Forget these records. Views of them stay valid; unknown ones are passed over."""

    records: tuple[RecordRef, ...]


class Freed(msgspec.Struct, frozen=True, tag=True):
    """Whatever of them was there."""


class CheckRecords(msgspec.Struct, frozen=True, tag=True):
    """Which of these are there?"""

    records: tuple[RecordRef, ...]


class Checked(msgspec.Struct, frozen=True, tag=True):
    there: tuple[bool, ...]


class ReleaseClient(msgspec.Struct, frozen=True, tag=True):
    """The process `client` has ended: return its leases and extents. Idempotent."""

    client: str


class ClientReleased(msgspec.Struct, frozen=True, tag=True):
    """`num_records` is what it had committed; that stays."""

    client: QueueClient | None  # None: nobody of that name
    num_extents: int
    num_leases: int
    num_records: int


class ScanRecords(msgspec.Struct, frozen=True, tag=True):
    """List the committed records (of one client) from this extent on: a page of them."""

    first_extent: int
    owner: QueueClient | None = None


class Scanned(msgspec.Struct, frozen=True, tag=True):
    """In no order. `next_extent` None: that was all. `incarnations`: of each client's place, the life that it is in;
    odd while somebody has it."""

    records: tuple[StoredRecord, ...]
    next_extent: int | None
    incarnations: tuple[int, ...]


class WriteNote(msgspec.Struct, frozen=True, tag=True):
    """Keep this text of the controller's beside the rows: as a record of partition NOTES with that tag."""

    key: str
    text: bytes


class Noted(msgspec.Struct, frozen=True, tag=True):
    record: RecordRef | None  # None: no room


NOTES = "\0notes"
"""The partition of the controller's notes; no row's can have that name."""


class OpenRecords(msgspec.Struct, frozen=True, tag=True):
    """Another node wants to read these: lease them for it, at most `hold_s`."""

    records: tuple[RecordRef, ...]
    hold_s: float


class Opened(msgspec.Struct, frozen=True, tag=True):
    """`reading` names the leases; of each record its description, see csrc/queue/record.h."""

    reading: int
    descriptions: tuple[bytes, ...]


class SendRecords(msgspec.Struct, frozen=True, tag=True):
    """Put parts of what was opened into a window, then let go of it all. `parts` are int64 rows (record, offset in it,
    length, offset in the window), little-endian; `into` is the advert of the window, `address` that of its endpoint."""

    reading: int
    parts: bytes
    into: bytes
    address: str
    timeout_s: float


class Sent(msgspec.Struct, frozen=True, tag=True):
    """It is all there."""

    num_bytes: int


class NotSent(msgspec.Struct, frozen=True, tag=True):
    """The window may have been written to in part."""

    status: str  # of LinkError
    what: str


class GetUsage(msgspec.Struct, frozen=True, tag=True):
    """For metrics and tests."""


# To Clients


class WatchClient(msgspec.Struct, frozen=True, tag=True):
    """Process `pid` of that pid namespace is about to connect as `client`: release it when the process has ended."""

    client: str
    pid: int
    namespace: int


class Watched(msgspec.Struct, frozen=True, tag=True):
    """False: its process cannot be seen from here, so somebody must say when it has ended."""

    sees: bool


# To QueueController


class NodeAt(msgspec.Struct, frozen=True, tag=True):
    """A node's StorageActor, under the name `actor` at a TCP address."""

    node: int
    host: str
    port: int
    actor: str


class JoinNode(msgspec.Struct, frozen=True, tag=True):
    """A node has come (again): find what it has, take its rows. Idempotent."""

    at: NodeAt


class LeaveNode(msgspec.Struct, frozen=True, tag=True):
    """A node is gone for good: forget what it had. Idempotent."""

    node: int


class ListNodes(msgspec.Struct, frozen=True, tag=True):
    """Where are the storages that have joined?"""


class Nodes(msgspec.Struct, frozen=True, tag=True):
    at: tuple[NodeAt, ...]


class PutRow(msgspec.Struct, frozen=True, array_like=True):
    """Fields of `key` are committed in `record`. An empty tag leaves the row's as it is."""

    key: str
    record: RecordRef
    names: int  # which of the message's tuples of field names
    tag: bytes


class AnnounceRows(msgspec.Struct, frozen=True, tag=True):
    """Rows that a put committed."""

    client: QueueClient
    partition: str
    rows: tuple[PutRow, ...]
    names: tuple[tuple[str, ...], ...]


class AnnounceAgain(msgspec.Struct, frozen=True, tag=True):
    """May have been said before, to a controller that died since."""

    announced: AnnounceRows


class Announced(msgspec.Struct, frozen=True, tag=True):
    """The rows are visible to all."""


class LocateRows(msgspec.Struct, frozen=True, tag=True):
    """Where are these fields (None: all that a row has) of these keys?"""

    partition: str
    keys: tuple[str, ...]
    fields: tuple[str, ...] | None


class AwaitRows(msgspec.Struct, frozen=True, tag=True):
    """The same, waiting up to `wait_s` for what is not there yet."""

    rows: LocateRows
    wait_s: float


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a row that one record holds."""

    record: RecordRef
    names: int  # which of the message's tuples of field names


class Located(msgspec.Struct, frozen=True, tag=True):
    """As many rows as keys were asked for, in their order."""

    rows: tuple[tuple[Piece, ...], ...]
    names: tuple[tuple[str, ...], ...]


class NotThere(msgspec.Struct, frozen=True, tag=True):
    """`what` says which partition, keys, fields or records are unknown."""

    what: str


class ListKeys(msgspec.Struct, frozen=True, tag=True):
    partition: str | None


class Listing(msgspec.Struct, frozen=True, tag=True):
    """partition -> key -> msgpack of the tag (empty: none)."""

    partitions: dict[str, dict[str, bytes]]


class ClearKeys(msgspec.Struct, frozen=True, tag=True):
    """Remove rows, and what tasks did with them. Unknown keys are passed over. None: the whole partition."""

    partition: str
    keys: tuple[str, ...] | None


class Cleared(msgspec.Struct, frozen=True, tag=True):
    num_keys: int


class InsertRows(msgspec.Struct, frozen=True, tag=True):
    """Make rows that have no field yet."""

    partition: str
    num_rows: int


class DrawRows(msgspec.Struct, frozen=True, tag=True):
    """Draw rows with these fields for a task, waiting up to `wait_s` until there are enough. The same `draw`, said
    again, gets the same rows."""

    partition: str
    task: str
    fields: tuple[str, ...]
    batch_size: int
    sampler: AnySampler
    draw: str
    wait_s: float


class ListUnconsumed(msgspec.Struct, frozen=True, tag=True):
    """All rows that the task has not consumed, ready or not."""

    partition: str
    task: str


class Rows(msgspec.Struct, frozen=True, tag=True):
    keys: tuple[str, ...]
    tags: tuple[bytes, ...]


class NotReady(msgspec.Struct, frozen=True, tag=True):
    """Not enough to draw from by the deadline: so many rows are ready, of so many in the partition."""

    num_ready: int
    num_rows: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The sampler cannot go by what the rows say."""

    what: str


class UndoDraw(msgspec.Struct, frozen=True, tag=True):
    """Whoever drew never took it."""

    partition: str
    task: str
    draw: str


class ResetConsumption(msgspec.Struct, frozen=True, tag=True):
    """Offer rows again: to one task or (None) all, these rows or all that were consumed."""

    partition: str
    task: str | None
    keys: tuple[str, ...] | None


class NumRows(msgspec.Struct, frozen=True, tag=True):
    num_rows: int


class GetConsumption(msgspec.Struct, frozen=True, tag=True):
    partition: str
    task: str


class GetProduction(msgspec.Struct, frozen=True, tag=True):
    partition: str
    fields: tuple[str, ...]


class RowStatus(msgspec.Struct, frozen=True, tag=True):
    """Of each row: consumed by the task, or has all those fields."""

    done: dict[str, bool]
