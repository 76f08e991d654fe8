"""What ends in a fork ends for nobody: event loops run Python, and collect garbage, in forks on their way to exec."""

import gc
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from psrl._core import (
    ArenaManager,
    LinkEndpoint,
    PendingRecords,
    QueueArena,
    QueueReader,
    QueueRows,
    QueueWriter,
    Segment,
    SegmentServer,
    fetch_segment,
)
from psrl.errors import LinkError


def in_fork(act: Callable[[], None]) -> None:
    """`act` in a fork of this process, which has a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is the point
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            act()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_links_and_servers_go_on_when_a_fork_drops_them(tmp_path: Path) -> None:
    memory = np.zeros(4096, np.uint8)
    ends = [LinkEndpoint("tcp", name=name, token=b"a token for tests") for name in ("a", "b")]
    region = ends[0].add_region(memory)
    servers = [SegmentServer(str(tmp_path / "s"))]
    servers[0].add(Segment.create("shared", 4096))

    def drop() -> None:
        with pytest.raises(LinkError, match=f"belongs to process {os.getppid()}, which this one was forked from"):
            ends[0].advertise(region, 0, 10, "put")
        ends[0].remove_region(region)
        ends.clear()
        servers.clear()

    in_fork(drop)
    assert fetch_segment(str(tmp_path / "s"), "shared", 30).size == 4096
    advert = ends[0].advertise(region, 0, 4096, "put")
    source = ends[1].add_region(np.full(4096, 7, np.uint8))
    ends[1].connect(ends[0].address, 30)
    done = []
    while not done:
        done = [event for event in ends[1].poll() if event.kind == "done"]
    ends[1].put(done[0].peer, advert, source, np.array([[0, 0, 4096]], np.uint64), b"there", 30)
    seen = []
    while not seen:
        seen = [event for event in ends[0].poll() if event.kind == "notice"]
    assert (memory == 7).all()
    for end in ends:
        end.close(10)
    servers[0].close()


def test_leases_and_rows_under_way_stay_when_a_fork_drops_them() -> None:
    arena = QueueArena.format(Segment.create("rows", QueueArena.segment_bytes(4, 4096, 2)), 4096, 2)
    manager = ArenaManager(arena)
    client = manager.register_client("only")
    writer, reader = QueueWriter(arena, client), QueueReader(arena, client)
    rows = QueueRows("p", [("k", b"", {"x": np.arange(8)})])
    pending = [PendingRecords(), PendingRecords()]
    for records in pending:
        writer.add(manager.grant(client, rows.num_bytes()[0], 1, writer.held()))
        writer.begin(rows, records)
    (ref,) = pending.pop(0).commit()
    views = [reader.read(ref)]

    def drop() -> None:
        views.clear()
        pending.clear()

    in_fork(drop)
    (other,) = pending[0].commit()  # not aborted
    writer.seal()
    assert manager.free(ref)
    assert manager.free(other)
    assert manager.usage().leased > 0  # the lease stands
    assert (views[0]["x"] == np.arange(8)).all()
    views.clear()
    assert manager.usage().leased == 0
