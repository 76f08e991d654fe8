"""`psrl-bench` as users call it, small: no figure is judged here, only that there are some."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from psrl.bench.cli import main
from psrl.bench.netns import namespaces
from psrl.errors import ConfigError


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert main([*arguments, "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["bench"] == arguments[0]
    assert {"load_average", "commit", "device", "num_cpus", "transport", "settings"} <= set(result)
    assert result["rows"]
    for row in result["rows"]:
        low, high = row["spread"]
        assert 0 <= low <= row["ratio"] <= high
        assert row["limit"]
        assert row["measure"] in ("share of", "times")
    return result


def what(result: dict[str, Any]) -> list[str]:
    return [row["what"] for row in result["rows"]]


def test_rpc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--transport",
        "tcp",
        "unix",
        "--rounds",
        "1",
        "--calls",
        "5",
        "--receivers",
        "2",
        "--bytes",
        "10",
        "1k",
    ]
    result = measured(tmp_path, "rpc", *arguments)
    assert [row["size_bytes"] for row in result["rows"]] == [10, 10, 10, 1024, 1024, 1024]
    assert {row["limit"] for row in result["rows"]} == {"raw_tcp", "raw_unix"}
    assert "load average" in capsys.readouterr().out


def test_queue_on_a_node(tmp_path: Path) -> None:
    arguments = ["--rounds", "1", "--mib", "1", "--sizes", "64k", "--tokens", "100", "--rows", "20", "--receivers", "2"]
    result = measured(tmp_path, "queue", *arguments)
    assert [name.split()[0] for name in what(result)] == [
        "view",
        "put",
        "packed",
        "put",
        "packed",
        "put",
        "get",
        "put",
        "put",
        "get",
        "get",
    ]


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_queue_across_nodes(tmp_path: Path, transport: str) -> None:
    arguments = f"--transport {transport} --rounds 1 --mib 1 --receivers 1 2".split()
    result = measured(tmp_path, "queue", *arguments)
    assert [row["receivers"] for row in result["rows"]] == [1, 2]
    assert result["transport"].startswith(transport)


def test_weight_sync_on_hosts(tmp_path: Path) -> None:
    """Three hosts that are this one, by another shell than ssh."""
    hosts = tmp_path / "hosts"
    hosts.write_text("a 127.0.0.1\nb 127.0.0.1\nc 127.0.0.1\n")
    arguments = [
        "--rounds",
        "1",
        "--mib",
        "1",
        "--replicas",
        "1",
        "--mode",
        "full",
        "delta",
        "--topology",
        "chain",
        "star",
    ]
    result = measured(tmp_path, "weight-sync", "--hosts", str(hosts), "--ssh", "sh -c", *arguments)
    assert len(result["rows"]) == 8
    for row in result["rows"]:
        assert row["receivers"] == row["replicas"] == 2
        assert (row["sent_bytes"] == row["size_bytes"]) == (row["mode"] == "full")
    syncs = [row for row in result["rows"] if row["what"].startswith("sync")]
    assert len(syncs) == 4
    assert all(row["pause_ms"] > 0 for row in syncs)


def test_weight_sync_on_a_node(tmp_path: Path) -> None:
    result = measured(
        tmp_path, "weight-sync", *["--transport", "shm", "--rounds", "1", "--mib", "1", "--replicas", "2"]
    )
    assert [name.split(":")[0] for name in what(result)] == ["push", "pull", "pause"]


def test_weight_sync_in_namespaces(tmp_path: Path) -> None:
    try:
        with namespaces(2, 1.0):
            pass
    except ConfigError as error:
        pytest.skip(str(error))
    result = measured(
        tmp_path,
        "weight-sync",
        *["--netns", "3", "--gbit", "0.1", "--rounds", "1", "--mib", "2", "--topology", "chain", "star"],
    )
    assert [row["topology"] for row in result["rows"]] == ["chain", "star"]


def test_delta(tmp_path: Path) -> None:
    result = measured(tmp_path, "delta", *["--rounds", "1", "--mib", "1", "--lr", "1e-5", "4e-5"])
    assert [name.split(":")[0] for name in what(result)] == ["patch", "encode", "apply"] * 2
    changed = [row["changed"] for row in result["rows"] if "changed" in row]
    assert 0.005 < changed[0] < 0.02 < changed[1] < 0.06  # as real training does: psrl/bench/versions.py


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("weight-sync --gbit 1", "--gbit limits the links that --netns makes"),
        ("weight-sync --hosts nowhere", "--hosts nowhere: No such file"),
        ("weight-sync --hosts a --netns 3", "not both"),
        ("weight-sync --transport shm --netns 3", "--transport shm stays on one node"),
        ("weight-sync --netns 1", "--netns 1: from 2"),
        ("weight-sync --netns 3 --gbit 0", "--gbit 0: a rate above 0"),
        ("queue --netns 3", "--transport shm stays on one node"),
        ("rpc --json nowhere/result.json", "--json nowhere/result.json: its folder is not there"),
        ("queue --transport tcp --hosts nowhere", "--hosts nowhere: No such file"),
        ("delta --versions nowhere", "--versions nowhere: No such file"),
    ],
)
def test_what_cannot_be_is_said(arguments: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "required: COMMAND"),
        ("speed", "invalid choice: 'speed'"),
        ("rpc --bytes 0", "0 is no size"),
        ("queue --sizes big", "invalid _size value: 'big'"),
        ("weight-sync --topology ring", "invalid choice: 'ring'"),
        ("weight-sync --mib -1", "-1 is not above 0"),
        ("delta --rounds 0", "0 is below 1"),
    ],
)
def test_bad_words_are_refused(arguments: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments.split())
    assert exit.value.code == 2
    assert reason in capsys.readouterr().err


def test_more_receivers_than_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a\nb\n")
    for command in ("weight-sync", "queue --transport tcp"):
        assert main([*command.split(), "--hosts", str(hosts), "--receivers", "1", "2"]) == 2
        assert "--receivers 2: there are 2 nodes, and one of them is the source" in capsys.readouterr().err


def test_namespaces_need_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["weight-sync", "--netns", "3", "--gbit", "1"]) == 2
    assert "--netns needs root" in capsys.readouterr().err


def test_a_host_whose_process_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a 127.0.0.1\nb 127.0.0.1\n")
    for ssh, reason in (("false", "its process ended early"), ("psrl-no-such-shell", "No such file")):
        assert main(["weight-sync", "--hosts", str(hosts), "--ssh", ssh]) == 1
        assert reason in capsys.readouterr().err
