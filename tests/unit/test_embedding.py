"""Queue and weights in somebody else's process: they bring nothing that was not asked for."""

import os
import subprocess
import sys
from pathlib import Path

import psrl

GUEST = """
import asyncio, logging, os, signal, sys, tempfile, threading, warnings
import torch, torch.distributed.tensor

def around():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    loggers = [(name, logging.getLogger(name).handlers, logging.getLogger(name).level)
               for name in ("", "psrl", "psrl.actor", "psrl.transfer", "psrl.weights")]
    threads = {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}
    return handlers, loggers, dict(os.environ), threads, list(warnings.filters), os.getcwd()

before, tasks = around(), os.listdir("/proc/self/task")

import psrl.transfer, psrl.actor.bulk
import psrl.weights.broadcast, psrl.weights.client, psrl.weights.publish, psrl.weights.server
from psrl.actor import Runtime, UnixAddress
from psrl.transfer import NodeSegments, QueueNode, QueuePlan
from psrl.types import Version
from psrl.weights.client import WeightClient
from psrl.weights.publish import describe

assert around() == before
assert os.listdir("/proc/self/task") == tasks  # nor a native thread

async def main():
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks()
    model = torch.nn.Linear(3, 2)
    manifest = describe(model.state_dict().items())
    with tempfile.TemporaryDirectory(prefix="psrl") as folder, NodeSegments(f"{folder}/segments") as segments:
        segments.create_queue(QueuePlan.of(4 << 20))
        weights = WeightClient(segments.create_weights(manifest.total_bytes), manifest, "guest")
        async with Runtime("guest", listen=UnixAddress(f"{folder}/guest")) as runtime:
            queue = await (await QueueNode.host(runtime, segments)).connect("guest")
            await queue.kv_put("a", "train", {"x": torch.arange(3)})
            (row,) = await queue.kv_batch_get(["a"], "train")
            assert row["x"].tolist() == [0, 1, 2]
            await weights.publish(Version(0), model.state_dict().items())
            async with weights.pull(Version(0), 10) as pulled:
                assert torch.equal(pulled.tensors["weight"], model.weight)
    assert asyncio.get_running_loop() is loop
    assert asyncio.all_tasks() == tasks

asyncio.run(main())
assert around() == before
print(sorted(name for name in ("uvloop", "grpc", "hydra", "transformers", "psrl.control", "psrl.launch", "psrl.rollout",
                               "psrl.train") if name in sys.modules))
"""


def test_nothing_of_the_host_program_is_touched() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", GUEST], env=environment, capture_output=True, text=True, timeout=200
    )
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "[]\n")
