"""ParameterServer: the weights of one node, and its part in transfers between nodes.

It stands in the node's storage process over the node's segment. A local push fills a slot and is committed by
PSManager's acceptance, as on one node; on the other nodes it is their server that begins a slot, has it filled by the
link (csrc/weights/relay.h), seals it when every chunk was compared, and commits it when told to. Pulls are local
everywhere (`psrl.weights.subscribe`).

Who says what when is `psrl.weights.broadcast`; all of it may be said twice. A transfer of which nothing is heard for
its `idle_s` is given up. What was begun and not committed when a server dies is freed by the next one.
"""

import asyncio
import logging
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from psrl._core import Segment, WeightLease, WeightRelay, WeightStore, WeightTicket
from psrl.actor import Actor, handler
from psrl.actor.bulk import Bulk
from psrl.clock import now
from psrl.errors import LinkError, PsrlError, StaleMessage, StorageError
from psrl.types import Epoch, Version
from psrl.weights.delta import version_hash
from psrl.weights.manifest import Manifest
from psrl.weights.messages import (
    CommitTransfer,
    Done,
    EndTransfer,
    GetProgress,
    GetServerState,
    Held,
    MakePatch,
    Offer,
    OpenWindow,
    Patch,
    Prepare,
    Prepared,
    Progress,
    Refused,
    ReleasePuller,
    SendTo,
    ServerState,
    StopSending,
    Window,
)
from psrl.weights.patching import PatchApplier, make_patch
from psrl.weights.topology import Range
from psrl.weights.units import Units, unpack_ranges

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 4
PUT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
_REAP_S = 1.0


