"""Runs transfers: brings a version from the nodes that have it to all others.

    broadcaster = Broadcaster({"node-1": server_ref, ...})
    report = await broadcaster.broadcast(["node-1"], epoch, version, timeout_s=60)

One transfer: all nodes prepare; each gets a window from its successors' servers and is told to send to them; from then
on units flow from link to link without us. We look at the progress, pass by relays that are slow or dead, connect anew
what broke, have nodes commit that are whole, and end it. Who fails or is lost leaves the transfer and is named in the
report; `catch_up` brings it the newest version later. The old version stays whole and newest wherever this one is not
committed.

A source of its own for each part: when several nodes hold parts of a version (their ranks have put them, their servers
have been told by Offer), every node gets all parts along chains of its own, and all commit or none.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from psrl.actor import within
from psrl.clock import now
from psrl.errors import ActorError, CallTimeout, StorageError
from psrl.types import Epoch, Version
from psrl.weights.delta import LinkRates, faster
from psrl.weights.messages import (
    CommitTransfer,
    Done,
    EndTransfer,
    GetProgress,
    GetServerState,
    Held,
    MakePatch,
    OpenWindow,
    Prepare,
    Prepared,
    Progress,
    Refused,
    SendTo,
    ServerState,
    Share,
    StopSending,
)
from psrl.weights.pace import Pace, PaceRule
from psrl.weights.server import ParameterServer
from psrl.weights.topology import Kind, NodeName, Range, Route, missing, plan_routes
from psrl.weights.units import pack_ranges

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S = 0.1
_END_S = 2.0
_RELINKS = 2  # times that a broken hop between living nodes is connected anew

# Until they were measured: one core of a machine of today.
_ENCODE_RATE, _APPLY_RATE, _COPY_RATE, _PATCH_SHARE = 1.5e9, 2e9, 4e9, 0.05


class BroadcastSettings(msgspec.Struct, frozen=True):
    """`mode`: auto sends a patch where it is quicker. `unit_bytes` must divide 4 MiB; smaller ones fill a long chain
    sooner. `call_timeout_s`: a server that does not answer for so long counts as lost."""

    kind: Kind = "chain"
    mode: Literal["auto", "full", "delta"] = "auto"
    unit_bytes: int = 512 << 10
    call_timeout_s: float = 5.0
    idle_s: float = 30.0
    pace: PaceRule = PaceRule()


class Report(msgspec.Struct, frozen=True):
    """Who has the version now, who was lost on the way and why, and which relays were passed by."""

    epoch: Epoch
    version: Version
    have: tuple[NodeName, ...]
    lost: dict[NodeName, str]
    passed_by: tuple[NodeName, ...]
    seconds: float  # from the question to the last commit
    num_bytes: dict[str, int]  # over each link, by mode

    def require_all(self) -> None:
        """Raises StorageError that names who has it not."""
        if self.lost:
            reasons = "; ".join(f"{node}: {reason}" for node, reason in self.lost.items())
            raise StorageError(f"weights: version {self.version} did not get to {len(self.lost)} nodes: {reasons}")


class Broadcaster:
    """Knows each node's ParameterServer. One broadcast at a time; catching up may go on beside it."""

    def __init__(
        self, servers: Mapping[NodeName, ParameterServer], settings: BroadcastSettings = BroadcastSettings()
    ) -> None:
        """`servers` are refs."""
        self.settings = settings
        self._servers = {node: within(ref, settings.call_timeout_s) for node, ref in servers.items()}
        self._patient = dict(servers)
        self._link_rate = 0.0
        self._patch_share = _PATCH_SHARE

    def replace(self, node: NodeName, server: ParameterServer) -> None:
        """A node that is new, or whose server was started again."""
        self._servers[node], self._patient[node] = within(server, self.settings.call_timeout_s), server

    async def states(self) -> tuple[dict[NodeName, ServerState], dict[NodeName, str]]:
        """What each node has; and those that do not answer."""
        found = await asyncio.gather(
            *(_asked(ref.get_server_state(GetServerState())) for ref in self._servers.values())
        )
        states = {node: state for node, state in zip(self._servers, found) if isinstance(state, ServerState)}
        lost = {node: state.reason for node, state in zip(self._servers, found) if isinstance(state, Refused)}
        return states, lost

    async def broadcast(
        self, source: NodeName, epoch: Epoch, version: Version, timeout_s: float, only: Iterable[NodeName] = ()
    ) -> Report:
        """Bring the version that `source` has committed to all nodes (or `only` some).

        Raises StorageError if the source has it not.
        """
        started = now()
        states, lost = await self.states()
        held = states[source].newest if source in states else None
        if held is None or (held.epoch, held.version) != (epoch, version):
            reason = lost.get(source, f"it has {_named(held)}")
            raise StorageError(f"weights: {source} cannot give version {version} of epoch {epoch}: {reason}")
        wanted = set(only) or set(self._servers)
        lost = {node: reason for node, reason in lost.items() if node in wanted}
        current = {node for node, state in states.items() if state.newest and state.newest.content == held.content}
        lacking = [node for node in states if node in wanted and node not in current]
        patched, patch_bytes = await self._who_is_patched(states[source], source, lacking, states)
        plain = [node for node in lacking if node not in patched]
        prepare = self._prepare(epoch, version, held)
        transfers = []
        if plain:
            transfers.append(_Transfer(self, prepare, [source], plain, states))
        if patched:
            base = states[source].base
            assert base is not None
            delta = msgspec.structs.replace(
                prepare, transfer=_number(), mode="delta", patch_bytes=patch_bytes, base=base.content
            )
            transfers.append(_Transfer(self, delta, [source], patched, states))
        for transfer in await asyncio.gather(*(transfer.run(timeout_s - (now() - started)) for transfer in transfers)):
            lost |= transfer.lost
        if again := [node for node in patched if node in lost]:  # a patch may fail where all of it does not
            plainly = msgspec.structs.replace(prepare, transfer=_number())
            transfers.append(_Transfer(self, plainly, [source], again, states))
            await transfers[-1].run(timeout_s - (now() - started))
            lost = {node: reason for node, reason in lost.items() if node not in again} | transfers[-1].lost
        self._learn(transfers, states[source].num_bytes)
        return _report(transfers, epoch, version, [*(current & wanted), source], lost, started)

    async def gather_shares(
        self,
        shares: Mapping[NodeName, Sequence[Range]],
        wanted: Sequence[Range],
        like: Prepare,
        accept: Callable[[], Awaitable[None]],
        timeout_s: float,
    ) -> Report:
        """A version whose parts were put by the ranks of several nodes: every node gets the others' parts.

        `wanted` are the bytes that make the version; `like` says epoch, version and manifest. When all nodes have
        sealed the same, `accept` is awaited (PSManager's Publish); then all commit. If it raises, none does.

        Raises StorageError, naming what is missing, if the shares do not make a version.
        """
        started = now()
        gaps = missing(shares, wanted)
        if gaps:
            raise StorageError(
                f"weights: version {like.version} is not whole: {sum(length for _, length in gaps)} bytes from "
                f"{gaps[0][0]} on were put by nobody"
            )
        states, lost = await self.states()
        parts = tuple(Share(node, pack_ranges(ranges)) for node, ranges in shares.items())
        prepare = msgspec.structs.replace(
            like, transfer=_number(), mode="shares", shares=parts, sums=b"", unit_bytes=self.settings.unit_bytes
        )
        others = [node for node in states if node not in shares]
        transfer = _Transfer(self, prepare, list(shares), others, states, accept=accept)
        await transfer.run(timeout_s - (now() - started))
        return _report([transfer], like.epoch, like.version, [], lost | transfer.lost, started)

    async def catch_up(self, node: NodeName, timeout_s: float) -> Report | None:
        """Bring `node` the newest version that any node has. None: it has that already, or there is none."""
        states, lost = await self.states()
        if node not in states:
            raise StorageError(f"weights: {node} cannot catch up: {lost.get(node, 'nobody knows it')}")
        held = {other: state.newest for other, state in states.items() if state.newest}
        if not held:
            return None
        # Not the first: it is the trainer's, who may be pushing.
        source = max(reversed(held), key=lambda other: (held[other].epoch, held[other].version))
        newest, mine = held[source], held.get(node)
        if mine and (mine.epoch, mine.version) == (newest.epoch, newest.version):
            return None
        return await self.broadcast(source, newest.epoch, newest.version, timeout_s, only=[node])

    # -- inside -----------------------------------------------------------------------------------------------------

    def server(self, node: NodeName) -> ParameterServer:
        return self._servers[node]

    def _prepare(self, epoch: Epoch, version: Version, held: Held) -> Prepare:
        return Prepare(
            transfer=_number(),
            mode="full",
            epoch=epoch,
            version=version,
            manifest_hash=held.manifest_hash,
            sums=held.sums,
            unit_bytes=self.settings.unit_bytes,
            idle_s=self.settings.idle_s,
        )

    async def _who_is_patched(
        self, state: ServerState, source: NodeName, lacking: Sequence[NodeName], states: Mapping[NodeName, ServerState]
    ) -> tuple[list[NodeName], int]:
        """Nodes to which a patch is quicker than all of the version, and its size."""
        base, newest, mode = state.base, state.newest, self.settings.mode
        if base is None or newest is None or mode == "full" or (mode == "auto" and not self._link_rate):
            return [], 0
        able = [node for node in lacking if (held := states[node].newest) and held.content == base.content]
        rates = LinkRates(
            self._link_rate or 1.0,
            state.encode_rate or _ENCODE_RATE,
            min((states[node].apply_rate or _APPLY_RATE for node in able), default=_APPLY_RATE),
            _COPY_RATE,
        )
        guess = int(state.num_bytes * self._patch_share)
        if not able or (mode == "auto" and not faster(state.num_bytes, guess, rates)):
            return [], 0
        made = await _asked(self._patient[source].make_patch(MakePatch(newest.version, base.content)))
        if isinstance(made, Refused):
            logger.warning("no patch to version %d, all of it is sent: %s", newest.version, made.reason)
            return [], 0
        self._patch_share = made.num_bytes / state.num_bytes
        if mode == "auto" and not faster(state.num_bytes, made.num_bytes, rates, encoded=True):
            return [], 0
        return able, made.num_bytes

    def _learn(self, transfers: Sequence["_Transfer"], num_bytes: int) -> None:
        """What the link gives, from transfers of all of a version."""
        for transfer in transfers:
            if transfer.prepare.mode == "full" and transfer.whole and transfer.seconds > 0:
                self._link_rate = num_bytes / transfer.seconds


