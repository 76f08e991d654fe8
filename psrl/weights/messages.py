"""What is said to a ParameterServer. A transfer brings one version from nodes that have it, or parts of it, to others.

Checksums and ranges travel as packed little-endian numbers: a version has thousands of chunks, a share thousands of
ranges. `have` is one byte for each unit, 1 for those that are there.
"""

from typing import Literal

import msgspec

from psrl.types import Epoch, Version

Mode = Literal["full", "delta", "shares"]


class GetServerState(msgspec.Struct, frozen=True, tag=True):
    """Which versions are there."""


class Held(msgspec.Struct, frozen=True):
    """A committed version, and what it consists of."""

    epoch: Epoch
    version: Version
    manifest_hash: bytes
    sums: bytes  # uint32 of each chunk
    content: bytes  # a hash over both: what patches call it by


class ServerState(msgspec.Struct, frozen=True, tag=True):
    """`base` is the version before, as long as a patch from it can be made. Rates are in bytes a second, 0: unknown."""

    node: str
    link: str  # where its link listens
    newest: Held | None
    base: Held | None
    num_bytes: int  # of a version
    encode_rate: float
    apply_rate: float


class Offer(msgspec.Struct, frozen=True, tag=True):
    """This node's ranks have put their parts of a version into `slot`, which is not sealed: others have the rest."""

    epoch: Epoch
    version: Version
    slot: int
    generation: int
    ranges: bytes  # uint64 (offset, length) each


class MakePatch(msgspec.Struct, frozen=True, tag=True):
    """Make the patch from the version with content `base` to the newest one."""

    version: Version
    base: bytes


class Patch(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int


class Share(msgspec.Struct, frozen=True):
    """What one source has: ranges of a version, as in Offer."""

    node: str
    ranges: bytes


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Take part in a transfer. Known by its number; saying it again changes nothing.

    full: units of a whole version, compared with `sums`. delta: units of a patch of `patch_bytes` from the version with
    content `base`. shares: several sources with ranges of their own. Whoever hears nothing for `idle_s` gives up.
    """

    transfer: int
    mode: Mode
    epoch: Epoch
    version: Version
    manifest_hash: bytes
    sums: bytes
    unit_bytes: int
    idle_s: float
    patch_bytes: int = 0
    base: bytes = b""
    shares: tuple[Share, ...] = ()


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """`parts` are the units of each source: the first part's begin at 0, each ends where the next begins."""

    have: bytes
    parts: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This node does not take part."""

    reason: str


class OpenWindow(msgspec.Struct, frozen=True, tag=True):
    """Who had handed part `part` on to this node does so no more; somebody else will, into the window."""

    transfer: int
    part: int


class Window(msgspec.Struct, frozen=True, tag=True):
    advert: bytes
    have: bytes


class SendTo(msgspec.Struct, frozen=True, tag=True):
    """Hand units of a part on to `node`, as they come."""

    transfer: int
    part: int
    node: str
    link: str
    advert: bytes
    has: bytes


class StopSending(msgspec.Struct, frozen=True, tag=True):
    transfer: int
    part: int
    node: str


class GetProgress(msgspec.Struct, frozen=True, tag=True):
    """Answered when something was decided (complete, a problem), or after `wait_s`."""

    transfer: int
    wait_s: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    have: tuple[int, ...]  # units of each part
    sealed: bool  # whole, compared and closed
    sums: bytes  # of the sealed version
    problem: str
    lost: dict[str, str]  # successors to which nothing can be put, and why
    num_bytes: int  # that came


class CommitTransfer(msgspec.Struct, frozen=True, tag=True):
    """Make the sealed version the newest one of this node. Idempotent."""

    transfer: int


class EndTransfer(msgspec.Struct, frozen=True, tag=True):
    """Nothing is handed on any more. What was not committed is given up. Idempotent."""

    transfer: int


class ReleasePuller(msgspec.Struct, frozen=True, tag=True):
    """A process of this node died: give its leases back. Idempotent."""

    client: str


class Done(msgspec.Struct, frozen=True, tag=True):
    pass
