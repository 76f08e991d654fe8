"""Hostfiles, and the way from a host to a command on it."""

from pathlib import Path

import pytest

from psrl.bench.hosts import Host, here, read_hostfile
from psrl.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_a_host_a_line_with_its_address_if_it_has_another(tmp_path: Path) -> None:
    path = written(tmp_path, "# the cluster\nroot@a slots=8\n\nb 10.0.0.2  # over the fast network\n")
    assert read_hostfile(path) == [
        Host("n0 (root@a)", "a", ("ssh", "-o", "BatchMode=yes", "root@a")),
        Host("n1 (b)", "10.0.0.2", ("ssh", "-o", "BatchMode=yes", "b")),
    ]


def test_a_template_takes_the_command_as_its_last_word(tmp_path: Path) -> None:
    hosts = read_hostfile(written(tmp_path, "a\nb\n"), "ip netns exec '{host}' sh -c")
    assert [host.shell for host in hosts] == [("ip", "netns", "exec", name, "sh", "-c") for name in "ab"]
    assert len({host.name for host in here(3)}) == 3


@pytest.mark.parametrize(
    ("text", "ssh", "reason"),
    [
        ("", "ssh {host}", "names 0 hosts"),
        ("a\n", "ssh {host}", "names 1 hosts: a source and a receiver"),
        ("a\nb c d\n", "ssh {host}", "line 2: more than a host and an address: b c d"),
        ("a\nb\n", " ", "--ssh is empty"),
    ],
)
def test_bad_hostfiles_are_refused(tmp_path: Path, text: str, ssh: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_hostfile(written(tmp_path, text), ssh)


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "none")
