"""TCP itself: who gets in, what strangers can do to a listener, and what is left when all have gone."""

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from actors_under_test import Add, Added, Counter, Cut, Large, LargeBack, Occupy, Sleep, cut_callers, until

from psrl.actor import Address, Runtime, TcpAddress, Token, UnixAddress, tcp, wire
from psrl.actor.token import NAME, dialling, listening
from psrl.errors import ActorDied, CallTimeout, ConfigError, WireError

TOKEN = Token("a token of this test")
ANY = TcpAddress("127.0.0.1", 0)


@contextlib.asynccontextmanager
async def pair(**options: int) -> AsyncIterator[tuple[Runtime, Counter, Counter]]:
    """The calling runtime, the ref, and the actor itself behind a socket."""
    counter = Counter()
    async with (
        Runtime("there", listen=ANY, token=TOKEN, **options) as there,
        Runtime("here", token=TOKEN) as here,
    ):
        there.spawn("counter", counter)
        yield here, await here.connect(Counter, "counter", there.address), counter


def port_of(address: Address | None) -> int:
    assert isinstance(address, TcpAddress)
    return address.port


# Addresses.


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "::", "0.0.0.0"])
async def test_hosts_of_both_families_and_names_get_a_real_port(host: str) -> None:
    async with Runtime("there", listen=TcpAddress(host, 0), token=TOKEN) as there, Runtime("here", token=TOKEN) as here:
        there.spawn("counter", Counter())
        port = port_of(there.address)
        assert port != 0
        near = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(host, host)
        ref = await here.connect(Counter, "counter", TcpAddress(near, port))
        assert await ref.add(Add(1)) == Added(1)
        own = await there.connect(Counter, "counter", there.address)
        assert "in there" in repr(own)  # not over a socket


def test_an_address_is_a_plain_value_that_travels() -> None:
    address = TcpAddress("fe80::1", 4711)
    kinds = TcpAddress | UnixAddress
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=kinds) == address
    assert (str(address), str(TcpAddress("node-3", 80))) == ("tcp:[fe80::1]:4711", "tcp:node-3:80")


