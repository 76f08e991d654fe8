"""Processes that write and read as hard as they can, and tell in a log file what was promised to them.

python queue_crowd.py storage|controller SEGMENTS STORAGE_SOCKET CONTROLLER_SOCKET
python queue_crowd.py write|read SEGMENTS STORAGE_SOCKET CONTROLLER_SOCKET LOG NAME NUM_CLIENTS

Says "ready", works until its standard input ends, finishes what it has in hand and ends. The log has a line for each
promise, written at once: `put KEY` after the put returned, `drawn KEY`, and `clear KEY` before the clear is asked for;
`wrong TEXT` for what must not be.
"""

import asyncio
import os
import random
import sys
import threading
import uuid

import numpy as np

from psrl.actor import Runtime, UnixAddress, run
from psrl.errors import NotReady
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.segments import QUEUE, SegmentSource

RESTART_WAIT_S = 60.0
STORAGE_WAIT_S = 25.0  # within the deadline of the calls that wait for it; the machine may be busy
TASK = "train"


def row_of(key: str) -> dict[str, np.ndarray]:
    """What a row of that key holds, whoever asks."""
    chance = random.Random(key)
    return {
        "x": np.arange(chance.randrange(1500), dtype=np.int64) + chance.randrange(1 << 40),
        "y": np.full(chance.randrange(200), chance.random(), np.float32),
    }


async def serve(role: str, segments: str, storage_path: str, controller_path: str) -> None:
    path = storage_path if role == "storage" else controller_path
    async with Runtime(role, listen=UnixAddress(path)) as runtime:
        if role == "storage":
            runtime.spawn(role, StorageActor(SegmentSource(segments).fetch(QUEUE)))
        else:
            storage = await runtime.connect(StorageActor, "storage", UnixAddress(storage_path), timeout_s=60)
            runtime.spawn(role, QueueController(storage, restart_wait_s=STORAGE_WAIT_S))
        print("ready", flush=True)
        await asyncio.Event().wait()


class Crowd:
    def __init__(self, log: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.is_over = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        sys.stdin.read()
        self.is_over = True

    def say(self, what: str, *keys: str) -> None:
        os.write(self._log, "".join(f"{what} {key}\n" for key in keys).encode())

    async def write(self, queue: TransferQueue, name: str) -> None:
        number, prefix = 0, f"{name}-{uuid.uuid4().hex[:6]}"
        while not self.is_over:
            keys = [f"{prefix}-{number + i}" for i in range(1 + number % 3)]
            number += len(keys)
            await queue.kv_batch_put(keys, "train", [{"x": row_of(key)["x"]} for key in keys], [{"k": k} for k in keys])
            await queue.kv_batch_put(keys, "train", [{"y": row_of(key)["y"]} for key in keys])
            self.say("put", *keys)
        queue.close()

    async def read(self, queue: TransferQueue) -> None:
        number = 0
        while True:
            try:
                meta = await queue.get_meta(["x", "y"], 1 + number % 4, "train", task_name=TASK, timeout_s=0.5)
            except NotReady:
                if self.is_over and number % 4 == 0:
                    return
                number = 0  # at the end single rows may be left
                continue
            number += 1
            self.say("drawn", *meta.keys)
            if number % 2:
                packed = await queue.kv_batch_get_by_meta(meta, layout="jagged")
                rows = [{name: column[i] for name, column in packed.items()} for i in range(len(meta))]
            else:
                rows = await queue.kv_batch_get_by_meta(meta)
            for key, tag, row in zip(meta.keys, meta.tags, rows, strict=True):
                want = row_of(key)
                if tag != {"k": key} or any(not np.array_equal(row[name], want[name]) for name in want):
                    self.say("wrong", f"{key} is torn")
            self.say("clear", *meta.keys)
            await queue.kv_clear(meta.keys, "train")
            del rows, row


async def work(
    action: str, segments: str, storage_path: str, controller_path: str, log: str, name: str, num: int
) -> None:
    crowd = Crowd(log)
    async with Runtime(name) as runtime:
        storage = await runtime.connect(StorageActor, "storage", UnixAddress(storage_path), timeout_s=60)
        controller = await runtime.connect(QueueController, "controller", UnixAddress(controller_path), timeout_s=60)
        source = SegmentSource(segments)
        queues = [
            await TransferQueue.connect(
                runtime, controller, storage, source, client=f"{name}.{i}", restart_wait_s=RESTART_WAIT_S
            )
            for i in range(num)
        ]
        print("ready", flush=True)
        try:
            async with asyncio.TaskGroup() as group:
                for i, queue in enumerate(queues):
                    group.create_task(crowd.read(queue) if action == "read" else crowd.write(queue, f"{name}.{i}"))
        except BaseExceptionGroup as errors:
            for error in errors.exceptions:
                crowd.say("wrong", repr(error).replace("\n", " "))
            raise


def main() -> None:
    action, *rest = sys.argv[1:]
    if action in ("storage", "controller"):
        run(serve(action, *rest))
    else:
        *paths, num = rest
        run(work(action, *paths, num=int(num)))


if __name__ == "__main__":
    main()
