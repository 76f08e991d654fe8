"""What a reward worker and its scoring processes say to each other: msgpack behind a 4-byte length, over a socket pair.

The worker sends Setup once, then one Job at a time; the process answers Ready or LoadFailed once, then Done or Raised
for each.
"""

import socket
from typing import Any

import msgspec

from psrl.errors import WireError
from psrl.reward.manager import Shaped
from psrl.reward.plan import RewardPlan

MAX_FRAME_BYTES = 64 << 20


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message; `parent` is the worker's process id, for the process to know whether it is still there."""

    plan: RewardPlan
    parent: int


class Job(msgspec.Struct, frozen=True, tag=True):
    """One sample to judge."""

    solution: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    num_response_tokens: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All functions are loaded."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    problem: str


class Done(msgspec.Struct, frozen=True, tag=True):
    shaped: Shaped


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised, or answered something that is no score. `error` says what and where, in one line if the
    error's own text is one; `traceback` is of the user's frames alone."""

    error: str
    traceback: str


ToProcess = Setup | Job
FromProcess = Ready | LoadFailed | Done | Raised

_encoder = msgspec.msgpack.Encoder()
to_process: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)


def frame(message: ToProcess | FromProcess) -> bytes:
    """A message ready to be written. Raises WireError if it is too large."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


def length_of(head: bytes) -> int:
    """Bytes of the body that a 4-byte head announces. Raises WireError if that is too many."""
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a message of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length


def read_blocking(connection: socket.socket) -> bytes | None:
    """The next body, or None when the other side is gone."""
    head = _exactly(connection, 4)
    return None if head is None else _exactly(connection, length_of(head))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