async def test_an_address_that_cannot_be_had_is_refused_with_what_to_change() -> None:
    async def listen(host: str, port: int) -> None:
        await Runtime("there", listen=TcpAddress(host, port), token=TOKEN).__aenter__()

    async with Runtime("first", listen=ANY, token=TOKEN) as first:
        with pytest.raises(ConfigError, match=r"another process has this port\. Choose another one, or 0"):
            await listen("127.0.0.1", port_of(first.address))
    with pytest.raises(ConfigError, match="no interface of this machine has that address"):
        await listen("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="its host is not known here"):
        await listen("no-such-host.invalid", 0)
    with pytest.raises(ConfigError, match="a port is a number"):
        await listen("127.0.0.1", 65536)
    with pytest.raises(ConfigError, match=r"needs a host; 0\.0\.0\.0"):
        await listen("", 0)
    with pytest.raises(ConfigError, match="host_timeout_s must be from 1"):
        Runtime("there", host_timeout_s=0.1)


async def test_a_port_is_free_again_at_once_after_its_listener() -> None:
    async with pair() as (_, ref, counter):
        port = port_of(counter.runtime.address)
        await ref.add(Add(1))
    async with Runtime("there", listen=TcpAddress("127.0.0.1", port), token=TOKEN) as again:
        assert port_of(again.address) == port


# The token.


async def test_without_a_token_nothing_listens_and_nothing_dials() -> None:
    with pytest.raises(ConfigError, match=r"TCP needs the cluster token.*Runtime\(token="):
        await Runtime("there", listen=ANY).__aenter__()
    async with Runtime("there", listen=ANY, token=TOKEN) as there, Runtime("here") as here:
        with pytest.raises(PermissionError, match="TCP needs the cluster token"):
            await here.connect(Counter, "counter", there.address)


async def test_a_wrong_token_is_told_to_the_dialler_at_once_and_to_the_listeners_log_once(caplog) -> None:
    async with (
        Runtime("there", listen=ANY, token=TOKEN) as there,
        Runtime("here", token=Token("quite another token")) as here,
    ):
        there.spawn("counter", Counter())
        for _ in range(5):
            with pytest.raises(PermissionError, match=r"tcp:127\.0\.0\.1:\d+ is not trusted: .* given different ones"):
                await asyncio.wait_for(here.connect(Counter, "counter", there.address, timeout_s=60), 5)
        assert there._inbound == set()
    assert len(turned_away(caplog)) == 1
    assert "its proof does not fit" in turned_away(caplog)[0]
    assert all("quite another" not in record.getMessage() for record in caplog.records)


async def test_a_listener_that_comes_back_with_another_token_is_as_good_as_dead() -> None:
    async with Runtime("here", token=TOKEN) as here:
        async with Runtime("there", listen=ANY, token=TOKEN) as there:
            there.spawn("counter", Counter())
            address, reasons = there.address, []
            assert address is not None
            ref = await here.connect(Counter, "counter", address)
            here.watch(ref, reasons.append)
        await until(lambda: len(reasons) == 1)
        async with Runtime("imposter", listen=address, token=Token("what it may be given")):
            with pytest.raises(ActorDied, match=r"counter\.add at tcp:.* cannot be called: .*different ones"):
                await ref.add(Add(1))


def turned_away(caplog) -> list[str]:
    return [found.getMessage() for found in caplog.records if "turned away" in found.getMessage()]


# Strangers at a listener.


GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n\r\n",
    "random bytes": random.Random(3).randbytes(76),
    "zeros": bytes(76),
    "a frame of the actors": bytes(wire.Codec().frame(wire.Hello(wire.PROTOCOL, "stranger", b"s" * 60, 2**20), 2**20)),
    "too much": NAME + bytes(100_000),
    "another version": NAME[:-1] + b"0" + bytes(64),
    "no proof": NAME + bytes(64),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_is_turned_away_before_anything_is_decoded(what: str, caplog) -> None:
    async with pair() as (_, ref, counter):
        there = counter.runtime
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(there.address))
        assert (await reader.readexactly(44))[: len(NAME)] == NAME
        writer.write(GARBAGE[what])
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) in (bytes(32), b"")
        writer.close()
        assert len(there._inbound) == 1  # the pair's own
        assert len(turned_away(caplog)) == 1
        assert await ref.add(Add(1)) == Added(1)


async def test_a_stranger_that_stalls_is_cut_off(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with pair() as (_, ref, counter):
        port = port_of(counter.runtime.address)
        for said in (b"", NAME, NAME + bytes(63)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            await reader.readexactly(44)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        assert await ref.add(Add(1)) == Added(1)
    assert "did not end the handshake within 0.1 s" in turned_away(caplog)[0]


async def test_strangers_that_fill_all_places_do_not_keep_friends_out() -> None:
    async with Runtime("there", listen=ANY, token=TOKEN) as there, Runtime("here", token=TOKEN) as here:
        there.spawn("counter", Counter())
        listener = there._listener
        assert isinstance(listener, tcp._TcpListener)
        strangers = []
        for _ in range(tcp.MAX_STRANGERS + 20):
            stranger = socket.create_connection(("127.0.0.1", port_of(there.address)))
            strangers.append(stranger)
            await asyncio.sleep(0)
        await until(lambda: len(listener._strangers) == tcp.MAX_STRANGERS)
        ref = await here.connect(Counter, "counter", there.address, timeout_s=10)
        assert await ref.add(Add(1)) == Added(1)
        assert len(listener._strangers) <= tcp.MAX_STRANGERS
        for stranger in strangers:
            stranger.close()
        await until(lambda: not listener._strangers)


# Listeners that are not what they seem.


@contextlib.asynccontextmanager
async def false_listener(
    behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object],
) -> AsyncIterator[TcpAddress]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await behave(reader, writer)  # type: ignore[misc]
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()


async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(NAME + bytes(32))
    writer.write((await reader.readexactly(76))[44:])


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(1_000_000))


