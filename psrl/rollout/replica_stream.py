"""One client's stream at the replica: its requests, and the deltas that wait to be sent."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np

from psrl.rollout import replica_pb2 as pb
from psrl.rollout.engine.base import EngineDelta, EngineRequest
from psrl.types import Epoch, FinishReason, SamplingParams, Version

_numbers = itertools.count()


class RequestSink(Protocol):
    """What a stream does to the engine."""

    def submit(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...


class ReplicaStream:
    """Requests get engine ids of their own, so that two clients may use the same names. Lives on the event loop."""

    def __init__(self, sink: RequestSink, max_frame_bytes: int) -> None:
        self.prefix = f"{next(_numbers)}/"
        self._sink, self._max_frame_bytes = sink, max_frame_bytes
        self._running: set[str] = set()  # engine ids
        self._ready: list[pb.Delta] = []
        self._changed = asyncio.Event()
        self._half_closed = False
        self._error: Exception | None = None

    async def read(self, frames: AsyncIterator[pb.ClientFrame]) -> None:
        """Follow the client's frames to their end; after that the stream ends with its last request."""
        try:
            async for frame in frames:
                if frame.HasField("generate"):
                    self._submit(frame.generate)
                elif frame.HasField("abort"):
                    self._sink.abort([self.prefix + name for name in frame.abort.request_ids])
        except Exception as error:
            self._error = error
        finally:
            self._half_closed = True
            self._changed.set()

    def _submit(self, request: pb.GenerateRequest) -> None:
        name = self.prefix + request.request_id
        if name in self._running:
            # No delta for it: it would end the one that runs under this name.
            raise ValueError(f"request {request.request_id} is running already")
        self._running.add(name)
        try:
            self._sink.submit(engine_request(name, request))
        except ValueError as error:
            self.take(EngineDelta(name, [], [], Version(-1), FinishReason.ERROR, str(error)))

    def take(self, delta: EngineDelta) -> None:
        """A delta of one of this stream's requests."""
        wire = pb.Delta(
            request_id=delta.request_id.removeprefix(self.prefix),
            token_ids=np.asarray(delta.token_ids, "<i4").tobytes(),
            log_probs=np.asarray(delta.log_probs, "<f4").tobytes(),
            version=delta.version,
            finish_reason=delta.finish_reason or "",
            error=delta.error,
            mixed_cache=delta.mixed_cache,
        )
        if delta.finish_reason is not None:
            self._running.discard(delta.request_id)
        self._ready.append(wire)
        self._changed.set()

    async def frames(self) -> AsyncIterator[pb.ServerFrame]:
        """All deltas that are ready at a time, in frames of at most max_frame_bytes. Raises what `read` met."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error
            deltas, self._ready = self._ready, []
            start = size = 0
            for index, delta in enumerate(deltas):
                size += delta.ByteSize() + 8
                if size > self._max_frame_bytes and index > start:
                    yield pb.ServerFrame(deltas=deltas[start:index])
                    start, size = index, delta.ByteSize() + 8
            if deltas:
                yield pb.ServerFrame(deltas=deltas[start:])
            if self._half_closed and not self._running and not self._ready:
                return

    def close(self) -> None:
        """The client is gone: nobody reads what its requests would still make."""
        if self._running:
            self._sink.abort(list(self._running))


def engine_request(name: str, request: pb.GenerateRequest) -> EngineRequest:
    """ValueError if the token ids are not whole int32."""
    return EngineRequest(
        request_id=name,
        token_ids=np.frombuffer(request.token_ids, "<i4"),
        num_prefix=request.num_prefix,
        sampling=SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_new_tokens=request.max_new_tokens,
            seed=request.seed,
            stop_token_ids=tuple(request.stop_token_ids),
        ),
        pinned_version=Version(request.pinned_version) if request.HasField("pinned_version") else None,
        epoch=Epoch(request.epoch),
    )
