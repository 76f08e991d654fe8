"""Checks of the machine: each refusal names the key or limit to change, and leaves nothing behind."""

import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import psrl
from psrl.config import Config, load
from psrl.errors import ConfigError
from psrl.launch.ports import free_ports, port_problem
from psrl.launch.preflight import (
    cpu_problems,
    descriptor_problems,
    disk_problems,
    machine_problems,
    memory_problems,
    port_problems,
    run_dir_problems,
    temp_dir_problems,
)
from psrl.launch.run_lock import RunLock


def config(*overrides: str) -> Config:
    return load("quickstart", overrides).config


def test_a_good_machine_has_no_problems(tmp_path: Path) -> None:
    ok = config(f"trainer.default_local_dir={tmp_path}/a/b/c")
    assert machine_problems(ok, shared_bytes=1 << 20) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_sockets_with_too_long_a_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    (problem,) = temp_dir_problems()
    assert problem.startswith(f"TMPDIR={tmp_path}/xxx")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert temp_dir_problems() == []


def test_free_ports_are_different_and_free() -> None:
    assert len(set(free_ports(20))) == 20
    # Free a moment ago: others of this machine may have taken one since, but hardly so every time.
    assert any(all(port_problem(port) is None for port in free_ports(20)) for _ in range(5))


@pytest.mark.parametrize("keys", [["rollout_port"], ["master_port"], ["rollout_port", "master_port"]])
def test_a_port_in_use_is_named_with_its_key_and_holder(keys: Sequence[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        held = dict(zip(keys, (first.getsockname()[1], second.getsockname()[1]), strict=False))
        overrides = [f"psrl.deployment.{key}={port}" for key, port in held.items()]
        problems = port_problems(config("psrl.deployment.n_rollout_instances=1", *overrides))
    assert len(problems) == len(keys)
    for key, port in held.items():
        assert any(f"psrl.deployment.{key}: port {port} is in use by" in text for text in problems)
        assert all(f"(pid {os.getpid()})" in text for text in problems)


def test_the_run_directory_must_be_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (problem,) = run_dir_problems(config(f"trainer.default_local_dir={tmp_path}/file/run"))
    assert "is a file, not a folder" in problem
    (problem,) = run_dir_problems(config("trainer.default_local_dir=/proc/run"))
    assert "trainer.default_local_dir=/proc/run: /proc cannot be written" in problem


def test_one_run_at_a_time_in_a_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from psrl.launch.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    asked = config(f"trainer.default_local_dir={tmp_path}/run")
    with subprocess.Popen(
        [sys.executable, "-c", code, f"{tmp_path}/run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        (problem,) = run_dir_problems(asked)
        assert f"is in use by another run (pid {other.pid})" in problem
        with pytest.raises(ConfigError, match=f"pid {other.pid}"):
            RunLock(tmp_path / "run")
        other.kill()
    assert run_dir_problems(asked) == []
    with RunLock(tmp_path / "run"):
        assert run_dir_problems(asked) != []
    assert run_dir_problems(asked) == []


def test_room_on_disk_and_in_memory() -> None:
    (problem,) = disk_problems(config(), 1 << 60)
    assert "trainer.default_local_dir" in problem
    assert "needs 1,099,511,627,776 MiB" in problem
    pytest.importorskip("psrl._core", reason="the extension is not built")
    (problem,) = memory_problems(1 << 60, None)
    assert "lower data.train_batch_size, psrl.rollout_n, psrl.staleness" in problem
    (problem,) = memory_problems(1 << 60, 1 << 60)
    assert f"lower transfer_queue.arena_bytes={1 << 60}, or leave it null" in problem


def test_more_threads_than_cpus_are_refused() -> None:
    (problem,) = cpu_problems(config("psrl.deployment.threads_per_process=4096"))
    assert "threads_per_process=4096" in problem


def test_too_few_open_files_are_refused_with_the_remedy() -> None:
    asked = config()  # files are read here: this process may have 64 open already
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        (problem,) = descriptor_problems(asked)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in problem
