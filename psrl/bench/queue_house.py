"""The sample queue of a node in processes: storage, controller, and clients that are told what to do.

with house(arena_bytes) as directory, Client(directory, "writer", settings) as writer: ...

python -m psrl.bench.queue_house ROLE DIRECTORY ...      what is started
"""

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from psrl._core import QueueArena
from psrl.actor import Runtime, UnixAddress, run
from psrl.bench.echo import RawCaller, RawEcho, connected
from psrl.bench.process import Process
from psrl.bench.queue_core import Fields, sample
from psrl.bench.rounds import seconds
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.segments import QUEUE, NodeSegments, SegmentSource

_MAX_CLIENTS = 64
START_S = 120.0
_WAIT_S = 120.0


class Load(msgspec.Struct, frozen=True):
    """What clients put and get: samples of `num_tokens`, and batches of `num_rows` of so many fp32 fields."""

    num_tokens: int = 2048
    num_rows: int = 1024
    num_fields: int = 9
    length: int = 8192
    count: int = 20
    """Of single samples, in one go."""

    @property
    def batch_bytes(self) -> int:
        return self.num_rows * self.num_fields * self.length * 4

    @property
    def sample_bytes(self) -> int:
        return sum(value.nbytes for value in sample(self.num_tokens).values())

    def batch(self) -> list[Fields]:
        chance = np.random.default_rng(0)
        columns = [chance.normal(size=(self.num_rows, self.length)).astype(np.float32) for _ in range(self.num_fields)]
        return [{f"field_{f}": column[i] for f, column in enumerate(columns)} for i in range(self.num_rows)]


@contextmanager
def house(arena_bytes: int, extent_bytes: int) -> Iterator[str]:
    """A node's segments, a storage process and a controller process. Yields the directory with the sockets."""
    with tempfile.TemporaryDirectory(prefix="psrl") as directory, NodeSegments(f"{directory}/node") as node:
        num_extents = arena_bytes // extent_bytes
        node.create_queue(
            QueuePlan(
                arena_bytes=QueueArena.segment_bytes(num_extents, extent_bytes, _MAX_CLIENTS),
                extent_bytes=extent_bytes,
                num_extents=num_extents,
                max_clients=_MAX_CLIENTS,
            )
        )
        with _child("storage", directory), _child("controller", directory):
            yield directory


def client(directory: str, name: str, load: Load) -> Process:
    """A process that puts and gets, and knows the words of `_Client`."""
    return _child("client", directory, name, msgspec.json.encode(load).decode())


def _child(role: str, directory: str, *arguments: str) -> Process:
    """Another process of this module, which has said "ready"."""
    command = [sys.executable, "-m", "psrl.bench.queue_house", role, directory, *arguments]
    process = Process(" ".join(("the queue's", role, *arguments[:1])), command)
    try:
        process.hear(str, START_S)
    except BaseException:
        process.close()
        raise
    return process


def all_at_once(clients: list[Process], line: str) -> list[list[float]]:
    """The answers of all, who begin together."""
    for one in clients:
        one.say(line)
    return [one.hear() for one in clients]


# -- there ------------------------------------------------------------------------------------------------------------


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


async def _until_told() -> None:
    _say("ready")
    await asyncio.to_thread(sys.stdin.read)


async def _be_storage(directory: str) -> None:
    async with Runtime("storage", listen=UnixAddress(f"{directory}/storage")) as runtime:
        runtime.spawn("storage", StorageActor(SegmentSource(f"{directory}/node").fetch(QUEUE)))
        await _until_told()


async def _be_controller(directory: str) -> None:
    async with Runtime("controller", listen=UnixAddress(f"{directory}/controller")) as runtime:
        storage = await runtime.connect(StorageActor, "storage", UnixAddress(f"{directory}/storage"))
        runtime.spawn("controller", QueueController(storage))
        echo = await asyncio.get_running_loop().create_unix_server(RawEcho, f"{directory}/echo")  # the limit of a call
        await _until_told()
        echo.close()


async def _be_client(directory: str, name: str, load: str) -> None:
    async with Runtime(name) as runtime:
        controller = await runtime.connect(QueueController, "controller", UnixAddress(f"{directory}/controller"))
        storage = await runtime.connect(StorageActor, "storage", UnixAddress(f"{directory}/storage"))
        queue = await TransferQueue.connect(
            runtime, controller, storage, SegmentSource(f"{directory}/node"), client=name, restart_wait_s=0
        )
        async with connected("unix", f"{directory}/echo", 100) as echo:
            told = _Client(queue, msgspec.json.decode(load, type=Load), echo)
            _say("ready")
            while line := await asyncio.to_thread(sys.stdin.readline):
                word, *rest = json.loads(line).split()
                _say(await told.do(word, rest))


class _Client:
    """What a client can be told; each answers seconds, one for each of what was done."""

    def __init__(self, queue: TransferQueue, load: Load, echo: RawCaller) -> None:
        self._queue, self._load, self._echo = queue, load, echo
        self._sample = sample(load.num_tokens)
        self._rows = load.batch()
        self._keys = [f"row{i}" for i in range(load.num_rows)]
        self._source, self._target = np.ones(load.batch_bytes, np.uint8), np.zeros(load.batch_bytes, np.uint8)

    async def do(self, word: str, rest: list[str]) -> list[float]:
        queue, load = self._queue, self._load
        match word:
            case "samples":  # puts, under keys that begin so
                return [await _timed(queue.kv_put(f"{rest[0]}-{i}", "train", self._sample)) for i in range(load.count)]
            case "read":
                return [await _timed(queue.kv_batch_get(rest, "train")) for _ in range(load.count)]
            case "await":  # the moment at which it has the row; all processes have one clock
                _say("waiting")
                await queue.kv_batch_get(rest, "train", timeout_s=_WAIT_S)
                return [time.perf_counter()]
            case "put_one":  # the moment at which it began
                started = time.perf_counter()
                await queue.kv_put(rest[0], "train", self._sample)
                return [started]
            case "echo":
                return [await _timed(self._echo.ask()) for _ in range(load.count)]
            case "put":
                return [await _timed(queue.kv_batch_put(self._keys, "train", self._rows))]
            case "get":
                return [await _timed(queue.kv_batch_get(self._keys, "train"))]
            case "get_packed":
                return [await _timed(queue.kv_batch_get(self._keys, "train", layout="jagged"))]
            case "put_get":  # a row of the batch there and back
                return [await _timed(self._there_and_back(f"one{i}", self._rows[i])) for i in range(load.count)]
            case "memcpy":
                return [seconds(lambda: np.copyto(self._target, self._source))]
            case "clear":
                return [await _timed(queue.clear_partition("train"))]
        raise ValueError(word)

    async def _there_and_back(self, key: str, fields: Fields) -> None:
        await self._queue.kv_put(key, "train", fields)
        await self._queue.kv_batch_get([key], "train")


async def _timed(action: Awaitable[object]) -> float:
    started = time.perf_counter()
    found = await action
    taken = time.perf_counter() - started
    del found
    return taken


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input says it
    match sys.argv[1:]:
        case ["storage", directory]:
            run(_be_storage(directory))
        case ["controller", directory]:
            run(_be_controller(directory))
        case _:
            run(_be_client(*sys.argv[2:]))