async def be_another(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail.example ESMTP and so on, at some length...\r\n"[:44])


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (reflect, "did not prove that it knows the cluster token"),
        (shout, "said more than a handshake has"),
        (be_another, "does not speak PSRL's actor protocol"),
    ],
)
async def test_a_false_listener_is_not_trusted(behave, reason: str) -> None:
    async with false_listener(behave) as address, Runtime("here", token=TOKEN) as here:
        with pytest.raises(PermissionError, match=reason):
            await here.connect(Counter, "counter", address, timeout_s=30)


async def test_a_listener_that_says_nothing_costs_a_call_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    async with false_listener(say_nothing) as address, Runtime("here", token=TOKEN) as here:
        with pytest.raises(CallTimeout, match="was not there within"):
            await asyncio.wait_for(here.connect(Counter, "counter", address, timeout_s=0.5), 5)


async def test_a_recorded_handshake_opens_nothing_in_either_direction() -> None:
    recorded: dict[str, bytes] = {}
    async with pair() as (here, _ref, counter):
        port = port_of(counter.runtime.address)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            recorded["challenge"] = await back.readexactly(44)
            writer.write(recorded["challenge"])
            recorded["response"] = await reader.readexactly(76)
            forth.write(recorded["response"])
            recorded["verdict"] = await back.readexactly(32)
            writer.write(recorded["verdict"])
            forth.close()

        async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(recorded["challenge"])
            await reader.readexactly(76)
            writer.write(recorded["verdict"])

        async with false_listener(relay) as address:
            with pytest.raises(CallTimeout):
                await here.connect(Counter, "counter", address, timeout_s=0.3)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(recorded["response"])
        await reader.readexactly(44)
        assert await asyncio.wait_for(reader.read(), 5) == bytes(32)  # refused
        writer.close()
        async with false_listener(replay) as address, Runtime("there", token=TOKEN) as other:
            with pytest.raises(PermissionError, match="did not prove"):
                await other.connect(Counter, "counter", address, timeout_s=30)


async def test_a_friend_may_take_its_time_within_the_handshakes_limit() -> None:
    """Bytes may come one at a time: TCP promises no more."""
    async with Runtime("there", listen=ANY, token=TOKEN) as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(there.address))
        half = dialling(TOKEN)
        next(half)
        response, _ = half.send(await reader.readexactly(44))
        for byte in response:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        with pytest.raises(StopIteration):
            half.send(await reader.readexactly(32))
        writer.write(wire.Codec().frame(wire.Hello(wire.PROTOCOL, "slow", b"session", 2**20), 2**20))
        frames, greeting = wire.Frames(2**20), []
        while not greeting:
            greeting = frames.feed(await asyncio.wait_for(reader.read(2**16), 5))
        assert b"there" in bytes(greeting[0])
        writer.close()


# Calls.


async def test_calls_survive_or_fail_over_broken_connections_as_they_do_on_one_machine() -> None:
    reasons: list[str] = []
    async with pair() as (here, ref, counter):
        here.watch(ref, reasons.append)
        call = asyncio.create_task(ref.sleep(Sleep(60)))
        await until(lambda: counter.num_sleeping == 1)
        with pytest.raises(ActorDied, match=r"counter\.cut at tcp:127\.0\.0\.1:\d+ is gone"):
            await ref.cut(Cut())
        with pytest.raises(ActorDied):
            await call
        await until(lambda: counter.num_cancelled == 1)
        assert await ref.occupy(Occupy(cut=True)) == Added(1)  # sent again, counted once
        call = asyncio.create_task(ref.occupy(Occupy(wait=True)))
        await until(lambda: counter.num_sleeping == 1)
        cut_callers(counter.runtime)
        counter.release.set()
        assert await call == Added(2)
        assert reasons == []