class ParameterServer(Actor):
    """Versions of `manifest`'s model in a node's `segment`; `bulk` is the process's link."""

    def __init__(
        self, node: str, segment: Segment, manifest: Manifest, bulk: Bulk, *, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self._node, self._manifest, self._bulk, self._max_in_flight = node, manifest, bulk, max_in_flight
        self.store = WeightStore.open(segment)
        if self.store.data_bytes != manifest.total_bytes:
            raise StorageError(
                f"weights: {node}'s versions have {self.store.data_bytes} bytes, the manifest {manifest.total_bytes}"
            )
        self._client = f"server of {node}"
        self._leases: list[WeightLease] = []  # on the newest version and, once there was another, the one before
        self._offers: dict[tuple[int, int], tuple[Offer, list[Range]]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._patch: tuple[bytes, int, npt.NDArray[np.uint8]] | None = None  # base, version, the patch
        self._peers: dict[str, asyncio.Task[int]] = {}
        self._encode_rate = self._apply_rate = 0.0
        self._segment = segment

    async def started(self) -> None:
        self.store.release_client(self._client)
        for index, slot in enumerate(self.store.slots()):
            if slot.received and slot.state in ("writing", "sealed"):
                self.store.abandon(index)
        self._region = self._bulk.endpoint.add_region(self._segment)
        self.spawn(self._reap(), "reap")

    async def stopped(self) -> None:
        for transfer in list(self._transfers.values()):
            transfer.remove = None  # the link is about to close
            await self._end(transfer)
        for connecting in self._peers.values():
            connecting.cancel()
        self.store.release_client(self._client)

    # -- what there is ----------------------------------------------------------------------------------------------

    @handler(idempotent=True)
    async def get_server_state(self, message: GetServerState) -> ServerState:
        self._note_newest()
        held = [self._held(lease) for lease in self._leases if self.store.valid(lease)]
        return ServerState(
            self._node,
            self._bulk.endpoint.address,
            held[-1] if held else None,
            held[-2] if len(held) > 1 else None,
            self.store.data_bytes,
            self._encode_rate,
            self._apply_rate,
        )

    @handler(idempotent=True)
    async def release_puller(self, message: ReleasePuller) -> Done:
        self.store.release_client(message.client)
        return Done()

    @handler(idempotent=True)
    async def offer(self, message: Offer) -> Done:
        """Remembered until the next version is offered."""
        self._offers = {(message.epoch, message.version): (message, unpack_ranges(message.ranges))}
        return Done()

    @handler(idempotent=True, timeout_s=120)
    async def make_patch(self, message: MakePatch) -> Patch | Refused:
        """Encode it once; it is kept until another is made."""
        self._note_newest()
        if self._patch is None or self._patch[:2] != (message.base, message.version):
            held = {self._held(lease).content: lease for lease in self._leases if self.store.valid(lease)}
            base, newest = held.get(message.base), self._leases[-1] if self._leases else None
            if base is None or newest is None or newest.version != message.version or newest is base:
                return Refused(f"{self._node} has not both versions")
            try:
                patch, seconds = await asyncio.to_thread(make_patch, self.store, self._manifest, base, newest)
            except StorageError as error:
                return Refused(str(error))
            self._encode_rate = self.store.data_bytes / max(seconds, 1e-6)
            self._patch = (message.base, message.version, patch)
        return Patch(self._patch[2].nbytes)

    # -- a transfer -------------------------------------------------------------------------------------------------

    @handler(idempotent=True)
    async def prepare(self, message: Prepare) -> Prepared | Refused:
        known = self._transfers.get(message.transfer)
        try:
            transfer = known or await self._open(message)
        except (StorageError, StaleMessage, LinkError) as error:
            return Refused(str(error))
        transfer.heard()
        return Prepared(transfer.relay.have(), transfer.units.parts)

    @handler(idempotent=True)
    async def open_window(self, message: OpenWindow) -> Window | Refused:
        transfer = self._known(message.transfer)
        if transfer is None:
            return self._unknown(message.transfer)
        try:
            advert = await asyncio.to_thread(transfer.relay.open_window, f"part {message.part}")
            return Window(advert, transfer.relay.have())
        except PsrlError as error:
            return Refused(str(error))

    @handler(idempotent=True)
    async def send_to(self, message: SendTo) -> Done | Refused:
        transfer = self._known(message.transfer)
        if transfer is None:
            return self._unknown(message.transfer)
        name = f"{message.part}:{message.node}"
        try:
            if name in {one.name for one in transfer.relay.progress().successors if one.problem}:
                self._peers.pop(message.link, None)  # what was lost is not used again
            first, end = transfer.units.part(message.part)
            peer = await self._connect(message.link)
            transfer.relay.send_to(name, peer, message.advert, first, end, message.has)
        except PsrlError as error:
            self._peers.pop(message.link, None)
            return Refused(str(error))
        return Done()

    @handler(idempotent=True)
    async def stop_sending(self, message: StopSending) -> Done:
        transfer = self._known(message.transfer)
        if transfer is not None:
            transfer.relay.stop_sending(f"{message.part}:{message.node}")
        return Done()

    @handler  # not idempotent: who waits for it learns at once that this node died
    async def get_progress(self, message: GetProgress) -> Progress | Refused:
        transfer = self._known(message.transfer)
        if transfer is None:
            return self._unknown(message.transfer)
        await transfer.wait(message.wait_s)
        return transfer.progress()

    @handler(idempotent=True)
    async def commit_transfer(self, message: CommitTransfer) -> Done | Refused:
        transfer = self._known(message.transfer)
        if transfer is None:
            return self._unknown(message.transfer)
        if transfer.slot is None or not transfer.sealed:
            return Done() if transfer.has_all else Refused(f"{self._node} has not all of it")
        try:
            self.store.commit(transfer.message.epoch, transfer.message.version, transfer.slot, gap=True)
        except (StorageError, StaleMessage) as error:
            return Refused(str(error))
        transfer.committed = True
        self._note_newest()
        return Done()

    @handler(idempotent=True)
    async def end_transfer(self, message: EndTransfer) -> Done:
        transfer = self._transfers.get(message.transfer)
        if transfer is not None:
            await self._end(transfer)
        return Done()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _known(self, number: int) -> "_Transfer | None":
        transfer = self._transfers.get(number)
        if transfer is not None:
            transfer.heard()
        return transfer

    def _unknown(self, number: int) -> Refused:
        return Refused(f"{self._node} knows of no transfer {number:x}: it was given up, or {self._node} started again")

    def _held(self, lease: WeightLease) -> Held:
        sums = np.array(self.store.checksums(lease.slot), dtype="<u4")
        content = self._content(lease.manifest_hash, sums)
        return Held(Epoch(lease.epoch), Version(lease.version), lease.manifest_hash, sums.tobytes(), content)

    def _content(self, manifest_hash: bytes, sums: npt.NDArray[np.uint32]) -> bytes:
        return version_hash(manifest_hash, sums.tolist())

    def _note_newest(self) -> None:
        """Hold the newest version, so that it can be the base of a patch when it is the one before the newest."""
        newest = self.store.newest()
        held = self._leases[-1] if self._leases else None
        if newest is None or (held and (held.epoch, held.version) == (newest.epoch, newest.version)):
            return
        lease = self.store.acquire(self._client, newest.version, newest.epoch)
        if lease is not None:
            for old in self._leases[:-1]:
                self.store.release(old)
            self._leases = [*self._leases[-1:], lease]

    async def _open(self, message: Prepare) -> "_Transfer":
        if message.manifest_hash != self._manifest.digest:
            raise StorageError(
                f"weights: {self._node} has manifest {self._manifest.hash}, not {message.manifest_hash.hex()}: "
                "trainer and engines have different models"
            )
        await self._make_way(message)
        self._note_newest()
        newest = self._leases[-1] if self._leases else None
        here = newest is not None and (newest.epoch, newest.version) == (message.epoch, message.version)
        units = Units.of(message, self.store.data_bytes)
        transfer = _Transfer(self, message, units)
        if here:
            assert newest is not None
            held = self._held(newest)
            if message.sums and held.sums != message.sums:
                raise StorageError(
                    f"weights: {self._node} has another version {message.version} of epoch {message.epoch}"
                )
            transfer.sums, transfer.has_all = held.sums, True
        if message.mode == "delta":
            self._open_patch(transfer, newest)
        else:
            self._open_slot(transfer, newest)
        self._transfers[message.transfer] = transfer
        transfer.start(self._bulk)
        return transfer

    async def _make_way(self, message: Prepare) -> None:
        """A newer version, or the same said by somebody new, takes the place of what is being received."""
        for other in list(self._transfers.values()):
            if other.slot is None or other.committed:
                continue
            theirs, mine = ((m.epoch, m.version) for m in (other.message, message))
            if theirs > mine:
                raise StorageError(f"weights: {self._node} is about to get version {theirs[1]} of epoch {theirs[0]}")
            await self._end(other)

    def _open_slot(self, transfer: "_Transfer", newest: WeightLease | None) -> None:
        """The memory is a slot: the newest version's, one that this node's ranks have begun, or a fresh one."""
        message = transfer.message
        offered = self._offers.get((message.epoch, message.version))
        own = {share.node: part for part, share in enumerate(message.shares)}.get(self._node)
        have = np.zeros(transfer.units.num, dtype=np.uint8)
        lease = None
        if transfer.has_all:
            assert newest is not None
            slot, lease = newest.slot, (self.store, newest)
            have[:] = 1
        elif own is not None:
            if offered is None:
                raise StorageError(f"weights: {self._node}'s ranks have not offered version {message.version}")
            slot = offered[0].slot
            transfer.ticket = WeightTicket(slot, offered[0].generation)
            transfer.slot, transfer.offered = slot, True
            if self.store.slots()[slot].state == "sealed":  # all came in an earlier try
                transfer.ticket, transfer.sealed = None, True
                transfer.sums = np.array(self.store.checksums(slot), dtype="<u4").tobytes()
                have[:] = 1
            else:
                first, end = transfer.units.part(own)
                have[first:end] = 1
        else:
            transfer.ticket = self.store.begin(message.epoch, message.version, message.manifest_hash, gap=True)
            slot = transfer.slot = transfer.ticket.slot
        try:
            transfer.relay = WeightRelay(
                self._bulk.endpoint,
                self._region,
                self.store.memory_offset(slot),
                self.store.data_bytes,
                transfer=message.transfer,
                units=transfer.units.table,
                chunk_bytes=transfer.units.chunk_bytes,
                expected=np.frombuffer(message.sums, dtype="<u4").tolist(),
                have=have.tobytes(),
                max_in_flight=self._max_in_flight,
                put_timeout_s=PUT_TIMEOUT_S,
                lease=lease,
            )
        except BaseException:
            transfer.free_slot()
            raise

    def _open_patch(self, transfer: "_Transfer", newest: WeightLease | None) -> None:
        """The memory is a patch: the one that was made here, or one that comes."""
        message = transfer.message
        if transfer.has_all:
            if self._patch is None or self._patch[:2] != (message.base, message.version):
                raise StorageError(f"weights: {self._node} has no patch to version {message.version}")
            patch, have = self._patch[2], b"\1" * transfer.units.num
        else:
            if newest is None or self._held(newest).content != message.base:
                raise StorageError(f"weights: {self._node} has not the base of the patch to version {message.version}")
            patch, have = np.empty(message.patch_bytes, dtype=np.uint8), b"\0" * transfer.units.num
            transfer.ticket = self.store.begin(message.epoch, message.version, message.manifest_hash, gap=True)
            transfer.slot = transfer.ticket.slot
        try:
            region = self._bulk.endpoint.add_region(patch)
            transfer.relay = WeightRelay(
                self._bulk.endpoint,
                region,
                0,
                patch.nbytes,
                transfer=message.transfer,
                units=transfer.units.table,
                chunk_bytes=0,
                expected=[],
                have=have,
                max_in_flight=self._max_in_flight,
                put_timeout_s=PUT_TIMEOUT_S,
            )
            transfer.remove = lambda: self._bulk.endpoint.remove_region(region)
            if transfer.ticket is not None:
                assert newest is not None
                transfer.applier = PatchApplier(
                    self.store, self._manifest, message, newest, transfer.ticket, patch, transfer.relay
                )
        except BaseException:
            transfer.free_slot()
            raise

    async def _connect(self, link: str) -> int:
        """The peer at this address, connected to once."""
        connecting = self._peers.get(link)
        if connecting is None or (connecting.done() and (connecting.cancelled() or connecting.exception())):
            connecting = self._peers[link] = asyncio.ensure_future(
                self._bulk.connect(link, timeout_s=CONNECT_TIMEOUT_S)
            )
        return await asyncio.shield(connecting)

    async def _end(self, transfer: "_Transfer") -> None:
        self._transfers.pop(transfer.message.transfer, None)
        await transfer.end()

    def applied(self, seconds: float) -> None:
        self._apply_rate = self.store.data_bytes / max(seconds, 1e-6)

    async def _reap(self) -> None:
        """Give up what nobody speaks of any more."""
        while True:
            await asyncio.sleep(_REAP_S)
            for transfer in list(self._transfers.values()):
                if now() - transfer.heard_s > transfer.message.idle_s:
                    logger.warning(
                        "%s: nothing was heard of the transfer of version %d for %g s; it is given up",
                        self._node,
                        transfer.message.version,
                        transfer.message.idle_s,
                    )
                    await self._end(transfer)


class _Transfer:
    """One transfer at this node. Ended once; `slot` is the one that it fills, None where all of it was before."""

    def __init__(self, server: ParameterServer, message: Prepare, units: Units) -> None:
        self.message, self.units = message, units
        self.ticket: WeightTicket | None = None
        self.slot: int | None = None
        self.offered = False  # the slot is that of this node's ranks
        self.applier: PatchApplier | None = None
        self.remove: Callable[[], None] | None = None  # of memory of its own, when the link has let go of it
        self.has_all = self.sealed = self.committed = False
        self.sums = b""
        self.heard_s = now()
        self._server, self._store = server, server.store
        self._problem = ""
        self._changed = asyncio.Event()
        self._complete = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._relay: WeightRelay | None = None
        self._last: Progress | None = None  # when it had ended

    @property
    def relay(self) -> WeightRelay:
        if self._relay is None:
            raise StorageError(f"weights: the transfer of version {self.message.version} was given up")
        return self._relay

    @relay.setter
    def relay(self, relay: WeightRelay) -> None:
        self._relay = relay

    def heard(self) -> None:
        self.heard_s = now()

    def start(self, bulk: Bulk) -> None:
        asyncio.get_running_loop().add_reader(self.relay.fd, self._on_readable)
        if self.ticket is not None:
            self._task = asyncio.ensure_future(self._finish(self.ticket))

    async def wait(self, wait_s: float) -> None:
        """Until something was decided since the last time."""
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def progress(self) -> Progress:
        if self._last is not None:
            return self._last
        found = self.relay.progress()
        have = np.frombuffer(self.relay.have(), dtype=np.uint8)
        return Progress(
            have=tuple(int(have[slice(*self.units.part(part))].sum()) for part in range(len(self.units.parts))),
            sealed=self.sealed or self.has_all,
            sums=self.sums,
            problem=self._problem or found.problem,
            lost={one.name: one.problem for one in found.successors if one.problem},
            num_bytes=found.have_bytes,
        )

    def _on_readable(self) -> None:
        os.eventfd_read(self.relay.fd)
        self._changed.set()
        if self.relay.progress().complete:
            self._complete.set()

    async def _finish(self, ticket: WeightTicket) -> None:
        """When all is here: compare, seal."""
        try:
            if self.applier is not None:
                seconds = await asyncio.to_thread(self.applier.run)
                self._server.applied(seconds)
            else:
                await self._complete.wait()
                expected = self._store.data_bytes
                if self.message.mode == "shares":
                    expected = sum(length for unit in self.units.units for _, length in unit)
                await asyncio.to_thread(self.relay.seal, self._store, ticket, expected)
            self.sums = np.array(self._store.checksums(ticket.slot), dtype="<u4").tobytes()
            self.sealed = True
        except (PsrlError, ValueError) as error:
            self._problem = str(error)
        self._changed.set()

    async def end(self) -> None:
        if self.applier is not None:
            self.applier.stop()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.relay.fd)
        await asyncio.to_thread(self.relay.close)  # nothing is written to the slot from here on
        if self._task is not None:
            if self.applier is None and not self._complete.is_set():
                self._task.cancel()
            await asyncio.wait([self._task])  # a seal or a block at most
        self._changed.set()
        if not self.committed:
            self.free_slot()
        self._last, relay = self.progress(), self.relay
        self._relay = self.applier = self._task = None  # its descriptor and memory go now, whoever still asks
        if self.remove is not None:
            self._server.spawn(_when_still(relay, self.remove), f"end of transfer {self.message.transfer:x}")

    def free_slot(self) -> None:
        """Only what the server itself has begun: an offered slot belongs to its ranks."""
        if self.ticket is None or self.offered:
            return
        if self._store.slots()[self.ticket.slot].generation == self.ticket.generation:  # else a newer epoch's by now
            self._store.abandon(self.ticket.slot)


async def _when_still(relay: WeightRelay, remove: Callable[[], None]) -> None:
    """Until nothing is under way any more: the link's deadlines at most."""
    while relay.progress().in_flight:
        await asyncio.sleep(0.02)
    remove()
