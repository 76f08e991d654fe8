"""The staleness protocol as a pure state machine: no I/O, no clock, no asyncio."""

from psrl.staleness.buffer import Buffer, Entry
from psrl.staleness.events import (
    Advanced,
    Closed,
    Denied,
    Filtered,
    Held,
    IllegalMove,
    Occupied,
    Place,
    Reason,
    Status,
)
from psrl.staleness.ledger import Ledger

__all__ = [
    "Advanced",
    "Buffer",
    "Closed",
    "Denied",
    "Entry",
    "Filtered",
    "Held",
    "IllegalMove",
    "Ledger",
    "Occupied",
    "Place",
    "Reason",
    "Status",
]
