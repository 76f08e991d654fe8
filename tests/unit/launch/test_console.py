"""Standard streams that are closed, full or broken, in real processes: no traceback, no abort, the right status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import psrl

SHOUT = """
import os, sys
from psrl.launch.console import let_fail, open_missing
open_missing()
assert os.pipe()[0] > 2
let_fail()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("x" * 100_000, file=stream)
sys.exit(5)
"""


def shell(line: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run bash's `line` with the interpreter as $0 and `arguments`; the status of its first command."""
    return subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}", sys.executable, *arguments],
        capture_output=True, text=True, timeout=110,
        env={**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])},
    )  # fmt: skip


@pytest.mark.parametrize(
    "how", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", "2>&1 | head -c 1"]
)
def test_a_run_outlives_its_console(how: str) -> None:
    done = shell(f'"$0" -c "$1" {how}', SHOUT)
    assert done.returncode == 5
    assert "Traceback" not in done.stderr


def test_output_that_was_not_written_is_a_failure() -> None:
    done = shell('"$0" -m psrl.launch.cli --cfg quickstart >/dev/full')
    assert done.returncode == 1
    assert "standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_had_enough_is_not_told() -> None:
    done = shell('"$0" -m psrl.launch.cli --cfg quickstart | true')
    assert done.returncode in (0, 1)  # as it comes too late, or not
    assert done.stderr == ""
