"""Servers of several nodes in one process, each with a segment and a link of its own: versions get everywhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from psrl._core import WEIGHT_CHUNK_BYTES, LinkEndpoint, Segment, WeightStore
from psrl.actor import Runtime
from psrl.actor.bulk import Bulk
from psrl.errors import StorageError
from psrl.weights.broadcast import Broadcaster, BroadcastSettings
from psrl.weights.manifest import Manifest
from psrl.weights.messages import (
    CommitTransfer,
    Done,
    EndTransfer,
    GetProgress,
    GetServerState,
    Offer,
    OpenWindow,
    Prepare,
    Prepared,
    Progress,
    Refused,
    ReleasePuller,
    Window,
)
from psrl.weights.server import ParameterServer
from psrl.weights.units import pack_ranges

MANIFEST = Manifest.of(
    [("a", "bfloat16", (1024, 2048)), ("b", "float32", (777,)), ("c", "bfloat16", (700, 1024)), ("n", "int64", ())]
)
TOKEN = b"a token for tests alone"


def version_bytes(version: int, changed: float = 0.02) -> np.ndarray:
    """Bytes of a version: few values differ from the version before; nothing between tensors."""
    flat = np.zeros(MANIFEST.total_bytes, dtype=np.uint8)
    for spec in MANIFEST.tensors:
        words = np.random.default_rng(0).integers(0, 2**14, spec.nbytes // 2, dtype=np.uint16)
        for step in range(version):
            places = np.random.default_rng(step + 1).random(len(words)) < changed
            words[places] += 1
        flat[spec.offset : spec.offset + spec.nbytes] = words.view(np.uint8)
    return flat


class Node:
    """One node: its store as the local processes see it, and its server."""

    def __init__(self, name: str, segment: Segment, bulk: Bulk, runtime: Runtime) -> None:
        self.name, self.segment, self.bulk, self.runtime = name, segment, bulk, runtime
        self.store = WeightStore.open(segment)
        self.lives = 0
        self.start()

    def start(self) -> ParameterServer:
        self.lives += 1
        self.ref = self.runtime.spawn(
            f"{self.name} {self.lives}", ParameterServer(self.name, self.segment, MANIFEST, self.bulk)
        )
        return self.ref

    def publish(self, version: int, epoch: int = 0) -> None:
        """As a trainer of this node does."""
        ticket = self.store.begin(epoch, version, MANIFEST.digest)
        self.store.put(ticket, 0, version_bytes(version))
        self.store.seal(ticket, MANIFEST.total_bytes)
        self.store.commit(epoch, version, ticket.slot)

    def require(self, version: int, epoch: int = 0) -> None:
        """The newest version is this, whole."""
        lease = self.store.acquire("test", 0)
        assert lease is not None, self.name
        assert (lease.epoch, lease.version) == (epoch, version), self.name
        self.store.verify(lease)
        assert np.array_equal(self.store.view(lease), version_bytes(version)), self.name
        self.store.release(lease)

    def require_idle(self) -> None:
        assert all(slot.state in ("free", "committed") for slot in self.store.slots()), self.name


@asynccontextmanager
async def cluster(num: int, **settings: object) -> AsyncIterator[tuple[Broadcaster, list[Node]]]:
    async with Runtime("test") as runtime:
        bulks, nodes = [], []
        for i in range(num):
            segment = Segment.create(f"weights {i}", WeightStore.required_bytes(MANIFEST.total_bytes))
            WeightStore.format(segment, MANIFEST.total_bytes)
            bulks.append(Bulk(LinkEndpoint("tcp", name=f"n{i}", token=TOKEN)))
            nodes.append(Node(f"n{i}", segment, bulks[-1], runtime))
        try:
            yield Broadcaster({node.name: node.ref for node in nodes}, BroadcastSettings(**settings)), nodes
        finally:
            await runtime.close()
            await asyncio.gather(*(bulk.close(timeout_s=5) for bulk in bulks))


@pytest.mark.parametrize("kind", ["chain", "tree", "star"])
@pytest.mark.parametrize("mode", ["full", "delta"])
async def test_versions_get_everywhere(kind: str, mode: str) -> None:
    async with cluster(5, kind=kind, mode=mode) as (broadcaster, nodes):
        for version in range(5):
            nodes[0].publish(version)
            report = await broadcaster.broadcast("n0", 0, version, timeout_s=30)
            report.require_all()
            assert sorted(report.have) == [node.name for node in nodes]
            assert list(report.num_bytes) == ["full" if version == 0 else mode]
            if version and mode == "delta":
                assert report.num_bytes["delta"] < 0.1 * MANIFEST.total_bytes
            for node in nodes:
                node.require(version)
                node.require_idle()


async def test_patches_are_chosen_once_the_link_is_known() -> None:
    async with cluster(3, mode="auto") as (broadcaster, nodes):
        modes = []
        for version in range(3):
            nodes[0].publish(version)
            report = await broadcaster.broadcast("n0", 0, version, timeout_s=30)
            modes.append(list(report.num_bytes))
            broadcaster._link_rate = 1e7  # as if it had been measured on a slow link
        assert modes == [["full"], ["delta"], ["delta"]]
        for node in nodes:
            node.require(2)


async def test_who_has_not_the_base_gets_all_of_it() -> None:
    async with cluster(4, mode="delta") as (broadcaster, nodes):
        nodes[0].publish(0)
        await broadcaster.broadcast("n0", 0, 0, timeout_s=30, only=["n1", "n2"])
        nodes[0].publish(1)
        report = await broadcaster.broadcast("n0", 0, 1, timeout_s=30)
        assert sorted(report.num_bytes) == ["delta", "full"]
        for node in nodes:
            node.require(1)
            node.require_idle()


async def test_a_late_node_gets_the_newest_from_any() -> None:
    async with cluster(3) as (broadcaster, nodes):
        assert await broadcaster.catch_up("n2", timeout_s=10) is None
        for version in range(4):
            nodes[0].publish(version)
        await broadcaster.broadcast("n0", 0, 3, timeout_s=30, only=["n1"])
        assert nodes[2].store.newest() is None
        report = await broadcaster.catch_up("n2", timeout_s=30)
        assert "n2" in report.have
        nodes[2].require(3)
        assert await broadcaster.catch_up("n2", timeout_s=10) is None
        nodes[0].publish(2, epoch=1)  # training went on from a checkpoint
        await broadcaster.broadcast("n0", 1, 2, timeout_s=30)
        for node in nodes:
            node.require(2, epoch=1)


async def test_a_server_that_starts_again_frees_what_was_begun() -> None:
    async with cluster(2) as (broadcaster, nodes):
        nodes[0].publish(0)
        await broadcaster.broadcast("n0", 0, 0, timeout_s=30)
        nodes[1].store.begin(0, 5, MANIFEST.digest, gap=True)  # by the server that died
        broadcaster.replace("n1", nodes[1].start())
        nodes[0].publish(1)
        (await broadcaster.broadcast("n0", 0, 1, timeout_s=30)).require_all()
        nodes[1].require(1)


async def test_parts_of_several_nodes_make_one_version_everywhere() -> None:
    """Two nodes' ranks have put every other tensor; each also gets the other's, a third gets both."""
    async with cluster(3, unit_bytes=100_000) as (broadcaster, nodes):
        accepted: list[list[int]] = []
        for version in range(2):
            flat = version_bytes(version)
            shares = {"n0": MANIFEST.tensors[::2], "n1": MANIFEST.tensors[1::2]}
            for node, specs in zip(nodes, shares.values()):
                ticket = node.store.begin(0, version, MANIFEST.digest)
                for spec in specs:
                    node.store.put(ticket, spec.offset, flat[spec.offset : spec.offset + spec.nbytes])
                ranges = [(spec.offset, spec.nbytes) for spec in specs]
                await node.ref.offer(Offer(0, version, ticket.slot, ticket.generation, pack_ranges(ranges)))
            like = Prepare(0, "shares", 0, version, MANIFEST.digest, b"", 1, 10.0)
            wanted = [(spec.offset, spec.nbytes) for spec in MANIFEST.tensors]
            found = {node: [(spec.offset, spec.nbytes) for spec in specs] for node, specs in shares.items()}

            async def accept() -> None:  # as PSManager does: when all have sealed, before any commits
                sealed = [slot.version for node in nodes for slot in node.store.slots() if slot.state == "sealed"]
                accepted.append(sealed)

            with pytest.raises(StorageError, match="were put by nobody"):
                await broadcaster.gather_shares({"n0": found["n0"]}, wanted, like, accept, timeout_s=10)
            report = await broadcaster.gather_shares(found, wanted, like, accept, timeout_s=30)
            report.require_all()
            assert accepted[version:] == [[version] * 3]
            for node in nodes:
                node.require(version)
                node.require_idle()


async def never() -> None:
    raise AssertionError("nobody may be asked to accept a version that is not whole")


async def test_without_one_part_nobody_commits() -> None:
    async with cluster(3) as (broadcaster, nodes):
        specs = MANIFEST.tensors
        ticket = nodes[0].store.begin(0, 0, MANIFEST.digest)
        ranges = [(spec.offset, spec.nbytes) for spec in specs]
        await nodes[0].ref.offer(Offer(0, 0, ticket.slot, ticket.generation, pack_ranges(ranges[:2])))
        like = Prepare(0, "shares", 0, 0, MANIFEST.digest, b"", 1, 10.0)
        shares = {"n0": ranges[:2], "n1": ranges[2:]}
        report = await broadcaster.gather_shares(shares, ranges, like, never, timeout_s=10)
        assert report.have == ()
        assert "have not offered" in report.lost["n1"]
        assert all(node.store.newest() is None for node in nodes)
        assert nodes[0].store.slots()[ticket.slot].state == "writing"  # the ranks' own
        nodes[2].require_idle()


# -- one server, spoken to by hand ------------------------------------------------------------------------------------


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Node, Node, Prepare]]:
    """A node with version 0, one without, and the message that begins a transfer."""
    async with cluster(2) as (_, nodes):
        nodes[0].publish(0)
        held = (await nodes[0].ref.get_server_state(GetServerState())).newest
        yield nodes[0], nodes[1], Prepare(5, "full", 0, 0, MANIFEST.digest, held.sums, 1 << 20, 10.0)


async def test_all_may_be_said_twice() -> None:
    async with two() as (source, node, prepare):
        first = await node.ref.prepare(prepare)
        assert await node.ref.prepare(prepare) == first
        assert isinstance(first, Prepared)
        assert set(first.have) == {0}
        assert set((await source.ref.prepare(prepare)).have) == {1}
        assert isinstance(await node.ref.open_window(OpenWindow(5, 0)), Window)
        assert isinstance(await node.ref.commit_transfer(CommitTransfer(5)), Refused)  # not whole
        for _ in range(2):
            assert await node.ref.end_transfer(EndTransfer(5)) == Done()
        node.require_idle()
        assert "no transfer 5" in (await node.ref.get_progress(GetProgress(5, 0.0))).reason
        assert await node.ref.release_puller(ReleasePuller("replica-0")) == Done()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"manifest_hash": bytes(16)}, "different models"),
        ({"unit_bytes": 3}, "units of 3"),
        ({"sums": b"1234"}, "sums for"),
        ({"mode": "delta", "patch_bytes": 100, "base": b"x"}, "not the base"),
    ],
)
async def test_what_makes_no_sense_is_refused(change: dict, says: str) -> None:
    async with two() as (_, node, prepare):
        answer = await node.ref.prepare(msgspec.structs.replace(prepare, **change))
        assert isinstance(answer, Refused)
        assert says in answer.reason
        node.require_idle()


async def test_a_newer_version_takes_the_place_of_an_older_one_and_never_the_other_way() -> None:
    async with two() as (_, node, prepare):
        node.store.fence(3)
        assert "is over" in (await node.ref.prepare(prepare)).reason
        newer = msgspec.structs.replace(prepare, transfer=6, epoch=3, version=7)
        older = msgspec.structs.replace(prepare, transfer=7, epoch=3, version=6)
        assert isinstance(await node.ref.prepare(newer), Prepared)
        assert "about to get version 7" in (await node.ref.prepare(older)).reason
        again = msgspec.structs.replace(newer, transfer=8)  # by a broadcaster that started again
        assert isinstance(await node.ref.prepare(again), Prepared)
        assert isinstance(await node.ref.get_progress(GetProgress(6, 0.0)), Refused)
        assert isinstance(await node.ref.get_progress(GetProgress(8, 0.0)), Progress)


async def test_a_transfer_that_nobody_speaks_of_is_given_up() -> None:
    async with two() as (_, node, prepare):
        await node.ref.prepare(msgspec.structs.replace(prepare, idle_s=0.1))
        for _ in range(100):
            with contextlib.suppress(AssertionError):
                node.require_idle()
                break
            await asyncio.sleep(0.1)
        node.require_idle()


async def test_a_version_that_changed_under_its_name_is_refused() -> None:
    async with two() as (source, _, prepare):
        answer = await source.ref.prepare(msgspec.structs.replace(prepare, sums=bytes(len(prepare.sums))))
        assert "another version 0" in answer.reason


@pytest.mark.parametrize("mode", ["full", "delta"])
async def test_damage_at_the_source_reaches_nobody(mode: str) -> None:
    async with cluster(3, mode=mode) as (broadcaster, nodes):
        nodes[0].publish(0)
        await broadcaster.broadcast("n0", 0, 0, timeout_s=30)
        nodes[0].publish(1)
        lease = nodes[0].store.acquire("test", 1)
        at = nodes[0].store.memory_offset(lease.slot) + WEIGHT_CHUNK_BYTES + 5
        nodes[0].segment.view(at, 1, writable=True)[0] ^= 1
        report = await broadcaster.broadcast("n0", 0, 1, timeout_s=30)
        assert sorted(report.lost) == ["n1", "n2"]
        assert "chunk 1 is not what was sealed" in str(report.lost)
        for node in nodes[1:]:
            node.require(0)
            node.require_idle()
