"""The Unix socket itself: who may bind, who may connect, what is left, and what nonsense does to the listener."""

import asyncio
import os
import random
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from actors_under_test import Add, Added, Counter, Large, until

from psrl.actor import Runtime, UnixAddress, wire
from psrl.errors import ConfigError

OTHER_PYTHON = "/usr/bin/python3"


def address_in(path: Path) -> UnixAddress:
    return UnixAddress(str(path / "s"))


async def test_the_socket_is_private_whatever_the_umask_and_gone_after(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with Runtime("there", listen=address_in(tmp_path / "new")):
            assert stat.S_IMODE(os.stat(tmp_path / "new" / "s").st_mode) == 0o600
            assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o700
    finally:
        os.umask(before)
    assert os.listdir(tmp_path / "new") == []


async def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="must be yours and writable by you alone"):
        await Runtime("there", listen=address_in(tmp_path / "open")).__aenter__()


async def test_a_path_over_the_kernels_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the kernel allows 107"):
        await Runtime("there", listen=UnixAddress(str(tmp_path / ("s" * 100)))).__aenter__()


async def test_a_live_listener_is_refused_a_dead_ones_path_is_replaced(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "s"))
    dead.close()
    async with Runtime("first", listen=address_in(tmp_path)):
        with pytest.raises(ConfigError, match="another process already listens on"):
            await Runtime("second", listen=address_in(tmp_path)).__aenter__()
        assert (tmp_path / "s").exists()
    assert not (tmp_path / "s").exists()


async def test_of_many_starters_exactly_one_wins(tmp_path: Path) -> None:
    runtimes = [Runtime(f"r{count}", listen=address_in(tmp_path)) for count in range(20)]
    outcomes = await asyncio.gather(*(runtime.__aenter__() for runtime in runtimes), return_exceptions=True)
    winners = [outcome for outcome in outcomes if isinstance(outcome, Runtime)]
    assert len(winners) == 1
    assert all(isinstance(outcome, Runtime | ConfigError) for outcome in outcomes)
    await winners[0].close()


async def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        await Runtime("there", listen=address_in(tmp_path)).__aenter__()
    assert (tmp_path / "s").read_text() == "mine"


@pytest.fixture
def open_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="psrl-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists(OTHER_PYTHON), reason="needs root and a Python that any user can run"
)
async def test_another_user_is_turned_away(open_directory: Path) -> None:
    async with Runtime("there", listen=address_in(open_directory)) as there:
        there.spawn("counter", Counter())
        (open_directory / "s").chmod(0o666)
        program = (
            f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(open_directory / 's')!r}); s.recv(1)"
        )
        tried = await asyncio.to_thread(
            subprocess.run, [OTHER_PYTHON, "-I", "-c", program], user=65534, cwd="/", capture_output=True, timeout=60
        )
        assert tried.returncode == 0, tried.stderr  # it got as far as being closed on
        assert there._inbound == set()
        ref = await there.connect(Counter, "counter", address_in(open_directory))
        assert await ref.add(Add(1)) == Added(1)


# Nonsense on the wire.


def frame(envelope: wire.Envelope) -> bytes:
    return bytes(wire.Codec().frame(envelope, 2**31))


