"""The typed face of the C++ core. Errors are those of psrl.errors. Blocking calls release the GIL."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def memory_available() -> int:
    """Bytes this process may still touch: the tightest of MemAvailable and all memory cgroups above it."""

class Segment:
    """Shared memory as a sealed, pre-faulted memfd; mapped until the last view of it is gone."""

    @staticmethod
    def create(name: str, size: int, config_key: str = "transfer_queue.arena_bytes") -> Segment:
        """`size` zeroed bytes. StorageError says needed and available bytes, and `config_key` as what to lower."""

    @staticmethod
    def attach(fd: int, read_only: bool = False) -> Segment:
        """Map the segment behind `fd`; the descriptor stays the caller's. StorageError if it is not one."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def generation(self) -> int:
        """Random, below 2**63; tells one life of a name from the next."""

    @property
    def memory_kind(self) -> str: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def fd(self) -> int: ...
    def view(self, offset: int, length: int, writable: bool = False) -> npt.NDArray[np.uint8]:
        """Bytes of the data as uint8 [length], without a copy."""

class SegmentServer:
    """Hands segments' descriptors to processes of the same user that ask for them by name over a Unix socket."""

    def __init__(self, path: str) -> None:
        """Bind `path` (at most 107 bytes, must not exist) and answer on a thread of its own."""

    def add(self, segment: Segment) -> None:
        """Serve `segment` under its name; replaces one of the same name."""

    def close(self) -> None:
        """Join the thread, remove the socket, let go of the segments. Idempotent."""

    def __enter__(self) -> SegmentServer: ...
    def __exit__(self, *exception: object) -> None: ...

def fetch_segment(path: str, name: str, timeout_s: float, read_only: bool = False) -> Segment:
    """Map segment `name` of the server at `path`, waiting for the server until the timeout.

    UnknownKey says which segments there are; StorageError that nobody answered in time.
    """

_Array = Buffer | npt.NDArray[np.generic]  # arrays are Buffers to the type checker from Python 3.12 on only

WEIGHT_CHUNK_BYTES: int
"""Bytes under one checksum; the last chunk of a version may be shorter."""

class WeightTicket:
    """The right to write one slot; plain numbers, so that it can be sent to other ranks."""

    def __init__(self, slot: int, generation: int) -> None: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...

class WeightLease:
    """A reader's hold on one version. `WeightStore.valid` says whether it still is one."""

    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def manifest_hash(self) -> bytes:
        """As given to `begin`."""

