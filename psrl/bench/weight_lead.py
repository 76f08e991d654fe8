"""The lead of `psrl-bench weight-sync`: a trainer that publishes, and the rounds."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import torch

from psrl.actor import TcpAddress
from psrl.bench.messages import Check, Checked, LocalPlan, Memcpy, Mode, Outcome, Pull, SyncPlan
from psrl.bench.raw import RawClient, best_of
from psrl.bench.replica import checksums
from psrl.bench.rounds import Row, gbytes_per_s, in_turn, median_ms, multiple, seconds, share
from psrl.bench.versions import Masters
from psrl.bench.weight_node import Node, Replicas
from psrl.errors import BenchError, StorageError
from psrl.types import Epoch, Version
from psrl.weights.broadcast import Broadcaster, BroadcastSettings
from psrl.weights.publish import WeightPublisher
from psrl.weights.server import ParameterServer
from psrl.weights.stage import manifest_tensors

_EPOCH = Epoch(0)
_SYNC_S = 600.0
_LIMIT = "size/bandwidth"


async def lead(node: Node, own: ParameterServer, plan: SyncPlan) -> Outcome:
    """Syncs to the first of the peers, as many as each part of the run says."""
    torch.set_num_threads(1)
    me, num_bytes = node.setup.name, node.manifest.total_bytes
    trainer = _Trainer(node, plan.lr)
    servers, replicas = {me: own}, {}
    for peer in plan.peers:
        address = TcpAddress(peer.host, peer.port)
        servers[peer.name] = await node.runtime.connect(ParameterServer, "weights", address, timeout_s=30)
        replicas[peer.name] = await node.runtime.connect(Replicas, "replicas", address, timeout_s=30)
    raw = await asyncio.to_thread(RawClient, plan.peers[0].host, plan.peers[0].raw_port, num_bytes)
    rows: list[Row] = []
    for num in plan.receivers:
        names = [peer.name for peer in plan.peers[:num]]
        some = {name: servers[name] for name in (me, *names)}
        ways = [
            _Way(mode, Broadcaster(some, BroadcastSettings(kind=topology, mode=mode)), me, num_bytes)
            for topology in plan.topologies
            for mode in plan.modes
        ]
        readers = [replicas[name] for name in names]
        for turn in range(-1, plan.rounds):
            if turn == 0:  # the first round touches what is new, and brings all nodes to one version
                for way in ways:
                    way.forget()
            raw_s = await asyncio.to_thread(best_of, raw.send)
            for way in in_turn(ways, max(turn, 0)):
                await way.sync(trainer, readers, raw_s)
        await ways[0].require_same()
        for reader in readers:
            trainer.require_run(await reader.check(Check()))
        for way in ways:
            rows += way.rows(num, plan.replicas)
    raw.close()
    assert node.bulk is not None
    return Outcome(rows, node.bulk.endpoint.description)


class _Trainer:
    """Publishes version after version into the node's store."""

    def __init__(self, node: Node, lr: float) -> None:
        self._store, self._lr = node.store, lr
        self._masters = Masters(node.manifest)
        self._publisher = WeightPublisher(node.store, node.manifest)
        self.next = 0

    def step(self) -> None:
        """Outside of what is measured."""
        self._masters.step(self._lr)
        self._tensors = manifest_tensors(self._masters.manifest, self._masters.version())

    async def push(self) -> tuple[Version, float]:
        """What it is, and the seconds until it was committed here."""
        version = Version(self.next)
        self.next += 1

        def write() -> None:
            slot = self._publisher.write(_EPOCH, version, self._tensors.items())
            self._store.commit(_EPOCH, version, slot)

        return version, await asyncio.to_thread(seconds, write)

    def require_run(self, checked: Checked) -> None:
        expected = checksums(self._tensors)
        if any(sums != expected for sums in checked.sums):
            raise BenchError("a replica runs other bytes than were published")


