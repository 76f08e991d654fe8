"""A process that shares a weight store with a test: `writer` plays the trainer, `reader` a replica."""

import os
import signal
import sys
from itertools import pairwise

import numpy as np

from psrl._core import Segment, WeightStore
from psrl.errors import Revoked

PIECES = 40
HASH = b"recognisable    "


def say(*words: object) -> None:
    print(*words, flush=True)


def write(store: WeightStore, epoch: int, version: int, die_after: int) -> int:
    """One version whose every byte is `version`; dies by SIGKILL when `die_after` operations are done."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if done == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    ticket = store.begin(epoch, version, HASH)
    count()
    edges = np.linspace(0, store.data_bytes, PIECES + 1).astype(int)
    for start, end in pairwise(edges):
        store.put(ticket, int(start), np.full(end - start, version % 256, dtype=np.uint8))
        count()
    store.checksum(ticket, 0, 1)
    count()
    store.seal(ticket, store.data_bytes)
    count()
    return ticket.slot


def writer(store: WeightStore, epoch: int, first: int, die_after: int) -> None:
    """Writes versions from `first` on; after each waits until the head says that it was committed."""
    say("started")
    version = first
    while True:
        say("sealed", version, write(store, epoch, version, die_after))
        if sys.stdin.readline() != "committed\n":
            return
        version += 1


def reader(store: WeightStore, last: int, number: int = 0) -> None:
    """Client "reader NUMBER". Reads until it has seen `last`; says how many reads were whole and how many revoked."""
    whole, revoked, seen = 0, 0, -1
    into = np.empty(store.data_bytes, dtype=np.uint8)
    say("started")
    while seen < last:
        lease = store.acquire(f"reader {number}", 0)
        if lease is None:
            continue
        assert lease.version >= seen, (lease.version, seen)
        try:
            store.copy_chunks(lease, 0, store.num_chunks, into)
            assert (into == lease.version % 256).all(), f"version {lease.version} is torn"
            seen, whole = lease.version, whole + 1
        except Revoked:
            revoked += 1
        store.release(lease)
    say("done", whole, revoked)


if __name__ == "__main__":
    role, fd, *rest = sys.argv[1:]
    opened = WeightStore.open(Segment.attach(int(fd)))
    {"writer": writer, "reader": reader}[role](opened, *map(int, rest))
