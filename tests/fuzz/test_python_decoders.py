"""Whatever Python decodes of what others sent is fed with bad inputs made of good ones, as tests/fuzz/fuzz.cpp does.

What a decoder may raise is what its caller catches; anything else, and anything decoded that breaks a promise, fails.
An input is known by its number: `Mutator(seed, number)` makes it again.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from psrl._core import WEIGHT_CHUNK_BYTES
from psrl.actor.handler import handlers_of
from psrl.actor.token import CHALLENGE_BYTES, PROOF_BYTES, RESPONSE_BYTES, Half, Token, dialling, listening
from psrl.actor.wire import Codec, Frames, Request, Response, error_of, tag_of
from psrl.errors import ActorError, StorageError, WireError
from psrl.transfer import KVBatchMeta, QueueController, StorageActor
from psrl.weights.manifest import Manifest
from psrl.weights.messages import Prepare, Share
from psrl.weights.server import ParameterServer
from psrl.weights.units import Units, pack_ranges

GATE_RUNS, DEEP_RUNS = 4_000, 1_000_000
LIMITS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1)
ACTORS = (QueueController, StorageActor, ParameterServer)


class Mutator:
    def __init__(self, seed: int, number: int) -> None:
        self._chance = random.Random(f"{seed} {number}")

    def input(self, seeds: list[bytes]) -> bytes:
        pick = self._chance.randrange
        data = bytearray(seeds[pick(len(seeds))])
        for _ in range(1 + pick(4)):
            at, how = pick(len(data) + 1), pick(7)
            if how == 0 or at == len(data):
                data[at:at] = self._chance.randbytes(1 + pick(8))
            elif how <= 2:
                data[at] ^= 1 << pick(8)
            elif how == 3:
                data[at] = pick(256)
            elif how == 4:
                width = 1 << pick(4)
                order = "little" if pick(2) else "big"
                data[at : at + width] = (LIMITS[pick(len(LIMITS))] & ((1 << 8 * width) - 1)).to_bytes(width, order)
            elif how == 5:
                del data[at : at + 1 + pick(20)]
            else:
                other = seeds[pick(len(seeds))]
                start = pick(len(other) + 1)
                data[at : at + pick(20)] = other[start : start + pick(60)]
        return bytes(data)


# --- Good messages, of every type that an actor takes or gives -------------------------------------------------------


def example(info: msgspec.inspect.Type, chance: random.Random) -> Any:
    """A value of that type, as msgpack has it."""
    match info:
        case msgspec.inspect.StructType():
            fields = {field.encode_name: example(field.type, chance) for field in info.fields}
            if info.array_like:
                return [*([info.tag] if info.tag is not None else []), *fields.values()]
            return {info.tag_field: info.tag, **fields} if info.tag_field else fields
        case msgspec.inspect.UnionType():
            return example(chance.choice(info.types), chance)
        case msgspec.inspect.TupleType():
            return [example(each, chance) for each in info.item_types]
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return [example(info.item_type, chance) for _ in range(chance.randrange(3))]
        case msgspec.inspect.DictType():
            return {f"k{i}": example(info.value_type, chance) for i in range(chance.randrange(3))}
        case msgspec.inspect.LiteralType():
            return chance.choice(info.values)
        case msgspec.inspect.IntType():
            return chance.choice((0, 1, 7, 4096, 1 << 40))
        case msgspec.inspect.FloatType():
            return chance.choice((0.0, 0.5, 30.0))
        case msgspec.inspect.StrType():
            return chance.choice(("", "train", "a-key"))
        case msgspec.inspect.BytesType():
            return chance.choice((b"", b"\x81\xa1k\x01", bytes(16)))
        case msgspec.inspect.BoolType():
            return chance.random() < 0.5
        case msgspec.inspect.RawType() | msgspec.inspect.AnyType() | msgspec.inspect.NoneType():
            return None
        case _:
            raise AssertionError(f"no example of {info}")


def encoded(of: Any, num: int = 12) -> list[bytes]:
    chance = random.Random(repr(of))
    info = msgspec.inspect.type_info(of)
    return [msgspec.msgpack.encode(example(info, chance)) for _ in range(num)]


# --- What is fed ------------------------------------------------------------------------------------------------------

Feed = Callable[[bytes], None]


def decoding(of: Any, good: list[bytes] | None = None) -> tuple[Feed, list[bytes]]:
    """What is decoded can be sent again and is then the same."""
    decoder, seeds = msgspec.msgpack.Decoder(of), good or encoded(of)
    for seed in seeds:
        decoder.decode(seed)

    def feed(data: bytes) -> None:
        try:
            value = decoder.decode(data)
        except (ValueError, RecursionError):  # as psrl/actor/inbound.py and link.py do
            return
        again = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.encode(decoder.decode(again)) == again

    return feed, seeds


def responses() -> tuple[Feed, list[bytes]]:
    decoder = Codec().responses

    def feed(data: bytes) -> None:
        with suppress(ValueError, RecursionError):
            answer = decoder.decode(data)
            if tag_of(type(answer)) == "failure":
                assert isinstance(error_of(answer), ActorError)

    return feed, encoded(Response, 40)


def frames() -> tuple[Feed, list[bytes]]:
    limit = 1000
    codec = Codec()
    good = [codec.requests.decode(data) for data in encoded(Request, 20)]
    stream = b"".join(codec.frame(request, limit) for request in good)

    def feed(data: bytes) -> None:
        cutter, found, at = Frames(limit), b"", 0
        with suppress(WireError):
            while at < len(data):
                size = 1 + data[at]
                for frame in cutter.feed(data[at : at + size]):
                    assert len(frame) <= limit
                    found += len(frame).to_bytes(4, "big") + frame
                at += size
        assert data.startswith(found)

    return feed, [stream, stream[: len(stream) // 2], codec.frame(good[0], limit)]


def handshakes() -> tuple[Feed, list[bytes]]:
    """Who was not given the token proves nothing; what is said is cut as the streams cut it."""
    token = Token("a token for tests alone")

    def told(half: Half, data: bytes) -> bool:
        _, size = next(half)
        while True:
            received, data = data[:size], data[size:]
            if len(received) < size:
                return False
            try:
                _, size = half.send(received)
            except StopIteration:
                return True
            except PermissionError:
                return False

    def feed(data: bytes) -> None:
        assert not told(listening(token), data)
        assert not told(dialling(token), data)

    challenge, _ = next(listening(token))
    dialler = dialling(token)
    next(dialler)
    response, _ = dialler.send(challenge)
    assert (len(challenge), len(response)) == (CHALLENGE_BYTES, RESPONSE_BYTES)
    return feed, [challenge + bytes(PROOF_BYTES), response, response * 2, bytes(200)]


def manifests() -> tuple[Feed, list[bytes]]:
    good = Manifest.of(
        [("a", "bfloat16", (3, 5)), ("b.weight", "float32", ()), ("c", "bool", (0, 7)), ("d", "int64", (9,))],
        {"head": "a"},
    )

    def feed(data: bytes) -> None:
        with suppress(StorageError):
            manifest = Manifest.decode(data)
            assert Manifest.decode(manifest.encode()) == manifest
            assert all(spec.offset + spec.nbytes <= manifest.total_bytes for spec in manifest.tensors)

    return feed, [good.encode(), Manifest.of([]).encode()]


def units() -> tuple[Feed, list[bytes]]:
    full = Prepare(1, "full", 0, 1, bytes(16), bytes(8), WEIGHT_CHUNK_BYTES, 10.0)
    shares = (Share("n0", pack_ranges([(0, 1 << 20), (1 << 21, 5)])), Share("n1", pack_ranges([(1 << 20, 1 << 20)])))
    good = [
        full,
        msgspec.structs.replace(full, mode="delta", patch_bytes=70_000, unit_bytes=1 << 14),
        msgspec.structs.replace(full, mode="shares", shares=shares, unit_bytes=1 << 18),
    ]
    decoder = msgspec.msgpack.Decoder(Prepare)

    def feed(data: bytes) -> None:
        try:
            message = decoder.decode(data)
        except (ValueError, RecursionError):
            return
        with suppress(StorageError):
            found = Units.of(message, WEIGHT_CHUNK_BYTES, max_units=100)
            assert found.num <= 100 + len(message.shares)
            assert all(0 < sum(length for _, length in unit) <= message.unit_bytes for unit in found.units)

    return feed, [msgspec.msgpack.encode(message) for message in good]


META = KVBatchMeta(["a", "b"], [{"k": 1}, {}], "train", ["x", "y"], {"step": 3})


def targets() -> Iterator[tuple[str, Callable[[], tuple[Feed, list[bytes]]]]]:
    yield "requests", lambda: decoding(Request)
    yield "responses", responses
    yield "frames", frames
    yield "handshakes", handshakes
    yield "manifests", manifests
    yield "units", units
    yield "batch metas", lambda: decoding(KVBatchMeta, [msgspec.msgpack.encode(META)])
    for actor in ACTORS:
        handlers = handlers_of(actor).by_name.values()
        messages = tuple(message for handler in handlers for message in handler.messages)
        replies = tuple(reply for handler in handlers for reply in handler.replies if reply is not type(None))
        yield f"messages to {actor.__name__}", lambda messages=messages: decoding(union(messages))
        yield f"replies of {actor.__name__}", lambda replies=replies: decoding(union(replies))


def union(types: tuple[type, ...]) -> Any:
    found: Any = types[0]
    for each in types[1:]:
        found = found | each
    return found


TARGETS = dict(targets())


def run(target: str, seed: int, runs: int) -> None:
    feed, seeds = TARGETS[target]()
    for data in seeds:
        feed(data)
    for number in range(runs):
        data = Mutator(seed, number).input(seeds)
        try:
            feed(data)
        except BaseException as error:
            error.add_note(f"{target}: input {number} of seed {seed}: {data!r}")
            raise


@pytest.mark.parametrize("target", TARGETS)
def test_some_inputs(target: str) -> None:
    run(target, 1, GATE_RUNS)


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_a_million_inputs(target: str, record_property: Callable[[str, object], None]) -> None:
    record_property("inputs", DEEP_RUNS)
    record_property("seed", 2)
    run(target, 2, DEEP_RUNS)
