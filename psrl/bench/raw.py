"""The limit of a path: bytes between warm memories over a plain TCP connection, with several sizes of writes."""

import contextlib
import functools
import socket
import struct
import threading
from collections.abc import Callable

from psrl.bench.rounds import seconds

WRITES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
TIMEOUT_S = 600.0
_ORDER = struct.Struct("<QQ?")  # bytes in all, bytes a write, whether to the server


class RawServer:
    """Takes and gives what clients ask for, each on a thread of its own, until the process ends or `close`."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        order, memory = bytearray(_ORDER.size), _touched(0)
        with peer, contextlib.suppress(ConnectionError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while peer.recv_into(order, _ORDER.size, socket.MSG_WAITALL) == _ORDER.size:
                num_bytes, write, to_server = _ORDER.unpack(order)
                if len(memory) < num_bytes:
                    memory = _touched(num_bytes)
                view = memoryview(memory)[:num_bytes]
                if to_server:
                    _receive(peer, view)
                    peer.sendall(b"!")
                else:
                    _send(peer, view, write)


class RawClient:
    def __init__(self, host: str, port: int, num_bytes: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(_touched(num_bytes))

    def close(self) -> None:
        self._socket.close()

    def send(self, write: int) -> None:
        """All bytes, until the other side has them."""
        self._socket.sendall(_ORDER.pack(len(self._memory), write, True))
        _send(self._socket, self._memory, write)
        if self._socket.recv(1) != b"!":
            raise ConnectionError("the other end of a raw socket went away")

    def receive(self, write: int) -> None:
        self._socket.sendall(_ORDER.pack(len(self._memory), write, False))
        _receive(self._socket, self._memory)


def best_of(action: Callable[[int], object]) -> float:
    """Seconds with the best of the sizes."""
    return min(seconds(functools.partial(action, write)) for write in WRITES)


def _send(peer: socket.socket, view: memoryview, write: int) -> None:
    for at in range(0, len(view), write):
        peer.sendall(view[at : at + write])


def _receive(peer: socket.socket, view: memoryview) -> None:
    while view:
        num = peer.recv_into(view)
        if num == 0:
            raise ConnectionError("the other end of a raw socket went away")
        view = view[num:]


def _touched(num_bytes: int) -> bytearray:
    """Memory with pages of its own, where zeroed memory would have one page many times."""
    return bytearray(b"\x01") * num_bytes