async def test_when_the_listener_closes_calls_fail_at_once_by_name() -> None:
    async with Runtime("here", token=TOKEN) as here:
        async with Runtime("there", listen=ANY, token=TOKEN) as there:
            there.spawn("counter", Counter())
            ref = await here.connect(Counter, "counter", there.address)
            call = asyncio.create_task(ref.sleep(Sleep(60)))
            await asyncio.sleep(0.05)
        with pytest.raises(ActorDied, match="runtime there closed"):
            await call
        with pytest.raises(ActorDied, match="nobody listens on tcp:"):
            await ref.add(Add(1))
        with pytest.raises(ActorDied, match="nobody listens on tcp:"):
            await ref.occupy(Occupy())


async def test_a_call_over_the_frame_limit_fails_alone() -> None:
    async with pair(max_frame_bytes=100_000) as (_, ref, _counter):
        other = asyncio.create_task(ref.sleep(Sleep(0.2)))
        with pytest.raises(WireError, match="over the limit of 100000 bytes"):
            await ref.large(Large(bytes(200_000)))
        with pytest.raises(WireError, match="the reply did not go out"):
            await ref.large(Large(b"", num_bytes_back=200_000))
        assert await ref.large(Large(bytes(90_000), num_bytes_back=90_000)) == LargeBack(bytes(90_000))
        assert await other == Added(0)


async def test_a_frame_over_the_limit_from_a_proven_peer_closes_its_connection_unheld(caplog) -> None:
    async with pair(max_frame_bytes=100_000) as (_, ref, counter):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(counter.runtime.address))
        half = dialling(TOKEN)
        next(half)
        writer.write(half.send(await reader.readexactly(44))[0])
        await reader.readexactly(32)
        writer.write(wire.Codec().frame(wire.Hello(wire.PROTOCOL, "greedy", b"session", 2**20), 2**20))
        await reader.readexactly(4)  # the answer to the greeting has begun
        writer.write((2**31).to_bytes(4, "big"))
        assert b"the limit is 100000 bytes" in await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert "closing the connection of greedy" in caplog.text
        assert await ref.add(Add(1)) == Added(1)


async def test_200_connections_at_once_and_no_descriptor_is_left() -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with pair() as (_, ref, _counter):  # what the loop itself opens for its first stream stays
        assert await ref.add(Add(1)) == Added(1)
    before = num_open()
    async with Runtime("there", listen=ANY, token=TOKEN) as there:
        there.spawn("counter", Counter())
        address = there.address
        assert address is not None
        async with contextlib.AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(Runtime(f"caller {n}", token=TOKEN)) for n in range(200)]
            refs = await asyncio.gather(
                *(caller.connect(Counter, "counter", address, timeout_s=30) for caller in callers)
            )
            totals = await asyncio.gather(*(ref.add(Add(1)) for ref in refs))
            assert sorted(reply.total for reply in totals) == list(range(1, 201))
            assert len(there._inbound) == 200
            assert num_open() >= before + 400
        await until(lambda: not there._inbound)
        for _ in range(50):  # refused ones leave nothing either
            async with Runtime("wrong", token=Token("a token of another one")) as wrong:
                with pytest.raises(PermissionError):
                    await wrong.connect(Counter, "counter", address)
        listener = there._listener
        assert isinstance(listener, tcp._TcpListener)
        await until(lambda: not listener._strangers)
    await until(lambda: num_open() == before)
    assert len(asyncio.all_tasks()) == 1


async def test_a_listeners_half_is_what_listening_says() -> None:
    """The listener's first words are the pure half's: a name and a nonce, nothing made with the token."""
    challenge, expected = next(listening(TOKEN))
    async with Runtime("there", listen=ANY, token=TOKEN) as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(there.address))
        assert len(await reader.readexactly(44)) == len(challenge)
        assert expected == 76
        writer.close()
