"""Trainer, head and replica as real processes that share one store, and are killed."""

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from psrl._core import WEIGHT_CHUNK_BYTES, WeightStore
from psrl.errors import StaleMessage, StorageError

SIZE = WEIGHT_CHUNK_BYTES + 12_345
NUM_OPERATIONS = 43  # of one version in weights_child.write


def require_whole(store: WeightStore, epoch: int, version: int) -> None:
    lease = store.acquire("test", 0)
    assert (lease.epoch, lease.version) == (epoch, version)
    into = np.empty(store.data_bytes, dtype=np.uint8)
    store.copy_chunks(lease, 0, store.num_chunks, into)
    assert (into == version % 256).all()
    store.release(lease)


def publish(store: WeightStore, epoch: int, version: int) -> None:
    ticket = store.begin(epoch, version, bytes(16))
    store.put(ticket, 0, np.full(store.data_bytes, version % 256, dtype=np.uint8))
    store.seal(ticket, store.data_bytes)
    store.commit(epoch, version, ticket.slot)


@pytest.mark.parametrize("die_after", [1, 2, 20, NUM_OPERATIONS - 2, NUM_OPERATIONS - 1, NUM_OPERATIONS])
def test_writer_killed_at_each_point_leaves_the_old_version(make_store: Callable, start_child: Callable, die_after):
    store, segment = make_store(SIZE)
    publish(store, 0, 6)
    publish(store, 0, 7)
    child = start_child("writer", segment, 0, 8, die_after)
    assert child.wait(timeout=60) == -9
    require_whole(store, 0, 7)
    states = [slot.state for slot in store.slots()]
    assert sorted(states) == ["committed", "committed", "sealed" if die_after == NUM_OPERATIONS else "writing"]
    if "writing" in states:
        with pytest.raises(StorageError, match="being written"):
            store.commit(0, 8, states.index("writing"))
    publish(store, 1, 7)  # training restarted from a checkpoint of version 7
    require_whole(store, 1, 7)
    with pytest.raises(StaleMessage):
        store.begin(0, 8, bytes(16))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_writer_killed_at_random_moments(make_store: Callable, start_child: Callable, seed: int):
    store, segment = make_store(SIZE)
    randomness = random.Random(seed)
    publish(store, 0, 0)
    version = 0
    for epoch in range(1, 4):
        child = start_child("writer", segment, epoch, version + 1, -1)
        assert child.stdout.readline() == "started\n"
        deadline = time.perf_counter() + randomness.uniform(0.0, 0.06)
        while time.perf_counter() < deadline:
            _, sealed, slot = child.stdout.readline().split()
            store.commit(epoch, int(sealed), int(slot))
            version = int(sealed)
            child.stdin.write("committed\n")
            child.stdin.flush()
        time.sleep(randomness.uniform(0.0, 0.003))  # somewhere within the next version
        child.kill()
        child.wait(timeout=30)
        newest = store.newest()
        assert newest.version == version
        require_whole(store, newest.epoch, version)


def test_pull_beside_push_is_never_torn(make_store: Callable, start_child: Callable):
    store, segment = make_store(SIZE)
    last = 40
    publish(store, 0, 0)
    reader = start_child("reader", segment, last)
    assert reader.stdout.readline() == "started\n"
    writer = start_child("writer", segment, 0, 1, -1)
    assert writer.stdout.readline() == "started\n"
    for version in range(1, last + 1):
        word, sealed, slot = writer.stdout.readline().split()
        assert (word, int(sealed)) == ("sealed", version)
        store.commit(0, version, int(slot))
        writer.stdin.write("committed\n" if version < last else "end\n")
        writer.stdin.flush()
    word, whole, _ = reader.stdout.readline().split()
    assert word == "done"
    assert int(whole) >= 1
    assert reader.wait(timeout=60) == 0
    assert writer.wait(timeout=60) == 0
    assert all(slot.leases == 0 for slot in store.slots())


def test_leases_of_a_killed_reader_hold_up_nobody(make_store: Callable, start_child: Callable):
    store, segment = make_store(SIZE)
    publish(store, 0, 0)
    reader = start_child("reader", segment, 10_000)
    assert reader.stdout.readline() == "started\n"
    while not any(slot.leases for slot in store.slots()):
        time.sleep(0.001)
    reader.kill()
    reader.wait(timeout=30)
    for version in range(1, 7):
        publish(store, 0, version)
    require_whole(store, 0, 6)
    store.release_client("reader 0")
    assert all(slot.leases == 0 for slot in store.slots())
