"""A node of `psrl-bench weight-sync`: its parameter server and the processes of its replicas. The first is the lead."""

import asyncio
import json
import sys
from typing import Any

from psrl._core import LinkEndpoint, Segment, WeightStore
from psrl.actor import Actor, Runtime, handler
from psrl.actor.bulk import Bulk
from psrl.bench.messages import Check, Checked, LocalPlan, Memcpy, NodeAt, Pull, Pulled, SyncPlan, Took, WeightSetup
from psrl.bench.node import Hear, listening, port_of, say
from psrl.bench.raw import RawServer
from psrl.weights.manifest import Manifest
from psrl.weights.server import ParameterServer

PULL_S = 600.0


class Replicas(Actor):
    """The replicas' processes of a node, which share its segment."""

    def __init__(self, segment: Segment, manifest: Manifest, num: int, device: str) -> None:
        self._segment, self._manifest, self._num, self._device = segment, manifest, num, device
        self._processes: list[asyncio.subprocess.Process] = []

    async def started(self) -> None:
        program = [sys.executable, "-m", "psrl.bench.replica", str(self._segment.fd)]
        pipe = asyncio.subprocess.PIPE
        for i in range(self._num):
            command = [*program, f"replica {i}", self._device]
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    *command, stdin=pipe, stdout=pipe, pass_fds=[self._segment.fd], limit=1 << 20
                )
            )
        await self._ask(self._manifest.encode().hex())

    async def stopped(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()

    @handler(timeout_s=PULL_S)
    async def pull(self, message: Pull) -> Pulled:
        answers = await self._ask(f"pull {message.version}")
        return Pulled([transfer_s for transfer_s, _ in answers], [pause_s for _, pause_s in answers])

    @handler(timeout_s=PULL_S)
    async def check(self, message: Check) -> Checked:
        return Checked(await self._ask("check"))

    @handler
    async def memcpy(self, message: Memcpy) -> Took:
        return Took(await self._ask("memcpy"))

    async def _ask(self, line: str) -> list[Any]:
        """All at once; their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n".encode())
        return [await _answer(process) for process in self._processes]


async def _answer(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a replica's process ended early")
    return json.loads(line)


class Node:
    """What every node has."""

    def __init__(self, setup: WeightSetup, runtime: Runtime) -> None:
        self.setup, self.runtime = setup, runtime
        self.manifest = Manifest.decode(setup.manifest)
        self.segment = Segment.create("weights", WeightStore.required_bytes(self.manifest.total_bytes))
        self.store = WeightStore.format(self.segment, self.manifest.total_bytes)
        self.replicas = Replicas(self.segment, self.manifest, setup.num_replicas, setup.device)
        self.bulk: Bulk | None = None

    def serve(self) -> ParameterServer:
        setup = self.setup
        self.bulk = Bulk(
            LinkEndpoint(setup.transport, name=setup.name, host=setup.host, token=bytes.fromhex(setup.token))
        )
        return self.runtime.spawn("weights", ParameterServer(setup.name, self.segment, self.manifest, self.bulk))


async def be_node(setup: WeightSetup, hear: Hear) -> None:
    raw = RawServer(setup.host)
    async with listening(setup) as runtime:
        node = Node(setup, runtime)
        server = node.serve() if setup.transport != "shm" else None
        replicas = runtime.spawn("replicas", node.replicas)
        try:
            say(NodeAt(setup.name, setup.host, port_of(runtime), raw.port))
            plan = await hear()
            if plan is None:
                return
            from psrl.bench.weight_lead import lead, local  # with torch, for which the others need not wait

            if isinstance(plan, SyncPlan):
                assert server is not None
                say(await lead(node, server, plan))
            else:
                assert isinstance(plan, LocalPlan)
                say(await local(node, replicas, plan))
            await hear()
        finally:
            if node.bulk is not None:
                await node.bulk.close(timeout_s=2)
