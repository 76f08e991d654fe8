"""Processes of a run that talk TCP, as on different hosts. What they share on this one machine is the node's segments.

python across_nodes.py head SEGMENTS LOG_DIR      queue and PSManager; says the port
python across_nodes.py worker PORT SEGMENTS NAME  runs groups until the data ends
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from psrl.actor import Runtime, TcpAddress, Token, run
from psrl.control import ControlSettings, PSManager, TrajectoryLog
from psrl.control.memory import MemoryEffects, MemoryFeed
from psrl.control.messages import Complete, GetStatus, GroupOffer, NextGroup, NoGroup, Reserve, Reserved
from psrl.transfer import QueueController, StorageActor, TransferQueue
from psrl.transfer.segments import QUEUE, SegmentSource
from psrl.types import FinishReason, TrajectoryId, VersionSpan

HOST = "127.0.0.1"
SETTINGS = ControlSettings(total_steps=4, batch_size=2, rollout_n=2, staleness=1)


async def connect(runtime: Runtime, port: int, segments: str) -> tuple[PSManager, TransferQueue]:
    """PSManager, and this process's client of the queue, both by way of the head's TCP port."""
    head = TcpAddress(HOST, port)
    controller = await runtime.connect(QueueController, "controller", head, timeout_s=30)
    storage = await runtime.connect(StorageActor, "storage", head, timeout_s=30)
    manager = await runtime.connect(PSManager, "manager", head, timeout_s=30)
    source = SegmentSource(segments)
    return manager, await TransferQueue.connect(runtime, controller, storage, source, client=runtime.name)


async def be_head(segments: str, log_directory: str) -> None:
    async with Runtime("head", listen=TcpAddress(HOST, 0), token=Token.from_environment()) as runtime:
        storage = runtime.spawn("storage", StorageActor(SegmentSource(segments).fetch(QUEUE)))
        runtime.spawn("controller", QueueController(storage))
        log = TrajectoryLog(Path(log_directory))
        runtime.spawn("manager", PSManager(SETTINGS, MemoryFeed(), MemoryEffects(), log))
        assert isinstance(runtime.address, TcpAddress)
        print(runtime.address.port, flush=True)
        await asyncio.Event().wait()


async def be_worker(port: int, segments: str, name: str) -> None:
    async with Runtime(name, token=Token.from_environment()) as runtime:
        manager, queue = await connect(runtime, port, segments)
        print("ready", flush=True)
        while True:
            offer = await manager.next_group(NextGroup(name, wait_s=5.0))
            if isinstance(offer, GroupOffer):
                await run_group(manager, queue, offer, name)
            elif isinstance(offer, NoGroup) and offer.end:
                return


async def run_group(manager: PSManager, queue: TransferQueue, offer: GroupOffer, worker: str) -> None:
    for index in range(offer.num_trajectories):
        trajectory = TrajectoryId(offer.prompt.group, index, offer.offer, offer.purpose)
        version = (await manager.get_status(GetStatus())).version
        reserved = await manager.reserve(Reserve(offer.epoch, trajectory, version, "r0"))
        assert isinstance(reserved, Reserved), reserved
        await queue.kv_put(f"{offer.prompt.group}_{index}", "train", {"tokens": np.arange(100 + index)})
        await manager.complete(
            Complete(
                epoch=offer.epoch,
                trajectory=trajectory,
                worker=worker,
                spans=(VersionSpan(version, 2, "r0"),),
                num_prompt_tokens=1,
                num_response_tokens=2,
                finish_reason=FinishReason.STOP,
                started_s=0.0,
                ended_s=1.0,
                num_dispatches=1,
                raw_score=1.0,
                shaped_reward=1.0,
            )
        )


def main() -> None:
    match sys.argv[1:]:
        case ["head", segments, log_directory]:
            run(be_head(segments, log_directory))
        case ["worker", port, segments, name]:
            run(be_worker(int(port), segments, name))


if __name__ == "__main__":
    main()
