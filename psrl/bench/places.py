"""What `--hosts`, `--netns` and `--gbit` ask for."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from psrl.bench.hosts import Host, here, read_hostfile
from psrl.bench.netns import namespaces
from psrl.errors import ConfigError


@contextlib.contextmanager
def hosts_of(options: argparse.Namespace) -> Iterator[list[Host]]:
    """Where to start processes, the lead's first. Raises ConfigError."""
    if options.hosts and options.netns:
        raise ConfigError("--hosts and --netns: a cluster or this machine, not both")
    if options.gbit is not None and not options.netns:
        raise ConfigError("--gbit limits the links that --netns makes; without --netns links are what they are")
    if options.transport == "shm" and (options.hosts or options.netns):
        raise ConfigError("--transport shm stays on one node: leave out --hosts and --netns")
    if options.transport == "shm":
        yield here(1)
    elif options.hosts:
        yield read_hostfile(options.hosts, options.ssh)
    elif options.netns:
        with namespaces(options.netns, options.gbit) as hosts:
            yield hosts
    else:
        yield here(max(options.receivers or [2]) + 1)


def receivers_of(options: argparse.Namespace, num_hosts: int) -> list[int]:
    """How many nodes receive, in each part of the run. Raises ConfigError where there are not so many."""
    receivers = options.receivers or [num_hosts - 1]
    if max(receivers) > num_hosts - 1:
        raise ConfigError(f"--receivers {max(receivers)}: there are {num_hosts} nodes, and one of them is the source")
    return list(receivers)


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """For the processes, wherever they are: what is set here for UCX. In namespaces it is held to their links."""
    ours = {name: value for name, value in os.environ.items() if name == "PSRL_UCX" or name.startswith("UCX_")}
    return ours | {"UCX_TLS": "tcp,self"} if options.netns else ours


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as it is kept beside the result."""
    left_out = ("run", "json", "command", "hosts", "ssh", "python", "versions", "timeout_s")  # paths of this machine
    return {name: value for name, value in vars(options).items() if value is not None and name not in left_out}
