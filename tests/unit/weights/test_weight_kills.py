"""Pushers and pullers of one node's store, each a process that is killed at random moments, by seed.

What must hold: the newest version is the last that was committed, and whole; a puller never sees a torn one, nor goes
back; the dead hold up nobody; in the end no lease, slot, mapping or descriptor is left. Kills of whole nodes amid
transfers are in test_broadcast_faults.py, of the queue's processes in tests/unit/transfer/test_queue_kills.py.
"""

import os
import random
import subprocess
import time
from collections.abc import Callable

import numpy as np
import pytest

from psrl._core import WEIGHT_CHUNK_BYTES, Segment, WeightStore

SIZE = WEIGHT_CHUNK_BYTES + 12_345
NUM_READERS = 2
FOR_EVER = 1 << 40


def require_newest(store: WeightStore, epoch: int, version: int) -> None:
    lease = store.acquire("test", 0)
    assert (lease.epoch, lease.version) == (epoch, version)
    into = np.empty(store.data_bytes, dtype=np.uint8)
    store.copy_chunks(lease, 0, store.num_chunks, into)
    assert (into == version % 256).all()
    store.release(lease)


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=30)


def run_seed(seed: int, num_epochs: int, start_child: Callable, holders: Callable) -> None:
    inode = kill_some(random.Random(seed), num_epochs, start_child, holders)
    assert holders(inode) == []


def kill_some(chance: random.Random, num_epochs: int, start_child: Callable, holders: Callable) -> int:
    """Returns the inode of the memory."""
    segment = Segment.create("weights", WeightStore.required_bytes(SIZE))
    store = WeightStore.format(segment, SIZE)
    ticket = store.begin(0, 0, bytes(16))
    store.put(ticket, 0, np.zeros(SIZE, np.uint8))
    store.seal(ticket, SIZE)
    store.commit(0, 0, ticket.slot)
    newest = (0, 0)

    def start_reader(number: int):
        child = start_child("reader", segment, FOR_EVER, number)
        assert child.stdout.readline() == "started\n"
        return child

    readers = [start_reader(number) for number in range(NUM_READERS)]
    assert len(holders(os.fstat(segment.fd).st_ino)) == 1 + NUM_READERS
    for epoch in range(1, num_epochs + 1):
        writer = start_child("writer", segment, epoch, newest[1] + 1, -1)
        assert writer.stdout.readline() == "started\n"
        for _ in range(chance.randrange(6)):
            _, version, slot = writer.stdout.readline().split()
            if chance.random() < 0.2:
                break  # sealed, not committed
            store.commit(epoch, int(version), int(slot))
            newest = (epoch, int(version))
            if chance.random() < 0.4:
                number = chance.randrange(NUM_READERS)
                time.sleep(chance.uniform(0.0, 0.002))
                assert readers[number].poll() is None, "a reader saw what must not be"
                end(readers[number])
                store.release_client(f"reader {number}")  # as the node agent does
                readers[number] = start_reader(number)
            writer.stdin.write("committed\n")
            writer.stdin.flush()
        time.sleep(chance.uniform(0.0, 0.004))  # somewhere within the next version
        end(writer)
        require_newest(store, *newest)

    for number, reader in enumerate(readers):
        assert reader.poll() is None, "a reader saw what must not be"
        end(reader)
        store.release_client(f"reader {number}")
    for index, slot in enumerate(store.slots()):
        if slot.state in ("writing", "sealed"):
            store.abandon(index)
    assert all(slot.state in ("free", "committed") and slot.leases == 0 for slot in store.slots())
    require_newest(store, *newest)
    return os.fstat(segment.fd).st_ino


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_whoever_is_killed_versions_are_whole(start_child: Callable, holders: Callable, seed: int) -> None:
    run_seed(seed, 3, start_child, holders)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_two_hundred_seeds_of_kills(start_child: Callable, holders: Callable, record_property: Callable) -> None:
    record_property("seeds", "100 to 299")
    for seed in range(100, 300):
        try:
            run_seed(seed, 4, start_child, holders)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
