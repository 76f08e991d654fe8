"""What the node agent (the launcher) says to the head, and what the trainer asks it for metrics."""

import msgspec


class ProcessLost(msgspec.Struct, frozen=True, tag=True):
    """A process of the run ended without being told to. `role` is the part of `name` before its number."""

    name: str
    role: str
    pid: int
    reason: str


class CollectMetrics(msgspec.Struct, frozen=True, tag=True):
    """Ask for the head's share of a step's metrics."""


class Metrics(msgspec.Struct, frozen=True, tag=True):
    values: dict[str, float]


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Done; nothing to say."""
