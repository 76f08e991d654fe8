"""A process that is given too little, or just enough: what it says names what to change, and nothing is half made."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import psrl

CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # of version 1, of version 2

QUEUE = """
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.segments import NodeSegments

with NodeSegments("{folder}/node") as node:
    node.create_queue(QueuePlan.of({num_bytes}))
    print("made", flush=True)
"""

LINKS = """
import asyncio
import sys

import numpy as np

from psrl._core import LinkEndpoint
from psrl.actor.bulk import Bulk

NUM_BYTES = 64 << 20


async def main(transport):
    memory = [np.full(NUM_BYTES, value, np.uint8) for value in (7, 0)]
    token = b"a token for tests alone"
    ends = [Bulk(LinkEndpoint(transport, name=name, host="127.0.0.1", token=token)) for name in "ab"]
    regions = [end.endpoint.add_region(each) for end, each in zip(ends, memory)]
    advert = ends[1].endpoint.advertise(regions[1], 0, NUM_BYTES, "put")
    peer = await ends[0].connect(ends[1].endpoint.address, timeout_s=20)
    await ends[0].put(peer, advert, regions[0], [(0, 0, NUM_BYTES)], timeout_s=60)
    assert (memory[1] == 7).all()
    await asyncio.gather(*(end.close(timeout_s=5) for end in ends))
    print("made", flush=True)


asyncio.run(main(sys.argv[1]))
"""


def run(code: str, *arguments: str, prepare: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        preexec_fn=prepare,
        env={**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A group of processes that may have 512 MiB together."""
    for root in CGROUPS:
        limit = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
        group = root / f"psrl-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(512 << 20))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


def test_a_memory_cgroup_that_is_too_small_is_told_before_the_kernel_kills(memory_cgroup: Path, tmp_path: Path) -> None:
    def join() -> None:
        (memory_cgroup / "cgroup.procs").write_text(str(os.getpid()))

    small = run(QUEUE.format(folder=tmp_path, num_bytes=64 << 20), prepare=join)
    assert (small.returncode, small.stdout) == (0, "made\n"), small.stderr
    large = run(QUEUE.format(folder=tmp_path, num_bytes=1 << 30), prepare=join)
    assert large.returncode == 1
    last = large.stderr.splitlines()[-1]
    assert "StorageError: segment queue needs " in last
    assert "bytes of memory are available; lower transfer_queue.arena_bytes" in last


def test_too_few_descriptors_are_told_with_the_limit_to_raise(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))

    code = "import psrl.transfer.segments, os\nheld = []\n"
    code += "while len(os.listdir('/proc/self/fd')) < 8: held.append(os.dup(0))\n"
    done = run(code + QUEUE.format(folder=tmp_path, num_bytes=1 << 20), prepare=limit)
    assert done.returncode == 1
    assert "Too many open files; raise the limit of open files (ulimit -n)" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_low_limit_of_locked_memory_hinders_no_link_without_rdma(transport: str) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))

    done = run(LINKS, transport, prepare=limit)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr
