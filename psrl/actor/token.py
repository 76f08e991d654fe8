"""The cluster token: what all processes of a run know, and how two of them prove it to each other.

The token itself is never sent. On a new connection

    listener -> dialler   name, listener's nonce
    dialler  -> listener  name, dialler's nonce, proof(dialler)
    listener -> dialler   proof(listener), or a refusal

where proof(role) = HMAC-SHA256(token, name + role + listener's nonce + dialler's nonce), and the name holds the
version. Both sides draw fresh nonces, so what was recorded proves nothing later; the role is in the proof, so nothing
that a side says can be said back to it; the name is, so no side can be talked into another version. The dialler proves
first: who merely connects learns one nonce and nothing that was made with the token.

The two halves are generators without I/O: each yields (bytes to send, how many bytes it then expects) and returns the
last bytes to send. They raise PermissionError when the other side does not know the token.
"""

import hmac
import os
from collections.abc import Generator, Mapping
from typing import NoReturn

from psrl.errors import ConfigError

NAME = b"psrl.actor/1"
NONCE_BYTES, PROOF_BYTES = 32, 32
CHALLENGE_BYTES = len(NAME) + NONCE_BYTES
RESPONSE_BYTES = CHALLENGE_BYTES + PROOF_BYTES
REFUSED = bytes(PROOF_BYTES)
MIN_TOKEN_BYTES = 16
VARIABLE = "PSRL_CLUSTER_TOKEN"

Half = Generator[tuple[bytes, int], bytes, bytes]


class Token:
    """A secret of at least 16 bytes. It shows itself to nobody and does not travel."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str | bytes) -> None:
        self._secret = secret.encode() if isinstance(secret, str) else secret
        if len(self._secret) < MIN_TOKEN_BYTES:
            raise ConfigError(
                f"the cluster token has {len(self._secret)} bytes and needs at least {MIN_TOKEN_BYTES}. "
                "Make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Token | None":
        """The token in PSRL_CLUSTER_TOKEN, or None."""
        secret = environment.get(VARIABLE, "").strip()
        return cls(secret) if secret else None

    def proof(self, role: bytes, listener_nonce: bytes, dialler_nonce: bytes) -> bytes:
        """What only a holder of the token can say in this role on this connection."""
        return hmac.digest(self._secret, NAME + role + listener_nonce + dialler_nonce, "sha256")

    def __repr__(self) -> str:
        return "<Token>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster token does not travel; each process is given it when it starts")


def listening(token: Token) -> Half:
    """The listener's half."""
    nonce = os.urandom(NONCE_BYTES)
    response = yield NAME + nonce, RESPONSE_BYTES
    dialler_nonce = _nonce(response)
    if not hmac.compare_digest(response[CHALLENGE_BYTES:], token.proof(b"dialler", nonce, dialler_nonce)):
        raise PermissionError("its proof does not fit the cluster token of this runtime")
    return token.proof(b"listener", nonce, dialler_nonce)


def dialling(token: Token) -> Half:
    """The dialler's half."""
    listener_nonce = _nonce((yield b"", CHALLENGE_BYTES))
    nonce = os.urandom(NONCE_BYTES)
    verdict = yield NAME + nonce + token.proof(b"dialler", listener_nonce, nonce), PROOF_BYTES
    if hmac.compare_digest(verdict, REFUSED):
        raise PermissionError("it refused the cluster token of this runtime: the two were given different ones")
    if not hmac.compare_digest(verdict, token.proof(b"listener", listener_nonce, nonce)):
        raise PermissionError("it did not prove that it knows the cluster token")
    return b""


def _nonce(received: bytes) -> bytes:
    """The nonce in a challenge or response, once its name is ours."""
    name, nonce = received[: len(NAME)], received[len(NAME) : CHALLENGE_BYTES]
    if name != NAME:
        version = NAME.rindex(b"/")
        if name[:version] != NAME[:version]:
            raise PermissionError("it does not speak PSRL's actor protocol")
        raise PermissionError(f"it speaks {name.decode('latin-1')!a}, this runtime {NAME.decode()}")
    return nonce
