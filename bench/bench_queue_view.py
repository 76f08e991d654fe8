"""What do a put and a view of the queue cost, next to a plain copy of the same bytes?

python bench/bench_queue_view.py [--rounds N]     prints one JSON object

One process plays writer, reader and storage on one segment: no actor, no message, only the core. `view_us` is the
median of reading one field as a NumPy view, lease included; `put_us` of writing it (description, copy, flag) into an
extent that was used before; `copy_us` of np.copyto between warm buffers of that size.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from psrl._core import ArenaManager, QueueArena, QueueReader, QueueWriter, Segment, record_bytes

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
EXTENT_BYTES = 1 << 20


def median_us(action: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def measure(size: int, rounds: int) -> dict[str, float]:
    num_extents = 2 * (size // EXTENT_BYTES + 2)
    segment = Segment.create("bench", QueueArena.segment_bytes(num_extents, EXTENT_BYTES, 4))
    arena = QueueArena.format(segment, EXTENT_BYTES, 4)
    manager = ArenaManager(arena)
    client = manager.register_client("bench")
    writer, reader = QueueWriter(arena, client), QueueReader(arena, client)
    source = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    target = np.zeros_like(source)
    row: dict[str, np.ndarray | np.generic | bytes] = {"x": source}
    num_bytes = record_bytes("train", "key", b"", row)

    put_times = []
    for _ in range(rounds):
        writer.add(manager.grant(client, num_bytes, 1, writer.held()))
        start = time.perf_counter_ns()
        pending = writer.begin("train", "key", b"", row)
        assert pending is not None
        ref = pending.commit()
        put_times.append((time.perf_counter_ns() - start) / 1e3)
        manager.free(ref)
    pending = writer.begin("train", "key", b"", row)
    if pending is None:
        writer.add(manager.grant(client, num_bytes, 1, writer.held()))
        pending = writer.begin("train", "key", b"", row)
    assert pending is not None
    ref = pending.commit()
    copy_us = median_us(lambda: np.copyto(target, source), rounds)
    put_us = statistics.median(put_times)
    view_us = median_us(lambda: reader.read(ref, ["x"]), 20 * rounds)
    assert np.array_equal(reader.read(ref)["x"], source)
    return {
        "num_bytes": size,
        "view_us": round(view_us, 2),
        "put_us": round(put_us, 2),
        "copy_us": round(copy_us, 2),
        "put_to_copy": round(put_us / copy_us, 3),
        "put_overhead_us": round(put_us - copy_us, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    result = {
        "question": "cost of a put and a view next to a copy",
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "sizes": [measure(size, rounds) for size in SIZES],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