HELLO = frame(wire.Hello(wire.PROTOCOL, "stranger", b"session", 2**20))
NONSENSE = {
    "no greeting": frame(wire.Cancel(1)),
    "another protocol": frame(wire.Hello(99, "stranger", b"session", 2**20)),
    "two greetings": HELLO + HELLO,
    "a frame over the limit": HELLO + b"\xff\xff\xff\xff",
    "an empty frame": HELLO + bytes(4),
    "an envelope for the other side": HELLO + frame(wire.Gone("counter", "no")),
    "deep nesting": HELLO + (10_000).to_bytes(4, "big") + b"\x91" * 10_000,
    "no text": HELLO + (5).to_bytes(4, "big") + b"\x92\xa2\xff\xff\x01",
    "one id twice": HELLO
    + 2 * frame(wire.Call(7, "counter", "Sleep", 60, msgspec.Raw(b"\x82\xa4type\xa5Sleep\xa7seconds<"))),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_nonsense_closes_its_own_connection_only(tmp_path: Path, what: str, caplog) -> None:
    async with Runtime("there", listen=address_in(tmp_path)) as there, Runtime("here") as here:
        there.spawn("counter", Counter())
        ref = await here.connect(Counter, "counter", address_in(tmp_path))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(NONSENSE[what])
        answer = await asyncio.wait_for(reader.read(), 30)  # until it is closed
        assert b"bye" in answer
        assert b"WireError" in answer
        writer.close()
        assert "closing the connection of" in caplog.text
        assert await ref.add(Add(1)) == Added(1)
        await until(lambda: len(there._inbound) == 1)


@pytest.mark.parametrize("greeted", [False, True])
async def test_random_bytes_never_harm_the_listener(tmp_path: Path, greeted: bool) -> None:
    draw = random.Random(7)
    async with Runtime("there", listen=address_in(tmp_path), max_frame_bytes=65536) as there, Runtime("here") as here:
        there.spawn("counter", Counter())
        ref = await here.connect(Counter, "counter", address_in(tmp_path))
        call = frame(wire.Call(1, "counter", "Add", 1.0, msgspec.Raw(b"\x82\xa4type\xa3Add\xa6amount\x01")))
        for count in range(200):
            _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(HELLO if greeted else b"")
            if count % 2:
                broken = bytearray(call)
                for _ in range(draw.randint(1, 4)):
                    broken[draw.randrange(4, len(broken))] = draw.randrange(256)
                writer.write(bytes(broken))
            else:
                size = draw.randint(1, 200)
                writer.write(size.to_bytes(4, "big") + draw.randbytes(size))
            writer.close()
        await until(lambda: len(there._inbound) == 1)
        assert (await ref.add(Add(0))).total >= 0


async def test_a_malformed_message_fails_its_call_only(tmp_path: Path) -> None:
    async with Runtime("there", listen=address_in(tmp_path)) as there:
        there.spawn("counter", Counter())
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(HELLO)
        writer.write(frame(wire.Call(1, "counter", "Add", 5.0, msgspec.Raw(b"\x81\xa4type\xa3Add"))))
        writer.write(frame(wire.Call(2, "counter", "Unheard", 5.0, msgspec.Raw(b"\xc0"))))
        writer.write(frame(wire.Call(3, "nobody", "Add", 5.0, msgspec.Raw(b"\xc0"))))
        writer.write(
            frame(wire.Call(4, "counter", "Add", float("nan"), msgspec.Raw(b"\x82\xa4type\xa3Add\xa6amount\x01")))
        )
        frames, decoder = wire.Frames(2**20), wire.Codec().responses
        answers: list[object] = []
        while len(answers) < 5:
            answers += [decoder.decode(found) for found in frames.feed(await asyncio.wait_for(reader.read(65536), 30))]
        kinds = {answer.id: (answer.kind, answer.text) for answer in answers[1:]}
        assert kinds[1][0] == "WireError"
        assert "counter.add got a malformed Add" in kinds[1][1]
        assert kinds[2] == (
            "WireError",
            "counter has no handler for Unheard; it has add, break_it, cut, fall, forget, large, occupy, sleep",
        )
        assert kinds[3] == ("ActorDied", "runtime there has no actor nobody")
        assert kinds[4][0] == "CallTimeout"
        writer.close()


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_caller_that_does_not_read_is_read_no_further(tmp_path: Path, at_once: bool) -> None:
    counter, num_calls = Counter(), 400
    async with Runtime("there", listen=address_in(tmp_path)) as there:
        there.spawn("counter", counter)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        body = msgspec.Raw(msgspec.msgpack.encode(Large(b"", num_bytes_back=100_000)))
        writer.write(HELLO)
        reader._transport.pause_reading()
        calls = [frame(wire.Call(id, "counter", "Large", 60.0, body)) for id in range(num_calls)]
        if at_once:
            writer.write(b"".join(calls))
        for call in calls if not at_once else []:
            writer.write(call)
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)
        if at_once:  # what it has not read is little, however many calls came in one piece
            assert 0 < counter.num_large < 40
        assert counter.num_large < num_calls
        reader._transport.resume_reading()
        frames, num_answers = wire.Frames(2**20), 0
        while num_answers < 1 + num_calls:
            num_answers += len(frames.feed(await asyncio.wait_for(reader.read(2**20), 30)))
        assert counter.num_large == num_calls
        writer.close()
