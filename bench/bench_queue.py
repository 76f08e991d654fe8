"""How near to the machine's limit is the sample queue?

python bench/bench_queue.py [core] [latency] [batch] [--rounds N] [--json FILE]     default: all; prints one JSON object

core     one process, no actor: a view by size; rows written into a segment that was touched before, and packed out of
         it, next to np.copyto of as many bytes between memory of the same kind, in turns.
latency  storage, controller, writer and reader in processes of their own, over Unix sockets: put of one sample of
         2,048 tokens (six fields) until any process can see it; get of it in another process, as views; and from the
         put until a reader that waits for it has it.
batch    the case of transferqueue's own benchmark: 1024 samples of 9 fields of 8192 fp32, put and got whole, and one
         sample. With --against DIR also the package `transferqueue` (SimpleStorage), installed in DIR, in turns: as
         many processes, the same data. See bench_queue_tq.py.

Medians over rounds; with the smallest and largest, and the load average. A figure from a busy machine is worth little.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from psrl._core import (
    ArenaManager,
    Packing,
    PendingRecords,
    QueueArena,
    QueueReader,
    QueueRows,
    QueueWriter,
    Segment,
)
from psrl.actor import Runtime, UnixAddress, run
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource

Row = dict[str, Any]
MIB = 1 << 20
VIEW_SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
TOKENS = 2048
ROOT = Path(__file__).resolve().parents[1]


def sample(num_tokens: int = TOKENS) -> Row:
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


def tq_rows(num_samples: int, num_fields: int = 9, length: int = 8192) -> list[Row]:
    chance = np.random.default_rng(0)
    columns = [chance.normal(size=(num_samples, length)).astype(np.float32) for _ in range(num_fields)]
    return [{f"field_{f}": columns[f][i] for f in range(num_fields)} for i in range(num_samples)]


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "rounds": len(values),
    }


def seconds(action: Callable[[], object]) -> float:
    """Of this process's processor time, all threads: who else runs meanwhile costs bandwidth, but no turns."""
    start = time.process_time()
    action()
    return time.process_time() - start


# core


class Core:
    """Writer, reader and manager on one arena."""

    def __init__(self, num_bytes: int, extent_bytes: int = MIB) -> None:
        num_extents = num_bytes // extent_bytes
        self.segment = Segment.create("bench", QueueArena.segment_bytes(num_extents, extent_bytes, 4), "none")
        arena = QueueArena.format(self.segment, extent_bytes, 4)
        self.manager = ArenaManager(arena)
        self.client = self.manager.register_client("bench")
        self.writer, self.reader = QueueWriter(arena, self.client), QueueReader(arena, self.client)

    def put(self, rows: list[Row]) -> list[tuple[int, int, int, int]]:
        planned, pending = QueueRows("train", [("key", b"", row) for row in rows]), PendingRecords()
        self.writer.begin(planned, pending)
        while len(pending) < len(planned):
            left = planned.num_bytes()[len(pending) :]
            grants = self.manager.grant(self.client, left[0], 4 + len(left), self.writer.held())
            assert grants
            self.writer.add(grants)
            self.writer.begin(planned, pending)
        return pending.commit()


def bench_view(size: int) -> dict[str, float]:
    core = Core(size + 4 * MIB)
    (ref,) = core.put([{"x": np.zeros(size, np.uint8)}])
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        core.reader.read(ref, ["x"])
        times.append((time.perf_counter() - start) * 1e6)
    return {"num_bytes": size, "p50_us": round(statistics.median(times), 2)}


def bench_copies(rounds: int, row: Row, total: int) -> dict[str, Any]:
    """Rows in and packed out, each round next to a copy of as many bytes."""
    row_bytes = sum(value.nbytes for value in row.values())
    num_rows = total // row_bytes
    core = Core(int(1.3 * total) + 16 * MIB)
    plain_bytes = 2 * num_rows * row_bytes
    plain = Segment.create("plain", plain_bytes, "none").view(0, plain_bytes, writable=True)
    source, target = plain[: num_rows * row_bytes], plain[num_rows * row_bytes :]
    source[:] = 1
    # Each row has memory of its own, so that what is copied is not in the caches.
    rows = []
    for i in range(num_rows):
        at, fields = i * row_bytes, {}
        for name, value in row.items():
            fields[name] = source[at : at + value.nbytes].view(value.dtype)
            at += value.nbytes
        rows.append(fields)
    for value in (source, target):
        value.sum()
    packed = np.zeros(2 * total, np.uint8)
    put, out, limit_in, limit_out, plan = [], [], [], [], []
    for round in range(rounds + 1):
        limit_in.append(seconds(lambda: np.copyto(target, source)))
        start = time.process_time()
        refs = [ref for fields in rows for ref in core.put([fields])]
        put.append(time.process_time() - start)
        start = time.process_time()
        records = [core.reader.open(ref) for ref in refs]
        names = list(row)
        packing = Packing(records, [[(i, names)] for i in range(num_rows)], names)
        plan.append(time.process_time() - start)
        out.append(seconds(lambda packing=packing: packing.copy(packed)) + plan[-1])
        limit_out.append(seconds(lambda: np.copyto(packed[: source.size], source)))
        del records, packing
        for ref in refs:
            core.manager.free(ref)
        if round == 0:  # the first touch of everything
            put, out, limit_in, limit_out, plan = [], [], [], [], []
    limits = [min(pair) for pair in zip(limit_in, limit_out)]  # the faster copy of the two
    return {
        "row_bytes": row_bytes,
        "num_rows": num_rows,
        "memcpy_GBps": spread([num_rows * row_bytes / t / 1e9 for t in limits]),
        "put_GBps": spread([num_rows * row_bytes / t / 1e9 for t in put]),
        "put_to_memcpy": spread([limit / t for limit, t in zip(limits, put)], 3),
        "packed_out_GBps": spread([num_rows * row_bytes / t / 1e9 for t in out]),
        "out_to_memcpy": spread([limit / t for limit, t in zip(limits, out)], 3),
        "plan_us_per_row": spread([t / num_rows * 1e6 for t in plan]),
    }


