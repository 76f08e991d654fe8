"""What the ledger answers: events, refusals and illegal moves. Plain values without behaviour."""

from enum import StrEnum

import msgspec

from psrl.errors import PsrlError
from psrl.types import GroupId, Version


class Status(StrEnum):
    """How full a buffer is. `needed` groups make a batch; a buffer may have more slots (redundancy)."""

    PENDING = "PENDING"  # not ready, an empty slot exists
    STUCK = "STUCK"  # not ready, every slot is taken
    READY = "READY"  # enough groups are occupied, no slot is empty; or closed short
    READY_WITH_CAPACITY = "READY_WITH_CAPACITY"  # enough are occupied, an empty slot is left


class Reason(StrEnum):
    """Why a Reserve was denied, or why a call was illegal. One name each, for logs and tests."""

    # Denied: legal to ask, no place now
    FULL = "no admissible buffer has a free place"
    VERSION_ABORTED = "every buffer this version may serve is ready"
    SIBLING_TOO_OLD = "the group's buffer is too late for this version"
    END_OF_RUN = "no buffer is left in this run"
    GROUP_OCCUPIED = "the group is complete"

    # Illegal: the caller broke the protocol
    VERSION_UNPUBLISHED = "the version has not been published"
    VERSION_OUT_OF_ORDER = "versions are published one after the other"
    VERSION_TOO_OLD = "the version is too old for the group's buffer"
    NOT_RESERVED = "the group holds no reservation"
    NOT_READY = "the buffer is not ready"
    NOT_CONSUMED = "the buffer has not been consumed"
    ALREADY_READY = "the buffer is ready already"
    OUTSIDE_WINDOW = "the buffer is outside the window of this version"


class IllegalMove(PsrlError):
    """A call that the protocol does not allow. Nothing was changed. `reason` names the rule."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        super().__init__(f"{reason.value}: {detail}")


class Place(msgspec.Struct, frozen=True):
    """A reservation: slot `entry` of buffer `buffer`. `joined`: a sibling had taken it before."""

    buffer: int
    entry: int
    joined: bool = False


class Denied(msgspec.Struct, frozen=True):
    """No place. `final`: asking again is useless; else a release, a publish or a newer version may help."""

    reason: Reason
    detail: str
    final: bool = False


class Occupied(msgspec.Struct, frozen=True):
    """The group sits in slot `entry` of `buffer`, which now holds `count` groups."""

    buffer: int
    entry: int
    count: int
    ready: bool
    aborted: tuple[GroupId, ...] = ()  # reservations without a legal place, now that the buffer is ready


class Filtered(msgspec.Struct, frozen=True):
    """The group was dropped and charged to `buffer`. `closed`: that used up its budget; it is READY, short."""

    buffer: int
    closed: bool
    aborted: tuple[GroupId, ...] = ()


class Closed(msgspec.Struct, frozen=True):
    """`buffer` is READY with `count` groups. Its reservations went to other buffers, or were aborted."""

    buffer: int
    count: int
    moved: tuple[GroupId, ...] = ()
    aborted: tuple[GroupId, ...] = ()


class Held(msgspec.Struct, frozen=True):
    """An occupied entry: `version` is V_traj of the group, the oldest version of any of its tokens."""

    group: GroupId
    version: Version


class Advanced(msgspec.Struct, frozen=True):
    """`version` is published; the groups of buffer `version - 1` are trained and their places gone."""

    version: Version
    trained: tuple[Held, ...]
    aborted: tuple[GroupId, ...] = ()  # reservations that have become too old
