"""The run directory's disk is full, or becomes so: the run ends by name and does not hang."""

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from psrl.metrics.report import report
from psrl.train.checkpoint_dir import CheckpointDir


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, a little larger than what a run of the house asks for."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    """To the last byte."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 (the loop ends by it)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_disk_that_fills_up_ends_the_run_by_name(start_run: Callable[..., Any], small_disk: Path) -> None:
    live = start_run(small_disk / "run", "trainer.total_training_steps=100000", "trainer.save_freq=5")
    live.wait_step(2)
    live.processes()
    fill(small_disk)
    assert live.end() == 1
    # A save asks for room before it writes: whichever came first.
    assert re.search(r"No space left on device|needs .* MiB free", live.output()), live.output()
    assert f"{live.run_dir}/" in live.output()
    assert live.leftovers() == []

    # And it is not started again: the room that it needs is not there.
    live = start_run(small_disk / "run", "trainer.total_training_steps=100000")
    assert live.end() == 2
    assert "trainer.default_local_dir" in live.output()

    # With room, the next start goes on.
    (small_disk / "ballast").unlink()
    saved = CheckpointDir(live.run_dir / "checkpoints").newest()
    live = start_run(small_disk / "run", f"trainer.total_training_steps={(saved.step if saved else 0) + 6}")
    assert live.end() == 0, live.output()
    found = report(live.run_dir, with_curves=False)
    assert found.ok, found.text()