def bench_core(rounds: int) -> dict[str, Any]:
    big = {f"field_{f}": np.zeros(8192, np.float32) for f in range(9)}
    huge = {"x": np.zeros(4 * MIB, np.uint8)}
    return {
        "view": [bench_view(size) for size in VIEW_SIZES],
        "rows_of_2048_tokens": bench_copies(rounds, sample(), 64 * MIB),
        "rows_of_9_x_8192_fp32": bench_copies(rounds, big, 256 * MIB),
        "rows_of_4_MiB": bench_copies(rounds, huge, 256 * MIB),
        "row_of_256_MiB": bench_copies(rounds, {"x": np.zeros(256 * MIB, np.uint8)}, 256 * MIB),
    }


# Processes: storage, controller, reader; this one writes.


@contextmanager
def house(arena_bytes: int, extent_bytes: int) -> Iterator[str]:
    """A node's segments, a storage process and a controller process. Yields the directory with the sockets."""
    with tempfile.TemporaryDirectory(prefix="psrl") as directory, NodeSegments(f"{directory}/node") as node:
        num_extents = arena_bytes // extent_bytes
        node.create_queue(
            QueuePlan(
                arena_bytes=QueueArena.segment_bytes(num_extents, extent_bytes, 16),
                extent_bytes=extent_bytes,
                num_extents=num_extents,
                max_clients=16,
            )
        )
        with child("storage", directory), child("controller", directory):
            yield directory


