"""A node of the fault tests, as a process: `weights_node.py NAME FD SOCKET HOST`. It owns nothing but its server.

The segment is the test's (as the node agent keeps it), so the slots outlive this process. SIGTERM ends it in order.
"""

import asyncio
import signal
import sys

from psrl._core import LinkEndpoint, Segment
from psrl.actor import Runtime, UnixAddress
from psrl.actor.bulk import Bulk
from psrl.weights.manifest import Manifest
from psrl.weights.server import ParameterServer

TOKEN = b"a token for tests alone"
SIZE = 24 << 20
MANIFEST = Manifest.of([("a", "bfloat16", (SIZE // 4,)), ("b", "float32", (SIZE // 8,))])


async def main(name: str, fd: str, socket: str, host: str) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    bulk = Bulk(LinkEndpoint("tcp", name=name, host=host, token=TOKEN))
    async with Runtime(name, listen=UnixAddress(socket)) as runtime:
        server = ParameterServer(name, Segment.attach(int(fd)), MANIFEST, bulk)
        runtime.spawn("weights", server)
        print("ready", flush=True)
        await ended.wait()
    await bulk.close(timeout_s=2)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
