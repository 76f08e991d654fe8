"""Where the processes of a benchmark run: here, in namespaces (`psrl.bench.netns`), or on the hosts of a file."""

import shlex
from pathlib import Path
from typing import NamedTuple

from psrl.errors import ConfigError

SSH = "ssh -o BatchMode=yes {host}"


class Host(NamedTuple):
    """`shell` is the command that runs, as a shell there, the one word that is put behind it."""

    name: str
    address: str
    shell: tuple[str, ...]


def here(num: int) -> list[Host]:
    """Processes of this machine, over loopback."""
    return [Host(f"n{i}", "127.0.0.1", ("sh", "-c")) for i in range(num)]


def read_hostfile(path: Path, ssh: str = SSH) -> list[Host]:
    """A host a line: its name for `ssh`, then, if others reach it by another one, its address. # begins a comment.

    Words with `=` (slots=8) are for other programs. In the template `ssh`, {host} is replaced; what it makes must take
    a shell command as its last word. Raises ConfigError.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"--hosts {path}: {error.strerror}") from error
    template = shlex.split(ssh)
    if not template:
        raise ConfigError("--ssh is empty: it says how a command gets to a host")
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = [word for word in line.partition("#")[0].split() if "=" not in word]
        if len(words) > 2:
            raise ConfigError(f"--hosts {path}, line {number}: more than a host and an address: {line.strip()}")
        if words:
            shell = tuple(word.replace("{host}", words[0]) for word in template)
            hosts.append(Host(f"n{len(hosts)} ({words[0]})", words[-1].rpartition("@")[2], shell))
    if len(hosts) < 2:
        raise ConfigError(f"--hosts {path} names {len(hosts)} hosts: a source and a receiver are needed at least")
    return hosts
