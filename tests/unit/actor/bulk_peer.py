"""The other process of test_bulk.py: opens its memory, sends back notices that say so, answers questions on stdin."""

import asyncio
import sys

import numpy as np

from psrl._core import LinkEndpoint
from psrl.actor.bulk import Bulk

TIMEOUT_S = 60.0


async def main(size: int) -> None:
    endpoint = LinkEndpoint("tcp", name="peer", token=b"a token for tests alone")
    memory = np.random.default_rng(7).integers(0, 256, size, np.uint8)
    region = endpoint.add_region(memory)
    put, pull = (endpoint.advertise(region, 0, size, access) for access in ("put", "pull"))
    echoes: set[asyncio.Task[None]] = set()

    def on_notice(peer: int, notice: bytes) -> None:
        if notice == b"echo":
            echo = asyncio.create_task(bulk.notify(peer, notice, timeout_s=TIMEOUT_S))
            echoes.add(echo)
            echo.add_done_callback(echoes.discard)

    bulk = Bulk(endpoint, on_notice)
    print(endpoint.address, put.hex(), pull.hex(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == "sum\n":
            print(int(memory.astype(np.uint64).sum()), flush=True)
        elif line == "withdraw\n":
            endpoint.withdraw(put)
            print("ok", flush=True)
    await bulk.close(timeout_s=1.0)


asyncio.run(main(int(sys.argv[1])))