class _Way:
    """One topology and mode to some nodes, and what its rounds gave. Seconds, by round."""

    def __init__(self, mode: Mode, broadcaster: Broadcaster, source: str, num_bytes: int) -> None:
        self._mode, self._broadcaster, self._source, self._num_bytes = mode, broadcaster, source, num_bytes
        self.forget()

    def forget(self) -> None:
        self._times: dict[str, list[float]] = {}
        self._sent: list[int] = []
        self._sent_as: set[str] = set()

    async def sync(self, trainer: "_Trainer", replicas: Sequence[Replicas], raw_s: float) -> None:
        """One version from the trainer's tensors into the parameters of all replicas."""
        await asyncio.to_thread(trainer.step)
        async with asyncio.TaskGroup() as waiting:
            pulls = [waiting.create_task(node.pull(Pull(trainer.next))) for node in replicas]
            await asyncio.sleep(0.05)  # so that they wait
            started = time.perf_counter()
            version, push_s = await trainer.push()
            report = await self._broadcaster.broadcast(self._source, _EPOCH, version, timeout_s=_SYNC_S)
            report.require_all()
        sync_s = time.perf_counter() - started
        answers = [pull.result() for pull in pulls]
        self._sent.append(sum(report.num_bytes.values()))
        self._sent_as |= set(report.num_bytes)
        for name, taken in {
            "raw": raw_s,
            "push": push_s,
            "broadcast": report.seconds,
            "sync": sync_s,
            "pull": max((taken for answer in answers for taken in answer.transfer_s), default=0.0),
            "pause": max((taken for answer in answers for taken in answer.pause_s), default=0.0),
        }.items():
            self._times.setdefault(name, []).append(taken)

    async def require_same(self) -> None:
        """All nodes have the content that the source has."""
        states, lost = await self._broadcaster.states()
        contents = {state.newest.content if state.newest else b"" for state in states.values()}
        if lost or len(contents) != 1:
            raise BenchError(f"nodes have not what was published: {lost or contents}")

    def rows(self, num_receivers: int, num_replicas: int) -> list[Row]:
        """Raises StorageError if versions went otherwise than was asked for."""
        if self._mode != "auto" and self._sent_as != {self._mode}:
            raise StorageError(f"weights: versions went as {', '.join(self._sent_as)}, not as {self._mode}")
        topology = self._broadcaster.settings.kind
        common = {
            "topology": topology,
            "mode": self._mode,
            "receivers": num_receivers,
            "replicas": num_replicas * num_receivers,
            "size_bytes": self._num_bytes,
            "sent_bytes": self._sent[-1],
            "raw_gbit_per_s": round(8 * gbytes_per_s(self._num_bytes, self._times["raw"]), 4),
            "bound_ms": median_ms(self._times["raw"]),
        }
        what = f"{topology}, {self._mode}, to {num_receivers} nodes"
        rows = [self._row(f"broadcast: {what}", "broadcast") | common]
        if num_replicas:
            times = {f"{name}_ms": median_ms(self._times[name]) for name in ("push", "broadcast", "pull", "pause")}
            longest = {"longest_pause_ms": round(1e3 * max(self._times["pause"]), 3)}
            rows.append(self._row(f"sync: {what}, {common['replicas']} replicas", "sync") | common | times | longest)
        return rows

    def _row(self, what: str, name: str) -> Row:
        """Next to a copy of all bytes; `to_sent` next to one of those that travelled."""
        times, raw = self._times[name], self._times["raw"]
        sent = [limit * num / self._num_bytes for limit, num in zip(raw, self._sent)]
        return (
            {"what": what}
            | multiple(times, raw, _LIMIT)
            | {"to_sent": multiple(times, sent, _LIMIT)["ratio"], f"{name}_ms": median_ms(times)}
        )


async def local(node: Node, replicas: Replicas, plan: LocalPlan) -> Outcome:
    """Through shared memory alone: what a push and a pull reach of memcpy."""
    torch.set_num_threads(1)
    trainer, num_bytes = _Trainer(node, plan.lr), node.manifest.total_bytes
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    push: list[float] = []
    push_limit: list[float] = []
    pull: list[float] = []
    pull_limit: list[float] = []
    pause: list[float] = []
    for turn in range(-1, plan.rounds):
        await asyncio.to_thread(trainer.step)
        version, push_s = await trainer.push()
        pulled = await replicas.pull(Pull(version))
        copied = await replicas.memcpy(Memcpy())
        alone = seconds(lambda: np.copyto(target, source))
        if turn < 0:  # first touches
            continue
        push.append(push_s)
        push_limit.append(alone)
        pull.append(max(pulled.transfer_s))
        pull_limit.append(max(copied.seconds))
        pause.append(max(pulled.pause_s))
    trainer.require_run(await replicas.check(Check()))
    num = node.setup.num_replicas
    common = {"size_bytes": num_bytes, "mode": "full"}
    return Outcome(
        [
            {"what": "push: trainer into the slot"}
            | share(push, push_limit, "memcpy")
            | common
            | {"push_ms": median_ms(push), "memcpy_ms": median_ms(push_limit)},
            {"what": f"pull: {num} replicas at once, with checksums"}
            | share(pull, pull_limit, f"memcpy by {num} at once")
            | common
            | {"pull_ms": median_ms(pull), "memcpy_ms": median_ms(pull_limit)},
            {"what": "pause: parameters overwritten"}
            | share(pause, pull_limit, f"memcpy by {num} at once")
            | common
            | {"pause_ms": median_ms(pause), "longest_pause_ms": round(1e3 * max(pause), 3)},
        ],
        "shared memory",
    )
