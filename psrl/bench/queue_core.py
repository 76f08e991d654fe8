"""The sample queue in one process, without actors: a view, rows written, rows packed out, next to plain copies.

Memory that was touched before, on both sides: rows in their own places of a sealed segment, as many as make up
`total_bytes`, so that what is copied is in no cache. Copies count this process's turns, not those of others.
"""

import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from psrl._core import ArenaManager, Packing, PendingRecords, QueueArena, QueueReader, QueueRows, QueueWriter, Segment
from psrl.bench.rounds import Row, gbytes_per_s, multiple, quantiles_us, seconds, share

Fields = dict[str, Any]
MIB = 1 << 20


def sample(num_tokens: int) -> Fields:
    """What a rollout writes: six fields."""
    chance = np.random.default_rng(0)
    return {
        "prompts": chance.integers(0, 50_000, 256, np.int32),
        "responses": chance.integers(0, 50_000, num_tokens, np.int32),
        "rollout_log_probs": chance.normal(size=num_tokens).astype(np.float32),
        "rollout_versions": np.zeros(num_tokens, np.int32),
        "response_mask": np.ones(num_tokens, np.bool_),
        "num_turns": np.int64(1),
    }


class Core:
    """Writer, reader and manager on one arena."""

    def __init__(self, num_bytes: int) -> None:
        num_extents = num_bytes // MIB
        self.segment = Segment.create("bench", QueueArena.segment_bytes(num_extents, MIB, 4), "none")
        arena = QueueArena.format(self.segment, MIB, 4)
        self.manager = ArenaManager(arena)
        self.client = self.manager.register_client("bench")
        self.writer, self.reader = QueueWriter(arena, self.client), QueueReader(arena, self.client)

    def put(self, fields: Fields) -> tuple[int, int, int, int]:
        planned, pending = QueueRows("train", [("key", b"", fields)]), PendingRecords()
        self.writer.begin(planned, pending)
        while len(pending) < len(planned):
            needed = planned.num_bytes()[0]
            grants = self.manager.grant(self.client, needed, 5, self.writer.held())
            assert grants
            self.writer.add(grants)
            self.writer.begin(planned, pending)
        (ref,) = pending.commit()
        return ref


def view(size: int, rounds: int) -> Row:
    """Reading a field, its lease included: no byte is copied, so the time is that of small fields."""
    core = Core(size + 4 * MIB)
    ref = core.put({"x": np.zeros(size, np.uint8)})
    target, source = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    views: list[float] = []
    medians, copies = [], []
    for _ in range(rounds + 1):
        taken = [seconds(lambda: core.reader.read(ref, ["x"])) for _ in range(100)]
        views += taken
        medians.append(statistics.median(taken))
        copies.append(seconds(lambda: np.copyto(target, source)))
    what = {"what": f"view of {size:,} bytes", "size_bytes": size}
    return what | multiple(medians[1:], copies[1:], "memcpy of it") | quantiles_us(views[100:])


def copies(what: str, fields: Fields, total_bytes: int, rounds: int) -> list[Row]:
    """Rows in, and packed out."""
    row_bytes = sum(value.nbytes for value in fields.values())
    num_rows = max(total_bytes // row_bytes, 1)
    num_bytes = num_rows * row_bytes
    core = Core(int(1.3 * num_bytes) + 2 * row_bytes + 16 * MIB)
    plain = Segment.create("plain", 2 * num_bytes, "none").view(0, 2 * num_bytes, writable=True)
    source, target = plain[:num_bytes], plain[num_bytes:]
    source[:] = 1
    rows = [_placed(fields, source[i * row_bytes : (i + 1) * row_bytes]) for i in range(num_rows)]
    for value in (source, target):
        value.sum()
    names = list(fields)
    packed = np.zeros(2 * num_bytes + MIB, np.uint8)
    clock = time.process_time
    put, out, limit = [], [], []
    for _ in range(rounds + 1):
        copied = seconds(lambda: np.copyto(target, source), clock)
        refs: list[tuple[int, int, int, int]] = []
        put.append(seconds(lambda refs=refs: refs.extend(core.put(row) for row in rows), clock))  # type: ignore[misc]

        def pack(refs: list[tuple[int, int, int, int]] = refs) -> None:
            records = [core.reader.open(ref) for ref in refs]
            Packing(records, [[(i, names)] for i in range(num_rows)], names).copy(packed)

        out.append(seconds(pack, clock))
        copied_too = seconds(lambda: np.copyto(packed[:num_bytes], source), clock)
        limit.append(min(copied, copied_too))
        for ref in refs:
            core.manager.free(ref)
    shared = {"size_bytes": row_bytes, "num_rows": num_rows, "memcpy_GBps": gbytes_per_s(num_bytes, limit[1:])}
    return [
        {"what": f"{name} of {what}"}
        | share(times[1:], limit[1:], "memcpy")
        | shared
        | {"GBps": gbytes_per_s(num_bytes, times[1:])}
        for name, times in (("put", put), ("packed get", out))
    ]


def _placed(fields: Fields, memory: npt.NDArray[np.uint8]) -> Fields:
    """The row's fields in memory of its own."""
    placed, at = {}, 0
    for name, value in fields.items():
        placed[name] = memory[at : at + value.nbytes].view(value.dtype)
        at += value.nbytes
    return placed
