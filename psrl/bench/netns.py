"""Nodes on one machine: network namespaces on a bridge, each with a link whose rate is limited in both directions."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from psrl.bench.hosts import Host
from psrl.errors import ConfigError

MAX_NODES = 250


@contextlib.contextmanager
def namespaces(num: int, gbit: float | None) -> Iterator[list[Host]]:
    """`num` of them; links are as fast as the machine if `gbit` is None. They are gone at the end.

    Raises ConfigError that names what is missing: root, ip and tc, or a kernel that lets us.
    """
    if not 2 <= num <= MAX_NODES:
        raise ConfigError(f"--netns {num}: from 2 (a source and a receiver) to {MAX_NODES}")
    if gbit is not None and gbit <= 0:
        raise ConfigError(f"--gbit {gbit:g}: a rate above 0")
    if os.geteuid() != 0:
        raise ConfigError("--netns needs root: only root makes network namespaces. Run psrl-bench with sudo")
    tag = f"psrl{os.getpid()}"
    with contextlib.ExitStack() as stack:

        def add(name: str) -> None:
            _run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            _run("ip", "-n", name, "link", "set", "lo", "up")

        switch = f"{tag}-bridge"
        add(switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        hosts = []
        for i in range(num):
            name, port, address = f"{tag}-{i}", f"port{i}", f"10.79.0.{i + 1}"
            add(name)
            _run("ip", "link", "add", "eth0", "mtu", "1500", "netns", name, "type", "veth", "peer", "name", port, "mtu",
                 "1500", "netns", switch)  # fmt: skip
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            for where, device in ((name, "eth0"), (switch, port)):
                _run("ip", "-n", where, "link", "set", device, "up")
                if gbit is not None:
                    limit = ("rate", f"{round(gbit * 1e9)}bit", "burst", "128kb", "latency", "30ms")
                    _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit)
            hosts.append(Host(f"n{i}", address, ("ip", "netns", "exec", name, "sh", "-c")))
        yield hosts


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"--netns needs {command[0]}, of the package iproute2") from error
    if done.returncode:
        raise ConfigError(f"--netns: {' '.join(command)}: {done.stderr.strip() or done.returncode}")