class _Transfer:
    """One transfer from the first message to the last."""

    def __init__(
        self,
        broadcaster: Broadcaster,
        prepare: Prepare,
        sources: Sequence[NodeName],
        destinations: Sequence[NodeName],
        states: Mapping[NodeName, ServerState],
        *,
        accept: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """With `accept` sources too get what they lack, and all commit together once it returned."""
        self.prepare, self.lost, self.passed = prepare, dict[NodeName, str](), list[NodeName]()
        self.whole: list[NodeName] = []  # have committed it
        self.seconds, self.ended_s, self.num_bytes = 0.0, 0.0, 0
        self._settings, self._server = broadcaster.settings, broadcaster.server
        self._sources, self._destinations, self._states, self._accept = sources, destinations, states, accept
        self._parts: tuple[int, ...] = ()
        self._num_units: list[int] = []
        self._routes: list[Route] = []
        self._paces: list[Pace] = []
        self._progress: dict[NodeName, Progress] = {}
        self._heard_s: dict[NodeName, float] = {}
        self._linked_s: dict[tuple[int, NodeName], float] = {}  # when the hop to a node was made or mended
        self._changed = asyncio.Event()
        self._relinks: dict[tuple[int, NodeName], int] = {}
        self._to_mend: dict[tuple[int, NodeName], tuple[NodeName, str, float]] = {}
        self._moving: dict[tuple[int, NodeName], asyncio.Task[None]] = {}  # hops that are being made anew: the last
        self._moves: set[asyncio.Task[None]] = set()  # and all
        self._number = prepare.transfer

    @property
    def _alive(self) -> list[NodeName]:
        nodes = [*self._sources, *(node for node in self._destinations if node not in self._sources)]
        return [node for node in nodes if node not in self.lost]

    @property
    def _receivers(self) -> list[NodeName]:
        return self._alive if self._accept is not None else [node for node in self._alive if node not in self._sources]

    async def run(self, timeout_s: float) -> "_Transfer":
        """Never raises for what happens to nodes: `lost` says it."""
        started = now()
        watchers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._start()
                watchers = [asyncio.ensure_future(self._watch(node)) for node in self._alive]
                while self._receivers and not self._over():
                    await self._step()
                if self._accept is not None:
                    await self._commit_all(self._accept)
        except TimeoutError:
            for node in self._receivers:
                if node not in self.whole:
                    self._lose(node, f"it was not whole after {timeout_s:g} s{self._how_far(node)}")
        finally:
            self.ended_s = now()
            self.seconds = self.ended_s - started
            tasks = [*watchers, *self._moves]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()
        return self

    def _over(self) -> bool:
        done = (
            {node for node, progress in self._progress.items() if progress.sealed}
            if self._accept is not None
            else self.whole
        )
        return all(node in done for node in self._receivers)

    def _how_far(self, node: NodeName) -> str:
        progress = self._progress.get(node)
        if progress is None or not self._num_units:
            return ""
        return f", it has {sum(progress.have)} of {sum(self._num_units)} units"

    # -- beginning --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        nodes = self._alive
        answers = await asyncio.gather(*(_asked(self._server(node).prepare(self.prepare)) for node in nodes))
        for node, answer in zip(nodes, answers):
            if isinstance(answer, Prepared):
                self._parts = answer.parts
                bounds = [*answer.parts, len(answer.have)]
                self._num_units = [end - first for first, end in itertools.pairwise(bounds)]
            else:
                self.lost[node] = answer.reason
        gone = [f"{node}: {self.lost[node]}" for node in self._sources if node in self.lost]
        if gone:
            self._fail(f"the source is lost: {'; '.join(gone)}")
            return
        self._routes = list(plan_routes(self._settings.kind, self._sources, self._receivers))
        self._paces = [Pace(self._settings.pace, self.prepare.unit_bytes, now()) for _ in self._routes]
        await asyncio.gather(
            *(
                self._link(part, parent, child)
                for part, route in enumerate(self._routes)
                for child, parent in route.parents
            )
        )

    async def _link(self, part: int, parent: NodeName, child: NodeName) -> None:
        """From now on `parent` hands the part on to `child`."""
        window = await _asked(self._server(child).open_window(OpenWindow(self._number, part)))
        if isinstance(window, Refused):
            self._lose(child, window.reason)
            return
        send = SendTo(self._number, part, child, self._states[child].link, window.advert, window.have)
        answer = await _asked(self._server(parent).send_to(send))
        self._linked_s[part, child] = now()
        if isinstance(answer, Refused):
            self._broken(part, parent, child, answer.reason)

    # -- while it runs ----------------------------------------------------------------------------------------------

    async def _watch(self, node: NodeName) -> None:
        """Keep `_progress` of one node fresh."""
        while node not in self.lost:
            answer = await _asked(self._server(node).get_progress(GetProgress(self._number, _TICK_S)))
            if isinstance(answer, Refused):
                self._lose(node, answer.reason)
            else:
                self._progress[node], self._heard_s[node] = answer, now()
                if answer.problem:
                    self._lose(node, answer.problem)
            self._changed.set()
            if isinstance(answer, Progress) and answer.sealed and not self._must_hand_on(node):
                await asyncio.sleep(_TICK_S)

    def _must_hand_on(self, node: NodeName) -> bool:
        return any(route.children(node) for route in self._routes)

    async def _step(self) -> None:
        """Wait for news, then do what they call for."""
        try:
            async with asyncio.timeout(_TICK_S):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
        self._leave_lost()
        if self._accept is None:
            await self._commit([node for node in self._receivers if node not in self.whole and self._sealed(node)])
        for node, progress in list(self._progress.items()):
            for name, why in progress.lost.items():
                part, child = int(name.split(":", 1)[0]), name.split(":", 1)[1]
                if node in self.lost or self._routes[part].parent(child) != node or (part, child) in self._moving:
                    continue
                if self._heard_s[node] > self._linked_s.get((part, child), 0.0):
                    self._broken(part, node, child, why)
        self._mend()
        self._look_for_slow()

    def _sealed(self, node: NodeName) -> bool:
        return node in self._progress and self._progress[node].sealed

    def _lose(self, node: NodeName, reason: str) -> None:
        if self.lost.setdefault(node, reason) is reason:
            logger.warning("transfer of version %d: %s is lost: %s", self.prepare.version, node, reason)
        self._changed.set()

    def _fail(self, reason: str) -> None:
        for node in self._alive:
            if node not in self.whole:
                self._lose(node, reason)

    def _leave_lost(self) -> None:
        """Routes without nodes that are lost. Without its source a part goes on from a node that has all of it."""
        for part, route in enumerate(self._routes):
            for node in route.nodes:
                if node not in self.lost:
                    continue
                if node == route.source:
                    route = self._new_source(part, route)
                else:
                    route = route.pass_by(node, dead=True)
            self._reroute(part, route)

    def _new_source(self, part: int, route: Route) -> Route:
        whole = [n for n in route.nodes if n not in self.lost and self._has(n, part) == self._num_units[part]]
        if not whole:
            self._fail(f"the source is lost: {route.source}: {self.lost[route.source]}")
            return Route(route.source, ())
        rest = [node for node in route.nodes if node not in self.lost and node not in whole]
        return Route.of(self._settings.kind, [whole[0], *whole[1:], *rest])

    def _has(self, node: NodeName, part: int) -> int:
        progress = self._progress.get(node)
        return progress.have[part] if progress else 0

    def _reroute(self, part: int, route: Route) -> None:
        """Take `route` for the part, and begin what that changes."""
        old, self._routes[part] = self._routes[part], route
        for child, parent in route.parents:
            if old.parent(child) != parent:
                self._begin_hop(part, child, old.parent(child))

    def _begin_hop(self, part: int, child: NodeName, old: NodeName | None = None) -> None:
        """Bring the part to `child` from who is its parent now, and no more from `old`. Nobody waits for it: a node
        that stands still would hold up all others."""
        before = self._moving.get((part, child))
        move = self._moving[part, child] = asyncio.ensure_future(self._move(part, child, old, before))

        def moved(task: asyncio.Task[None]) -> None:
            self._moves.discard(task)
            if self._moving.get((part, child)) is task:
                del self._moving[part, child]
            self._changed.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                self._lose(child, f"it cannot be moved: {error!r}")

        self._moves.add(move)
        move.add_done_callback(moved)

    async def _move(
        self, part: int, child: NodeName, old: NodeName | None, before: "asyncio.Task[None] | None"
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        if old is not None and old not in self.lost:
            # If it stands still it need not hear of it: the window that it puts into is closed by the next.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await _asked(self._server(old).stop_sending(StopSending(self._number, part, child)))
        parent = self._routes[part].parent(child)
        if parent is not None and child not in self.lost and self._has(child, part) < self._num_units[part]:
            await self._link(part, parent, child)

    def _broken(self, part: int, parent: NodeName, child: NodeName, why: str) -> None:
        """A hop between two nodes that both may live: try anew a few times, then the successor is lost."""
        self._to_mend.setdefault((part, child), (parent, why, now()))

    def _mend(self) -> None:
        broken, self._to_mend = self._to_mend, {}
        for (part, child), (parent, why, noticed_s) in broken.items():
            if child in self.lost or self._has(child, part) == self._num_units[part]:
                continue
            if parent in self.lost or self._routes[part].parent(child) != parent:
                continue
            if min(self._heard_s.get(node, 0.0) for node in (parent, child)) <= noticed_s:
                self._to_mend[part, child] = (parent, why, noticed_s)  # first see whether both live
                continue
            self._relinks[part, child] = self._relinks.get((part, child), 0) + 1
            if self._relinks[part, child] > _RELINKS:
                self._lose(child, f"{parent} cannot reach it: {why}")
            else:
                self._begin_hop(part, child)

    def _look_for_slow(self) -> None:
        for part, route in enumerate(self._routes):
            have = {node: self._has(node, part) for node in route.nodes}
            have[route.source] = self._num_units[part]
            slow = self._paces[part].look(now(), route, have, self._num_units[part])
            if slow is not None:
                logger.warning("transfer of version %d: %s is slow, it is passed by", self.prepare.version, slow)
                self.passed.append(slow)
                self._reroute(part, route.pass_by(slow, dead=False))

    # -- the end ----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Tell all, also those that are lost; who does not answer gives up by itself."""
        nodes = dict.fromkeys([*self._sources, *self._destinations])
        endings = [
            asyncio.ensure_future(_asked(self._server(node).end_transfer(EndTransfer(self._number)))) for node in nodes
        ]
        _, late = await asyncio.wait(endings, timeout=_END_S)
        for ending in late:
            ending.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _commit(self, nodes: Sequence[NodeName]) -> None:
        answers = await asyncio.gather(
            *(_asked(self._server(node).commit_transfer(CommitTransfer(self._number))) for node in nodes)
        )
        for node, answer in zip(nodes, answers):
            if isinstance(answer, Done):
                self.whole.append(node)
                self.num_bytes = max(self.num_bytes, self._progress[node].num_bytes)
            else:
                self._lose(node, answer.reason)

    async def _commit_all(self, accept: Callable[[], Awaitable[None]]) -> None:
        """All nodes have sealed: the same, and none of the sources is lost; else none commits."""
        missing_sources = [node for node in self._sources if node in self.lost]
        sums = {self._progress[node].sums for node in self._receivers}
        if missing_sources or not self._receivers:
            self._fail(f"{', '.join(missing_sources)} was lost before all had sealed")
        elif len(sums) > 1:
            self._fail("the nodes sealed different versions")
        else:
            await accept()
            await self._commit(self._receivers)


async def _asked(call: Awaitable[T]) -> "T | Refused":
    """The answer, or why there is none."""
    try:
        return await call
    except CallTimeout as error:
        return Refused(f"no answer in time: {error}")
    except ActorError as error:
        return Refused(str(error))


def _number() -> int:
    return secrets.randbits(63)


def _named(held: Held | None) -> str:
    return "none" if held is None else f"version {held.version} of epoch {held.epoch}"


def _report(
    transfers: Sequence[_Transfer],
    epoch: Epoch,
    version: Version,
    have: Iterable[NodeName],
    lost: dict[NodeName, str],
    started_s: float,
) -> Report:
    whole = dict.fromkeys([*have, *(node for transfer in transfers for node in transfer.whole)])
    return Report(
        epoch,
        version,
        tuple(whole),
        {node: reason for node, reason in lost.items() if node not in whole},
        tuple(node for transfer in transfers for node in transfer.passed),
        max((transfer.ended_s for transfer in transfers), default=started_s) - started_s,
        {transfer.prepare.mode: transfer.num_bytes for transfer in transfers},
    )
