"""Actors on one machine: Unix stream sockets.

The socket is made with mode 0600, in a directory that only its owner can write, and both sides check that the other
has the same user id. A path left over from a dead listener is replaced; one with a live listener is refused. Probing
and binding are one critical section under a lock on the directory, so two starters cannot both win.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator
from typing import cast

from psrl.actor.stream import BACKLOG, FrameStream, SocketListener
from psrl.actor.transport import Accept, Address, Connection, Listener, NobodyListens, Receiver, Terms
from psrl.clock import now
from psrl.errors import ConfigError

MAX_PATH_BYTES = 107
LOCK_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class UnixAddress(Address, frozen=True, tag="unix"):
    """A socket path, at most 107 bytes (the kernel's limit)."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"

    async def listen(self, accept: Accept, terms: Terms) -> Listener:
        _check_path(self.path)
        directory = _private_directory(self.path)
        async with _locked(directory):
            _remove_stale(self.path)
            return _UnixListener(_bind(self.path), self, accept, terms.max_frame_bytes)

    async def dial(self, receiver: Receiver, terms: Terms) -> Connection:
        _check_path(self.path)
        dialled = _connect(self.path)
        try:
            _, stream = await asyncio.get_running_loop().create_unix_connection(
                lambda: FrameStream(
                    lambda stream, transport: _checked(lambda _: receiver, stream, transport),
                    terms.max_frame_bytes,
                    str(self),
                ),
                sock=dialled,
            )
        except BaseException:  # also when cancelled: no transport owns the socket yet
            dialled.close()
            raise
        if stream.lost is not None:
            raise PermissionError(stream.lost)
        return stream


class _UnixListener(SocketListener):
    """Owns the path, too."""

    def __init__(self, bound: socket.socket, address: UnixAddress, accept: Accept, limit: int) -> None:
        super().__init__(bound, address)
        self._path, self._accept, self._limit = address.path, accept, limit
        self._identity = _identity(address.path)

    async def close(self) -> None:
        self.stop_accepting()
        with contextlib.suppress(FileNotFoundError):
            if _identity(self._path) == self._identity:
                os.unlink(self._path)
        await super().close()

    def _stream(self, accepted: socket.socket) -> FrameStream:
        def checked(stream: Connection, transport: asyncio.Transport) -> Receiver:
            return _checked(self._accept, stream, transport)

        return FrameStream(checked, self._limit, str(self.address))


def _checked(accept: Accept, stream: Connection, transport: asyncio.Transport) -> Receiver:
    sock = cast(socket.socket, transport.get_extra_info("socket"))
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    if uid != os.getuid():
        raise PermissionError(f"the process behind {stream.peer} belongs to user {uid}, not {os.getuid()}")
    return accept(stream)


def _check_path(path: str) -> None:
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {size} bytes; the kernel allows {MAX_PATH_BYTES}. Use a shorter directory"
        )


def _private_directory(path: str) -> str:
    directory = os.path.dirname(os.path.abspath(path))
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.stat(directory)
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the directory {directory} must be yours and writable by you alone (mode 0700) to hold a socket"
        )
    return directory


@contextlib.asynccontextmanager
async def _locked(directory: str) -> AsyncIterator[None]:
    """Hold the directory's lock. The kernel drops it when the holder dies."""
    deadline = now() + LOCK_TIMEOUT_S
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if now() > deadline:
                    raise ConfigError(f"another process holds the lock on {directory} for {LOCK_TIMEOUT_S} s") from None
                await asyncio.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is no socket; it is left alone. Choose another path")
    except FileNotFoundError:
        return
    try:
        _connect(path).close()
    except NobodyListens:
        os.unlink(path)
        return
    except BlockingIOError:
        pass  # its backlog is full: somebody listens
    raise ConfigError(f"another process already listens on {path}")


def _bind(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # before bind: the path is never open to others, whatever the umask
        listening.bind(path)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    return listening


def _connect(path: str) -> socket.socket:
    """Connected at once or not at all: Unix sockets have no connecting state. BlockingIOError: the backlog is full."""
    dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dialled.setblocking(False)
    try:
        dialled.connect(path)
    except OSError as error:
        dialled.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            raise NobodyListens(error.errno, f"nobody listens on {path}") from None
        raise
    return dialled


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino
