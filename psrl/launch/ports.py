"""TCP ports of this machine: free ones, and who holds one that is not."""

import errno
import socket
from contextlib import ExitStack

import psutil


def free_ports(num: int, host: str = "127.0.0.1") -> list[int]:
    """`num` different ports that were free a moment ago, picked by the kernel."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(_socket(host)) for _ in range(num)]
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]


def port_problem(port: int, host: str = "127.0.0.1") -> str | None:
    """Why a server cannot listen on `port`, or None."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections in TIME_WAIT do not matter
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use{_holder(port)}"
            return f"port {port} cannot be used: {error.strerror}"
    return None


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def _holder(port: int) -> str:
    """By whom, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""
