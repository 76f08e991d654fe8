"""What actors of two processes say to each other: frames, envelopes, failures.

A frame is a u32 length (big-endian) and that many bytes of one msgpack envelope. The dialling side sends Hello, Find,
Call and Cancel; the listening side sends Hello, Reply, Failure, Gone and Bye. Anything else closes the connection, by
name. The body of a Call or a Reply is the msgpack of the message itself, decoded by the handler's typed decoder,
never by a generic one.

A request id counts calls of one session (a session outlives its connections), so (session, id) names a call for good.
Deadlines travel as seconds remaining: the two clocks need not agree.
"""

import asyncio
import struct
import traceback
from collections.abc import Iterable

import msgspec

from psrl.errors import ActorDied, ActorError, CallTimeout, Overloaded, RemoteError, WireError

PROTOCOL = 1
DEFAULT_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
MAX_REMAINING_S = 1e9


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """First frame of both sides. `session` is the dialler's calls, or the listener's life (a restart changes it)."""

    protocol: int
    runtime: str
    session: bytes
    max_frame_bytes: int


class Find(msgspec.Struct, frozen=True, tag="find", array_like=True):
    """Is there an actor of this name that answers these message tags? Reply (nil body) or Failure."""

    id: int
    actor: str
    tags: tuple[str, ...]


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    id: int
    actor: str
    message: str  # tag
    remaining_s: float
    body: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """The caller no longer wants the answer."""

    id: int


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    id: int
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """`kind` names an ActorError; the rest is RemoteError's."""

    id: int
    kind: str
    text: str
    error: str = ""
    remote_traceback: str = ""


class Gone(msgspec.Struct, frozen=True, tag="gone", array_like=True):
    """An actor of this process ended while the process lives."""

    actor: str
    reason: str


class Bye(msgspec.Struct, frozen=True, tag="bye", array_like=True):
    """Last frame before the listener closes, and why."""

    reason: str


Request = Hello | Find | Call | Cancel
Response = Hello | Reply | Failure | Gone | Bye
Envelope = Request | Response

Outcome = msgspec.Struct | None | ActorError
"""How a call ended: the reply, or the error that its caller raises."""

NIL = msgspec.Raw(b"\xc0")


class Codec:
    """Encoder and decoders of one runtime. They belong to its loop's thread."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self.requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
        self.responses: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)

    def frame(self, envelope: Envelope, limit: int) -> bytes:
        """Length and envelope. Raises WireError when it is over `limit` bytes, or cannot be encoded.

        A Call's or Reply's body may be the message itself: it is encoded in place, and only decoding yields Raw.
        """
        try:
            encoded = self._encode(envelope)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            what = type(getattr(envelope, "body", envelope)).__qualname__
            raise WireError(f"{what} cannot be encoded: {error}") from error
        size = len(encoded)
        if size > limit:
            raise WireError(f"a frame of {size} bytes is over the limit of {limit} bytes; large values go by reference")
        return _LENGTH.pack(size) + encoded


def tag_of(message: type) -> str:
    """The wire name of a message type."""
    return str(message.__struct_config__.tag)  # type: ignore[attr-defined]


def failure(id: int, error: ActorError) -> Failure:
    """The envelope that carries `error` to the caller."""
    if isinstance(error, RemoteError):
        return Failure(id, "RemoteError", _text(error.text), _text(error.error), _text(error.remote_traceback))
    return Failure(id, type(error).__name__, _text(str(error)))


def error_of(failure: Failure) -> ActorError:
    """The error that a Failure stands for."""
    if failure.kind == "RemoteError":
        return RemoteError(failure.error, failure.text, failure.remote_traceback)
    kinds = {kind.__name__: kind for kind in (ActorDied, CallTimeout, Overloaded)}
    return kinds.get(failure.kind, WireError)(failure.text)


def _text(text: str) -> str:
    """What the wire can carry: lone surrogates, as a model may write them, are escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def remote_error(error: BaseException) -> RemoteError:
    """What a handler raised, as its caller sees it: the same for a caller in this process as for one elsewhere."""
    if isinstance(error, asyncio.CancelledError):
        return RemoteError("CancelledError", "the handler was cancelled", "")
    return RemoteError(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def bounded(remaining_s: float) -> float:
    """A deadline from the wire, made safe for a timer: NaN and negatives are over already."""
    return min(remaining_s, MAX_REMAINING_S) if remaining_s > 0 else 0.0


class Frames:
    """Cuts a byte stream into frames. Holds at most one incomplete frame, and what was put back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. Raises WireError for a frame over the limit, before its bytes are held."""
        buffer = self._buffer
        if not buffer and len(data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data)
            if size == len(data) - _LENGTH.size and size <= self._limit:
                return [data[_LENGTH.size :]]  # one whole frame, as mostly
        buffer += data
        frames: list[bytes] = []
        start, end = 0, len(buffer)
        while end - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            if size > self._limit:
                raise WireError(f"a frame of {size} bytes arrived; the limit is {self._limit} bytes")
            stop = start + _LENGTH.size + size
            if stop > end:
                break
            frames.append(bytes(memoryview(buffer)[start + _LENGTH.size : stop]))
            start = stop
        del buffer[:start]
        return frames

    def put_back(self, frames: Iterable[bytes]) -> None:
        """Frames that were not taken: the next feed returns them again."""
        self._buffer[:0] = b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