class WeightSlot:
    """A look at one slot, for people and tests."""

    @property
    def state(self) -> str:
        """free | writing | sealed | committed"""

    @property
    def generation(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def newest(self) -> bool: ...
    @property
    def received(self) -> bool:
        """Begun for bytes that come from another node."""

class CommittedWeights:
    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def slot(self) -> int: ...

class WeightStore:
    """Three versions of the weights in one segment. `psrl.weights.store` tells who calls what."""

    @staticmethod
    def required_bytes(data_bytes: int) -> int:
        """Size of a segment for three versions of `data_bytes` each."""

    @staticmethod
    def format(segment: Segment, data_bytes: int) -> WeightStore:
        """An empty store, whatever the segment held."""

    @staticmethod
    def open(segment: Segment) -> WeightStore:
        """The store that is there. StorageError if there is none."""

    @property
    def data_bytes(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def fence(self, epoch: int) -> None:
        """Refuse everything of epochs before `epoch` from now on. Idempotent."""

    def begin(self, epoch: int, version: int, manifest_hash: bytes, *, gap: bool = False) -> WeightTicket:
        """A slot to write `version` into. StaleMessage: older epoch. StorageError: not the next version (with `gap` any
        newer one will do), or another one of this epoch is unfinished."""

    def put(self, ticket: WeightTicket, offset: int, data: _Array) -> None:
        """Copy contiguous bytes to `offset`; each byte once, ranges of several ranks disjoint. Revoked: slot lost."""

    def put_copies(self, ticket: WeightTicket, data: _Array, copies: npt.NDArray[np.uint64]) -> None:
        """Copy runs of `data`: rows of `copies` are those of psrl.weights.copies.Copy."""

    def checksum(self, ticket: WeightTicket, first: int, count: int) -> None:
        """Compute checksums of some chunks, all of whose bytes are there: seal's work, shared."""

    def seal(self, ticket: WeightTicket, expected_bytes: int) -> None:
        """Close the slot. StorageError unless exactly `expected_bytes` were put."""

    def abandon(self, slot: int) -> None:
        """Free a slot that was begun and not committed. Idempotent. StorageError if it is committed."""

    def commit(self, epoch: int, version: int, slot: int, *, gap: bool = False) -> None:
        """Make it the newest version; the head alone does. Idempotent. StaleMessage or StorageError if it cannot be."""

    def checksums(self, slot: int) -> list[int]:
        """Of each chunk of a sealed or committed slot."""

    def memory(self, ticket: WeightTicket) -> npt.NDArray[np.uint8]:
        """The slot's bytes, to be written in place, uint8 [data_bytes]."""

    def arrived(self, ticket: WeightTicket, num_bytes: int, checksums: list[int]) -> None:
        """Count bytes that were written in place, and note all chunks' checksums, if they are known."""

    def memory_offset(self, slot: int) -> int:
        """Where the slot's bytes begin in the segment."""

    def newest(self) -> CommittedWeights | None: ...
    def acquire(self, client: str, min_version: int, min_epoch: int = 0) -> WeightLease | None:
        """A lease on the newest version; None if that is older than asked for."""

    def valid(self, lease: WeightLease) -> bool: ...
    def release(self, lease: WeightLease) -> None:
        """Give it back; nothing happens to a revoked one."""

    def release_client(self, client: str) -> int:
        """Give back all leases of a process that died. Returns how many."""

    def copy_chunks(self, lease: WeightLease, first: int, count: int, into: _Array) -> None:
        """Copy whole chunks into a buffer of exactly their size. Revoked, ChecksumMismatch: `into` is garbage."""

    def verify(self, lease: WeightLease) -> None:
        """Compare all checksums in place. Revoked, ChecksumMismatch."""

    def view(self, lease: WeightLease) -> npt.NDArray[np.uint8]:
        """The leased bytes, uint8 [data_bytes], shared with all readers: not to be written. Ask `valid` after use."""

    def slots(self) -> list[WeightSlot]: ...

# A record's place: (extent, generation, offset, length). A grant: (extent, generation, run). A client: (number,
# incarnation). Plain tuples, so that messages can carry them.
Ref = tuple[int, int, int, int]
Grant = tuple[int, int, int]
Client = tuple[int, int]
Value = npt.NDArray[Any] | np.generic | bytes

class QueueArena:
    """The tables of a queue's segment; stands under manager, writers and readers, in any process."""

    @staticmethod
    def format(segment: Segment, extent_bytes: int, max_clients: int) -> QueueArena:
        """Lay out a fresh segment in extents of `extent_bytes` (a multiple of 4096)."""

    @staticmethod
    def open(segment: Segment) -> QueueArena:
        """Open one that is laid out; StorageError if it is not."""

    @staticmethod
    def segment_bytes(num_extents: int, extent_bytes: int, max_clients: int) -> int:
        """Size of a segment with so many extents, tables included."""

    @property
    def extent_bytes(self) -> int: ...
    @property
    def num_extents(self) -> int: ...
    @property
    def max_clients(self) -> int: ...
    @property
    def capacity(self) -> int:
        """Bytes of all extents."""

class RecordInfo:
    """A committed record as found by a scan."""

    @property
    def ref(self) -> Ref: ...
    @property
    def partition(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def tag(self) -> bytes: ...
    @property
    def fields(self) -> list[str]: ...
    @property
    def written_ns(self) -> int: ...

class Released:
    """What release_client found."""

    @property
    def known(self) -> bool: ...
    @property
    def client(self) -> Client: ...
    @property
    def num_extents(self) -> int: ...
    @property
    def num_leases(self) -> int: ...
    @property
    def num_records(self) -> int:
        """Committed records of the client; they stay."""

class ArenaUsage:
    """Where the arena's bytes are, in whole extents."""

    @property
    def free(self) -> int: ...
    @property
    def open(self) -> int:
        """At writers."""

    @property
    def rows(self) -> int: ...
    @property
    def leased(self) -> int:
        """Empty, but readers still look at them."""

class ArenaManager:
    """Who has which extent. One at a time, on one thread; all state is in the segment."""

    def __init__(self, arena: QueueArena) -> None:
        """Take over, also from a manager that died in the middle of anything."""

    def register_client(self, name: str) -> Client:
        """A place for the client; one of the same name is released first. StorageError when the table is full."""

    def grant(self, client: Client, num_bytes: int, count: int, held: list[int], keep: int = 0) -> list[Grant]:
        """Up to `count` extents (one run if a record of num_bytes needs several), so that `keep` stay free. Empty: no
        room now.

        Extents that the client has without knowing (a lost answer) come first. ArenaFull if it can never fit.
        """

    def free(self, ref: Ref) -> bool:
        """Free a committed record; False if it is not there. Idempotent."""

    def release_client(self, name: str) -> Released:
        """The process is dead: seal its extents, return its leases, forget its half-written records. Idempotent."""

    def holds(self, ref: Ref) -> bool:
        """Is it a committed record that was not freed?"""

    def scan(self, first: int, max_records: int, owner: Client | None = None) -> tuple[list[RecordInfo], int]:
        """Committed records of the extents from `first` on (of one client), in no order; and where to go on.

        At least max_records unless that was all; then the second is num_extents.
        """

    def incarnations(self) -> list[int]:
        """The life that each place of the client table is in: odd while somebody has it."""

    def usage(self) -> ArenaUsage:
        """After looking at every extent."""

    def free_bytes(self) -> int: ...

class QueueRows:
    """Rows on their way into records: (key, tag, fields). Holds the fields' arrays."""

    def __init__(self, partition: str, rows: Sequence[tuple[str, bytes, dict[str, Value]]]) -> None:
        """TypeError for what is no array, StorageError for what cannot be shared."""

    def __len__(self) -> int: ...
    def num_bytes(self) -> list[int]:
        """That each takes in the arena, with header and alignment."""

class PendingRecords:
    """Written but invisible; aborted if dropped without commit()."""

    def __len__(self) -> int: ...
    def commit(self) -> list[Ref]: ...

class QueueWriter:
    """Writes rows into the extents granted to one client. Thread-safe."""

    def __init__(self, arena: QueueArena, client: Client) -> None: ...
    def add(self, grants: list[Grant]) -> None: ...
    def held(self) -> list[int]:
        """Extents in hand."""

    def begin(self, rows: QueueRows, pending: PendingRecords) -> None:
        """Copy in the rows that `pending` has not yet, as many as there is room in hand. If that is not all, ask for
        room and call again. Revoked: counts as dead."""

    def seal(self) -> None:
        """Give up the unused rest of all extents in hand."""

class QueueReader:
    def __init__(self, arena: QueueArena, client: Client) -> None: ...
    def read(self, ref: Ref, fields: list[str] | None = None) -> dict[str, npt.NDArray[np.generic]]:
        """Read-only views of a record's fields; they hold one lease until the last of them is gone.

        UnknownKey if the record was cleared or lacks a field: never another row's bytes.
        """

    def open(self, ref: Ref) -> QueueRecord:
        """The record, leased until it is gone. UnknownKey if it was cleared."""

class QueueRecord:
    """A record under a lease, or only the description of one that is on another node."""

    @staticmethod
    def elsewhere(description: bytes, length: int) -> QueueRecord:
        """ChecksumMismatch if the description makes no sense."""

    def description(self) -> bytes: ...
    def fields(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int, int]]:
        """name, dtype, shape, offset in the record, bytes."""

    def place_in(self, segment: Segment) -> int:
        """Its offset in the segment that it is read from."""

    @property
    def length(self) -> int:
        """Bytes, with header."""

class Packing:
    """The plan of a ragged batch: which bytes of which record go where in one buffer."""

    def __init__(
        self, records: list[QueueRecord], rows: list[list[tuple[int, list[str]]]], names: list[str] | None
    ) -> None:
        """Of each row: which of `records` gives which fields. StorageError if rows cannot stand in one column."""

    @property
    def num_bytes(self) -> int: ...
    def columns(
        self,
    ) -> list[tuple[str, np.dtype[Any], tuple[int, ...], bool, npt.NDArray[np.int64], int, int]]:
        """name, dtype, shape of one value, rows are scalars, offsets, place in the buffer, bytes."""

    def copy(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy what is here; the GIL is released."""

    def parts(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Of the records from `first` to `end` that are elsewhere: [N, 4] record, offset in it, length, place."""

class RelaySuccessor:
    @property
    def name(self) -> str: ...
    @property
    def wanted(self) -> int:
        """Units that are to be put there."""

    @property
    def arrived(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def problem(self) -> str:
        """Why nothing is put there any more."""

class RelayProgress:
    @property
    def num_units(self) -> int: ...
    @property
    def have(self) -> int: ...
    @property
    def have_bytes(self) -> int: ...
    @property
    def damaged(self) -> int: ...
    @property
    def in_flight(self) -> int:
        """Operations that have not ended yet."""

    @property
    def idle_s(self) -> float:
        """Since a unit arrived here or at a successor."""

    @property
    def problem(self) -> str:
        """Why the transfer cannot go on at this node."""

    @property
    def complete(self) -> bool: ...
    @property
    def successors(self) -> list[RelaySuccessor]: ...

class WeightRelay:
    """One transfer at one node: csrc/weights/relay.h. Units come from predecessors and go on to successors, on the
    link's thread. `have` and `has` are one byte for each unit, 1 for those that are there."""

    def __init__(
        self,
        endpoint: LinkEndpoint,
        region: LinkRegion,
        offset: int,
        length: int,
        *,
        transfer: int,
        units: npt.NDArray[np.uint64],
        chunk_bytes: int,
        expected: list[int],
        have: bytes,
        max_in_flight: int,
        put_timeout_s: float,
        lease: tuple[WeightStore, WeightLease] | None = None,
    ) -> None:
        """`units`: rows (unit, offset, length). With a lease nothing is sent after it was revoked."""

    def open_window(self, key: str) -> bytes:
        """An advert for one predecessor; the window of the same key before is closed."""

    def close_window(self, key: str) -> None: ...
    def send_to(self, name: str, peer: int, into: bytes, first: int, end: int, has: bytes) -> None:
        """Put units `first` to `end` there as they come, but those that it has. What was sent under this name is
        replaced."""

    def stop_sending(self, name: str) -> None: ...
    def have(self) -> bytes: ...
    def progress(self) -> RelayProgress: ...
    @property
    def fd(self) -> int:
        """An eventfd: readable when there is a problem or all has come, here or at a successor."""

    def seal(self, store: WeightStore, ticket: WeightTicket, expected_bytes: int) -> None:
        """Close the slot that was filled: takes over the sums that were compared, computes the others."""

    def close(self) -> None:
        """Nothing is put and nothing arrives any more. Idempotent."""

class LinkRegion:
    """Memory that a link may touch; see LinkEndpoint.add_region."""

    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def numa_node(self) -> int:
        """Of its first byte; -1: unknown."""

class LinkEvent:
    @property
    def kind(self) -> str:
        """done | notice | connected | lost"""

    @property
    def peer(self) -> int: ...
    @property
    def op(self) -> int:
        """Of done: what the operation's call returned."""

    @property
    def status(self) -> str:
        """ok | timeout | peer_lost | refused | stale | closed. Of lost: closed after a goodbye, else peer_lost."""

    @property
    def data(self) -> bytes:
        """The notice; of done and lost why, of connected (and a connect that is done) the peer's name."""

class LinkEndpoint:
    """Bulk data to and from other nodes: csrc/link/link.h has the contract. Thread-safe.

    connect, put, pull, notify and flush return a number at once; `poll` gives an event with that number when they
    ended. Until then their memory must stay as it is. Mistakes that need no peer to be seen raise LinkError.
    `pieces` are rows (local offset, remote offset, length) in bytes.
    """

    def __init__(
        self, transport: str, *, name: str, host: str = "127.0.0.1", port: int = 0, token: bytes = b""
    ) -> None:
        """Listen on `host`. `transport`: tcp (needs a token of 16 bytes or more) or ucx (trusts its network)."""

    @property
    def address(self) -> str:
        """What `connect` of a peer takes."""

    @property
    def description(self) -> str: ...
    @property
    def fd(self) -> int:
        """Readable while `poll` has something."""

    def add_region(self, memory: Segment | _Array) -> LinkRegion:
        """A segment, or any contiguous writable buffer, which is held until the region and its windows are gone."""

    def remove_region(self, region: LinkRegion) -> None:
        """Withdraws its windows."""

    def advertise(self, region: LinkRegion, offset: int, length: int, access: str) -> bytes:
        """A window for `put` or `pull`, as bytes for the peer that is to use it."""

    def withdraw(self, advert: bytes) -> None:
        """When it returned, nothing is written there any more."""

    def connect(self, address: str, timeout_s: float) -> int: ...
    def put(
        self, peer: int, into: bytes, source: LinkRegion, pieces: npt.ArrayLike, notice: bytes, timeout_s: float
    ) -> int: ...
    def pull(self, peer: int, source: bytes, into: LinkRegion, pieces: npt.ArrayLike, timeout_s: float) -> int: ...
    def notify(self, peer: int, notice: bytes, timeout_s: float) -> int: ...
    def flush(self, peer: int, timeout_s: float) -> int: ...
    def poll(self) -> list[LinkEvent]: ...
    def counters(self) -> list[dict[str, Any]]:
        """Of each peer: name, address, bytes_put, bytes_received, puts, pulls, notices, failures."""

    def disconnect(self, peer: int, timeout_s: float) -> None: ...
    def close(self, timeout_s: float) -> bool:
        """Ends what is under way, says goodbye. False: not all peers did in time. Idempotent."""

class Device:
    """Where staged bytes go: the host, or a GPU by its driver."""

    def __init__(self, name: str) -> None:
        """cpu, cuda or cuda:N. StorageError says what is missing."""

    @property
    def name(self) -> str: ...

class HostRegistration:
    """A segment locked for fast copies to a device, in pieces of 16 MiB; on the host nothing. Until `close` or its
    end."""

    def __init__(self, device: Device, segment: Segment, pause_s: float = 0.005) -> None:
        """Sleeps `pause_s` between pieces: all else that uses the GPU waits during one. StorageError by name."""

    @property
    def num_pieces(self) -> int: ...
    def close(self) -> None: ...

class StagedWeights:
    @property
    def lease(self) -> WeightLease:
        """Of what was staged; given back already, unless in place."""

    @property
    def num_revoked(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class StageProgress:
    @property
    def running(self) -> bool: ...
    @property
    def num_bytes(self) -> int:
        """Of the present attempt."""

    @property
    def num_revoked(self) -> int: ...

class WeightStager:
    """Copies versions to a device on a native thread; psrl.weights.stage wraps it."""

    def __init__(
        self, store: WeightStore, manifest_hash: bytes, client: str, device: Device, into: int, owner: object
    ) -> None:
        """`into`: address on the device of `store.data_bytes` bytes that `owner` keeps."""

    def start(self, min_version: int, min_epoch: int, timeout_s: float, in_place: bool) -> None: ...
    def wait(self, timeout_s: float) -> StagedWeights | None:
        """None: still running. Raises what it ended with."""

    def cancel(self) -> None: ...
    def progress(self) -> StageProgress: ...

# Checksums of chunks are those that slots keep: `WeightStore.checksums`. Hashes are 16 bytes.

class DeltaLayout:
    """How the bytes of a version are read: runs of items of one size. `psrl.weights.delta.layout_of` makes it."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        """(end, item bytes) ascending, in multiples of 64 bytes; 2 and 4 are floats, 1 is anything."""

    @property
    def data_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int:
        """One for each chunk of the store."""

class PatchHeader:
    """The first PATCH_HEADER_BYTES of a patch."""

    @staticmethod
    def read(patch: _Array) -> PatchHeader:
        """StorageError if it is not one, ChecksumMismatch if it is damaged."""

    @property
    def epoch(self) -> int: ...
    @property
    def base_version(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def manifest_hash(self) -> bytes: ...
    @property
    def base_hash(self) -> bytes: ...
    @property
    def result_hash(self) -> bytes: ...
    @property
    def data_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...

PATCH_HEADER_BYTES: int
PATCH_BLOCK_HEADER_BYTES: int

def version_hash(manifest_hash: bytes, checksums: list[int]) -> bytes:
    """What patches call a version by: its content, however it came."""

def chunk_checksums(data: _Array, num_threads: int = 1) -> list[int]:
    """Those that a slot would have."""

def delta_encode(
    layout: DeltaLayout,
    epoch: int,
    base_version: int,
    version: int,
    manifest_hash: bytes,
    base: _Array,
    base_checksums: list[int],
    next: _Array,
    next_checksums: list[int],
    num_threads: int = 1,
) -> bytes:
    """The patch that makes `next` of `base`: its header, then a block for each chunk."""

def delta_apply(
    layout: DeltaLayout,
    patch: _Array,
    manifest_hash: bytes,
    base: _Array,
    base_checksums: list[int],
    out: _Array,
    num_threads: int = 1,
) -> list[int]:
    """Make the next version in `out`, apart from the base, and return its checksums. May be repeated.

    StorageError: malformed, or from another base. ChecksumMismatch: patch or base are damaged. `out` is then garbage.
    """

def delta_encode_block(
    layout: DeltaLayout, block: int, base: _Array, base_checksum: int, next: _Array, next_checksum: int
) -> bytes:
    """One block, as soon as both chunks are there."""

def delta_encode_changes(
    layout: DeltaLayout,
    block: int,
    offsets: npt.NDArray[np.uint32],
    steps: npt.NDArray[np.int32],
    base: _Array,
    base_checksum: int,
    out: _Array,
) -> bytes:
    """The same block from its changes alone; `out` becomes the chunk that they make of `base`.

    `offsets` are the changed items' places in bytes from the block's start, ascending.
    """

def delta_apply_block(layout: DeltaLayout, block: _Array, base: _Array, base_checksum: int, out: _Array) -> int:
    """Make one chunk in `out` and return its checksum. Errors as delta_apply."""

def read_through(data: _Array) -> int:
    """Read all bytes once: the speed that comparing is measured against."""
