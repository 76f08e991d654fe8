"""What the processes of a benchmark on several nodes say to each other.

A process is told its Setup and says where it is (NodeAt). The first, the lead, is then told a Plan, speaks with the
others by actors, and says the Outcome.
"""

from typing import Any, Literal

import msgspec

from psrl.weights.topology import Kind

Mode = Literal["full", "delta", "auto"]


class NodeAt(msgspec.Struct, frozen=True):
    """`raw_port` is where plain sockets are served."""

    name: str
    host: str
    port: int
    raw_port: int


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    host: str
    token: str
    transport: str
    environment: dict[str, str] = {}


class WeightSetup(NodeSetup, frozen=True, tag=True, kw_only=True):
    """A node with a parameter server and, if it has any, replicas' processes."""

    manifest: bytes
    num_replicas: int
    device: str


class QueueSetup(NodeSetup, frozen=True, tag=True, kw_only=True):
    """A node of the queue, number `number`, that holds or reads so many rows."""

    number: int
    num_rows: int


class SyncPlan(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Syncs from the lead to the first of `peers`, as many as each of `receivers` says; in each round every
    topology and mode. `replicas` is the number that each peer has."""

    peers: tuple[NodeAt, ...]
    receivers: tuple[int, ...]
    topologies: tuple[Kind, ...]
    modes: tuple[Mode, ...]
    replicas: int
    lr: float
    rounds: int


class LocalPlan(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pulls of the lead's own replicas, through shared memory."""

    lr: float
    rounds: int


class ReadPlan(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All `peers` read all rows of the lead at once."""

    peers: tuple[NodeAt, ...]
    rounds: int


class Outcome(msgspec.Struct, frozen=True):
    rows: list[dict[str, Any]]
    transport: str


# To a node with replicas.


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Answered when all replicas of the node run `version`."""

    version: int


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """Of each replica: seconds of copying out of the slot, and of overwriting its parameters."""

    transfer_s: list[float]
    pause_s: list[float]


class Memcpy(msgspec.Struct, frozen=True, tag=True):
    """Each replica copies as many bytes, all at once."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """What do the replicas run?"""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Of each replica the checksums of its parameters."""

    sums: list[list[int]]


# To a node that reads rows.


class Join(msgspec.Struct, frozen=True, tag=True):
    lead: NodeAt


class ReadRows(msgspec.Struct, frozen=True, tag=True):
    """All rows, packed; or, with `write`, as many bytes over a plain socket in such writes."""

    write: int


class ReadOne(msgspec.Struct, frozen=True, tag=True):
    count: int


class Took(msgspec.Struct, frozen=True, tag=True):
    seconds: list[float]
