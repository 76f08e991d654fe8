import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import psrl
from psrl._core import Segment, WeightStore


@pytest.fixture
def make_store() -> Callable[[int], tuple[WeightStore, Segment]]:
    def make(total_bytes: int) -> tuple[WeightStore, Segment]:
        segment = Segment.create("weights", WeightStore.required_bytes(total_bytes))
        return WeightStore.format(segment, total_bytes), segment

    return make


@pytest.fixture
def start_child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs `weights_child.py ROLE FD ARGS...` with the segment's descriptor; what is left at the end is killed."""
    children: list[subprocess.Popen[str]] = []

    def start(role: str, segment: Segment, *arguments: object) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("weights_child.py")
        child = subprocess.Popen(
            [sys.executable, str(script), role, str(segment.fd), *map(str, arguments)],
            pass_fds=[segment.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait(timeout=30)
        child.stdin.close()
        child.stdout.close()