@contextmanager
def child(role: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process of this script, which has said "ready"; ended at the end."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


async def connect(runtime: Runtime, directory: str, name: str) -> TransferQueue:
    controller = await runtime.connect(QueueController, "controller", UnixAddress(f"{directory}/controller"))
    storage = await runtime.connect(StorageActor, "storage", UnixAddress(f"{directory}/storage"))
    return await TransferQueue.connect(
        runtime, controller, storage, SegmentSource(f"{directory}/node"), client=name, restart_wait_s=0
    )


async def be_storage(directory: str) -> None:
    async with Runtime("storage", listen=UnixAddress(f"{directory}/storage")) as runtime:
        runtime.spawn("storage", StorageActor(SegmentSource(f"{directory}/node").fetch(QUEUE)))
        await serve()


async def be_controller(directory: str) -> None:
    async with Runtime("controller", listen=UnixAddress(f"{directory}/controller")) as runtime:
        storage = await runtime.connect(StorageActor, "storage", UnixAddress(f"{directory}/storage"))
        runtime.spawn("controller", QueueController(storage))
        await serve()


async def serve() -> None:
    print("ready", flush=True)
    await asyncio.Event().wait()


async def be_reader(directory: str) -> None:
    """Reads commands, one a line: `get KEY` says the microseconds of a get; `await KEY` the time at which it had it."""
    async with Runtime("reader") as runtime:
        queue = await connect(runtime, directory, "reader")
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, key = line.split()
            if command == "get":
                times = []
                for _ in range(20):
                    start = time.perf_counter()
                    rows = await queue.kv_batch_get([key], "train")
                    times.append((time.perf_counter() - start) * 1e6)
                    assert len(rows[0]) == 6
                    del rows
                print(json.dumps(times), flush=True)
            elif command == "await":
                print("waiting", flush=True)
                rows = await queue.kv_batch_get([key], "train", timeout_s=20)
                print(json.dumps(time.perf_counter()), flush=True)
                del rows


async def latency(directory: str, rounds: int) -> dict[str, Any]:
    row, put, get, seen = sample(), [], [], []
    async with Runtime("writer") as runtime:
        queue = await connect(runtime, directory, "writer")
        with child("reader", directory) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None

            async def ask(command: str) -> Any:
                print(command, file=reader.stdin, flush=True)
                return await answer()

            async def answer() -> Any:
                return await asyncio.to_thread(reader.stdout.readline)

            for round in range(rounds):
                for i in range(50):
                    key = f"{round}-{i}"
                    start = time.perf_counter()
                    await queue.kv_put(key, "train", row)
                    put.append((time.perf_counter() - start) * 1e6)
                get += json.loads(await ask(f"get {round}-0"))
                await ask(f"await {round}-new")
                await asyncio.sleep(0.01)
                start = time.perf_counter()
                await queue.kv_put(f"{round}-new", "train", row)
                seen.append((json.loads(await answer()) - start) * 1e6)
                await queue.clear_partition("train")
    return {
        "put_us": quantiles(put[50:]),
        "get_us": quantiles(get[20:]),
        "put_until_a_waiting_reader_has_it_us": quantiles(seen[1:]),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 1),
        "p10": round(ordered[len(ordered) // 10], 1),
        "p90": round(ordered[len(ordered) * 9 // 10], 1),
        "count": len(ordered),
    }


# batch


async def be_client(directory: str) -> None:
    """The other end of the batch case: `put`, `get`, `one`, `clear`; says seconds."""
    rows = tq_rows(1024)
    keys = [str(i) for i in range(len(rows))]
    async with Runtime("client") as runtime:
        queue = await connect(runtime, directory, "client")
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            got: Any = None
            start = time.perf_counter()
            match line.strip():
                case "put":
                    await queue.kv_batch_put(keys, "train", rows)
                case "get":
                    got = await queue.kv_batch_get(keys, "train")
                case "get_jagged":
                    got = await queue.kv_batch_get(keys, "train", layout="jagged")
                case "one":
                    for i in range(20):
                        await queue.kv_put(f"one{i}", "train", rows[i])
                        got = await queue.kv_batch_get([f"one{i}"], "train")
                case "clear":
                    await queue.clear_partition("train")
            took = time.perf_counter() - start
            del got
            print(json.dumps(took / 20 if line.strip() == "one" else took), flush=True)


def bench_batch(rounds: int, against: str | None) -> dict[str, Any]:
    num_bytes = 1024 * 9 * 8192 * 4
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}

    def do(process: "subprocess.Popen[str]", into: dict[str, list[float]], what: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        print(what, file=process.stdin, flush=True)
        into.setdefault(what, []).append(json.loads(process.stdout.readline()))

    with house(600 * MIB, MIB) as directory, child("client", directory) as mine, tq_process(against) as other:
        for _ in range(rounds + 1):
            for what in ("put", "get", "get_jagged", "one", "clear"):
                do(mine, ours, what)
                if other is not None and what != "get_jagged":
                    do(other, theirs, what)
    result: dict[str, Any] = {"num_bytes": num_bytes, "psrl": summary(ours, num_bytes)}
    if against is not None:
        result["transferqueue"] = summary(theirs, num_bytes)
        result["times_faster"] = {
            what: spread([t / o for t, o in zip(theirs[what][1:], ours[what][1:])], 1) for what in theirs
        }
    return result


def summary(times: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """Without the first round."""
    found: dict[str, Any] = {f"{what}_ms": spread([t * 1e3 for t in each[1:]]) for what, each in times.items()}
    for what in ("put", "get_jagged"):
        if what in times:
            found[f"{what}_GBps"] = round(num_bytes / statistics.median(times[what][1:]) / 1e9, 2)
    return found


@contextmanager
def tq_process(directory: str | None) -> Iterator["subprocess.Popen[str] | None"]:
    if directory is None:
        yield None
        return
    script = Path(__file__).with_name("bench_queue_tq.py")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": directory},
    )
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            assert line, "transferqueue did not start"
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["core", "latency", "batch"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", help="folder(s) with the package transferqueue, as PYTHONPATH")
    parser.add_argument("--json", help="also write the result there")
    options = parser.parse_args()
    parts = options.parts or ["core", "latency", "batch"]
    result: dict[str, Any] = {"bench": "queue", "load_before": os.getloadavg()[0]}
    if "core" in parts:
        result["core"] = bench_core(options.rounds)
    if "latency" in parts:
        with house(64 * MIB, 256 * 1024) as directory:
            result["latency"] = run(latency(directory, options.rounds))
    if "batch" in parts:
        result["batch"] = bench_batch(options.rounds, options.against)
    result |= {
        "load_after": os.getloadavg()[0],
        "num_cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        roles = {"storage": be_storage, "controller": be_controller, "reader": be_reader, "client": be_client}
        run(roles[sys.argv[2]](*sys.argv[3:]))
    else:
        main()
