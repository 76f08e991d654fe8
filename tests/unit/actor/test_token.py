"""The handshake as pure halves: who gets through, and what does not help those who don't."""

import copy

import pytest

from psrl.actor.token import CHALLENGE_BYTES, NAME, REFUSED, RESPONSE_BYTES, Half, Token, dialling, listening
from psrl.errors import ConfigError

TOKEN = Token("sixteen bytes at least")


def finish(half: Half, received: bytes) -> bytes:
    """The last bytes that the half says."""
    with pytest.raises(StopIteration) as end:
        half.send(received)
    return end.value.value


def exchange(listener_token: Token, dialler_token: Token) -> tuple[bytes, bytes, bytes]:
    listener, dialler = listening(listener_token), dialling(dialler_token)
    challenge, expected = next(listener)
    assert next(dialler) == (b"", len(challenge))
    response, expected_back = dialler.send(challenge)
    assert expected == len(response)
    verdict = finish(listener, response)
    assert expected_back == len(verdict)
    assert finish(dialler, verdict) == b""
    return challenge, response, verdict


def test_two_who_know_the_token_get_through_and_never_say_it_nor_the_same_twice() -> None:
    first, second = exchange(TOKEN, Token(b"sixteen bytes at least")), exchange(TOKEN, TOKEN)
    assert not set(first) & set(second)
    assert b"sixteen bytes" not in b"".join(first + second)


def test_another_token_is_refused_by_both_sides() -> None:
    with pytest.raises(PermissionError, match="does not fit the cluster token"):
        exchange(TOKEN, Token("another one, as long"))
    dialler = dialling(TOKEN)
    next(dialler)
    dialler.send(NAME + bytes(32))
    with pytest.raises(PermissionError, match="the two were given different ones"):
        dialler.send(REFUSED)


def test_a_recorded_dialler_proves_nothing_to_the_next_challenge() -> None:
    _, response, _ = exchange(TOKEN, TOKEN)
    listener = listening(TOKEN)
    next(listener)
    with pytest.raises(PermissionError, match="does not fit"):
        listener.send(response)


def test_a_recorded_listener_proves_nothing_to_the_next_dialler() -> None:
    challenge, _, verdict = exchange(TOKEN, TOKEN)
    dialler = dialling(TOKEN)
    next(dialler)
    dialler.send(challenge)
    with pytest.raises(PermissionError, match="did not prove"):
        dialler.send(verdict)


def test_what_a_side_said_does_not_count_when_said_back_to_it() -> None:
    dialler = dialling(TOKEN)
    next(dialler)
    response, _ = dialler.send(NAME + bytes(32))
    with pytest.raises(PermissionError, match="did not prove"):
        dialler.send(response[CHALLENGE_BYTES:])  # its own proof, in the listener's mouth
    listener = listening(TOKEN)
    challenge, _ = next(listener)
    other = dialling(TOKEN)  # a dialler that was lured elsewhere, with both nonces the same
    next(other)
    proof = other.send(challenge)[0][CHALLENGE_BYTES:]
    with pytest.raises(PermissionError, match="does not fit"):
        listener.send(challenge + proof)


@pytest.mark.parametrize("position", [0, len(NAME), CHALLENGE_BYTES, RESPONSE_BYTES - 1])
def test_one_changed_bit_of_the_response_is_refused(position: int) -> None:
    listener, dialler = listening(TOKEN), dialling(TOKEN)
    next(dialler)
    response = bytearray(dialler.send(next(listener)[0])[0])
    response[position] ^= 1
    with pytest.raises(PermissionError):
        listener.send(bytes(response))


@pytest.mark.parametrize(
    ("name", "reason"),
    [(b"psrl.actor/0", "it speaks 'psrl.actor/0', this runtime"), (b"GET / HTTP/1", "does not speak")],
)
def test_another_protocol_or_version_is_named_by_both_sides(name: bytes, reason: str) -> None:
    dialler, listener = dialling(TOKEN), listening(TOKEN)
    next(dialler)
    next(listener)
    with pytest.raises(PermissionError, match=reason):
        dialler.send(name + bytes(32))
    with pytest.raises(PermissionError, match=reason):
        listener.send(name + bytes(64))


def test_a_token_is_long_enough_comes_from_the_environment_and_shows_itself_to_nobody() -> None:
    with pytest.raises(ConfigError, match=r"has 5 bytes and needs at least 16\. Make one with"):
        Token("short")
    assert Token.from_environment({}) is None
    assert Token.from_environment({"PSRL_CLUSTER_TOKEN": " "}) is None
    found = Token.from_environment({"PSRL_CLUSTER_TOKEN": "sixteen bytes at least\n"})
    assert found is not None
    assert found.proof(b"dialler", b"", b"") == TOKEN.proof(b"dialler", b"", b"")
    assert "sixteen" not in repr(TOKEN)
    with pytest.raises(TypeError, match="does not travel"):
        copy.copy(TOKEN)
