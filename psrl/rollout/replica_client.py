"""The gateway's end of one replica.

All generations share one stream. When it breaks, every running `generate` raises ActorDied at once, after the deltas
that had arrived; the client then stays broken, and whoever hears of the restarted replica makes a new one. Leaving a
`generate` early (break, cancellation, deadline) aborts its request at the replica. Every call has a deadline. Used
from one event loop.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from psrl.clock import now
from psrl.errors import ActorDied, ActorError, CallTimeout, EngineError
from psrl.rollout import replica_pb2 as pb
from psrl.rollout.replica_link import MAX_MESSAGE_BYTES, actor_error, channel_options
from psrl.rollout.replica_pb2_grpc import ReplicaStub
from psrl.types import Epoch, Version

T = TypeVar("T")

_UPDATE_MARGIN_S = (
    5.0  # the replica keeps the limit itself and says what was slow; this one is for a replica that hangs
)


class ReplicaClient:
    """Connects on first use. `close` is idempotent."""

    def __init__(
        self, address: str, *, call_timeout_s: float = 10.0, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.address = address
        self._call_timeout_s = call_timeout_s
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._stream: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._outbox: asyncio.Queue[pb.ClientFrame] = asyncio.Queue()
        self._inboxes: dict[str, asyncio.Queue[pb.Delta | ActorError]] = {}  # by the id on the wire
        self._wire_ids: dict[str, str] = {}  # of running requests, by the caller's id
        self._numbers = itertools.count()
        self._broken: str | None = None

    async def generate(self, request: pb.GenerateRequest, timeout_s: float = 86_400.0) -> AsyncIterator[pb.Delta]:
        """Deltas up to and including the one with a finish reason. Raises ActorDied, CallTimeout, or EngineError for
        a request that cannot be sent."""
        name = request.request_id
        if self._broken is not None:
            raise ActorDied(self._broken)
        if name in self._wire_ids:
            raise EngineError(f"request {name} is running already")
        # An id of its own for each dispatch: deltas still under way for an abandoned one must not be taken for ours.
        wire_id = f"{name}#{next(self._numbers)}"
        frame = pb.ClientFrame(generate=request)
        frame.generate.request_id = wire_id
        if frame.ByteSize() > self._max_message_bytes:
            raise EngineError(f"request {name} has {frame.ByteSize()} bytes, the limit is {self._max_message_bytes}")
        inbox: asyncio.Queue[pb.Delta | ActorError] = asyncio.Queue()
        self._inboxes[wire_id] = inbox
        self._wire_ids[name] = wire_id
        timer = asyncio.get_running_loop().call_later(
            timeout_s, inbox.put_nowait, CallTimeout(f"{self.address}: {name} did not finish within {timeout_s} s")
        )
        finished = False
        try:
            self._open_stream()
            self._outbox.put_nowait(frame)
            while not finished:
                item = await inbox.get()
                if isinstance(item, ActorError):
                    raise item
                finished = bool(item.finish_reason)
                item.request_id = name
                yield item
        finally:
            timer.cancel()
            del self._inboxes[wire_id], self._wire_ids[name]
            if not finished and self._broken is None:
                self._outbox.put_nowait(pb.ClientFrame(abort=pb.AbortRequest(request_ids=[wire_id])))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Their generations end with finish reason abort. Unknown ids are ignored; on a broken stream nothing runs
        any more."""
        wire_ids = [self._wire_ids[name] for name in request_ids if name in self._wire_ids]
        if wire_ids and self._broken is None:
            self._outbox.put_nowait(pb.ClientFrame(abort=pb.AbortRequest(request_ids=wire_ids)))

    async def update(self, *, epoch: Epoch, version: Version, running: str, timeout_s: float) -> pb.StateReply:
        """Have the replica serve `version` or newer. RemoteError says why it could not; its old weights then stay."""
        request = pb.UpdateRequest(epoch=epoch, version=version, running=running, timeout_s=timeout_s)
        return await self._ask(self._connected().Update, request, timeout_s + _UPDATE_MARGIN_S)

    async def pause(self) -> pb.StateReply:
        return await self._ask(self._connected().Pause, pb.PauseRequest())

    async def resume(self) -> pb.StateReply:
        return await self._ask(self._connected().Resume, pb.ResumeRequest())

    async def load(self) -> pb.LoadReply:
        return await self._ask(self._connected().Load, pb.LoadRequest())

    async def health(self) -> pb.StateReply:
        return await self._ask(self._connected().Health, pb.HealthRequest())

    async def close(self) -> None:
        self._break(f"{self.address}: the client was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._channel is not None:
            channel, self._channel, self._stub = self._channel, None, None
            await channel.close(None)

    # --- the wire ---

    def _connected(self) -> Any:
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=channel_options(self._max_message_bytes))
            self._stub = ReplicaStub(self._channel)
        return self._stub

    async def _ask(self, call: Callable[..., Awaitable[T]], request: Any, timeout_s: float | None = None) -> T:
        started = now()
        limit = timeout_s or self._call_timeout_s
        try:
            return await call(request, timeout=limit)
        except grpc.aio.AioRpcError as failure:
            error = actor_error(failure, self.address)
            if isinstance(error, CallTimeout):
                error = CallTimeout(
                    f"{self.address} did not answer {type(request).__name__} in {now() - started:.1f} s"
                )
            raise error from None

    def _open_stream(self) -> None:
        if self._stream is None:
            self._stream = self._connected().Stream()
            self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def _write(self) -> None:
        try:
            while True:
                await self._stream.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended; the reader says why

    async def _read(self) -> None:
        reason = f"{self.address} ended the stream"
        try:
            async for frame in self._stream:
                for delta in frame.deltas:
                    inbox = self._inboxes.get(delta.request_id)
                    if inbox is not None:
                        inbox.put_nowait(delta)
        except grpc.aio.AioRpcError as failure:
            reason = str(actor_error(failure, self.address))
        self._break(reason)

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            for inbox in self._inboxes.values():
                inbox.put_nowait(ActorDied(reason))
            if self._stream is not None:
                self._stream.cancel()
