"""A replica: one engine behind a gRPC server, in a process of its own.

    serve_replica: listen -> build the engine -> pull weights if asked to -> on_ready -> serve until cancelled

`Health` answers from the first moment; requests that come before the engine is there end with `abort`. The engine
runs on its own thread (`EngineThread`); everything here lives on the event loop. Pulls wait in a worker thread, so
that tokens are made while weights are staged, until the moment of the copy on the device; an update that two callers
ask for happens once.
"""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import grpc
import msgspec

from psrl.clock import now
from psrl.errors import ConfigError, EngineError, Revoked, StaleMessage
from psrl.rollout import replica_pb2 as pb
from psrl.rollout.engine.base import (
    Engine,
    EngineDelta,
    EngineLoad,
    EngineRequest,
    PulledWeights,
    Running,
    WeightSource,
)
from psrl.rollout.engine.thread import EngineThread, UpdateResult
from psrl.rollout.replica_link import MAX_MESSAGE_BYTES, channel_options, describe_error
from psrl.rollout.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from psrl.rollout.replica_stream import ReplicaStream
from psrl.types import Epoch, FinishReason, Version

logger = logging.getLogger(__name__)

OnReady = Callable[[str, EngineLoad], Awaitable[None]]

_LOADING = "the replica is still loading"
_STOP_GRACE_S = 1.0


class ReplicaSettings(msgspec.Struct, frozen=True):
    name: str
    model_path: str
    max_model_len: int  # prompt and response
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    dtype: str = "auto"
    device: str = "cpu"
    override_config: dict[str, Any] = {}
    socket_path: str = ""  # listen on this Unix socket, in a private folder: no other user reaches it
    host: str = "127.0.0.1"  # else on TCP
    port: int = 0  # 0: picked by the kernel
    epoch: Epoch = Epoch(0)
    min_version: Version | None = (
        None  # None: serve the model's files as version 0; else pull this or a newer one first
    )
    pull_timeout_s: float = 120.0
    max_message_bytes: int = MAX_MESSAGE_BYTES


def torch_engine(settings: ReplicaSettings) -> Engine:
    """Blocking: loads the model. ConfigError if it cannot be served."""
    from transformers.utils import logging as transformers_logging

    from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings

    transformers_logging.disable_progress_bar()  # logs are read later, line by line
    return TorchEngine.from_pretrained(
        settings.model_path,
        TorchEngineSettings(
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            epoch=settings.epoch,
        ),
        dtype=settings.dtype,
        device=settings.device,
        override_config=settings.override_config,
    )


async def serve_replica(
    settings: ReplicaSettings,
    weight_source: WeightSource,
    on_ready: OnReady,
    *,
    make_engine: Callable[[ReplicaSettings], Engine] = torch_engine,
) -> None:
    """Serve until cancelled. Calls on_ready(address, load) once. Raises ConfigError at start, EngineError if the
    engine breaks."""
    service = _ReplicaService(settings, weight_source)
    server = grpc.aio.server(options=channel_options(settings.max_message_bytes))
    add_ReplicaServicer_to_server(service, server)
    address = f"unix:{settings.socket_path}" if settings.socket_path else f"{settings.host}:{settings.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"psrl.deployment.rollout_port: cannot listen on {address}") from error
    if not settings.socket_path:
        address = f"{settings.host}:{port}"
    await server.start()
    try:
        load = await service.start(make_engine)
        logger.info("%s serves version %d at %s", settings.name, load.version, address)
        await on_ready(address, load)
        await service.wait_failed()
    finally:
        await server.stop(_STOP_GRACE_S)
        await service.stop()


class _ReplicaService(ReplicaServicer):  # type: ignore[misc]  # generated without types
    """The handlers. Pause, Resume, Update, Load and Health may be repeated without harm."""

    def __init__(self, settings: ReplicaSettings, source: WeightSource) -> None:
        self._settings, self._source = settings, source
        self._loop = asyncio.get_running_loop()
        self._engine: EngineThread | None = None
        self._streams: dict[str, ReplicaStream] = {}
        self._update: asyncio.Task[UpdateResult] | None = None
        self._failed: asyncio.Future[str] = self._loop.create_future()

    async def start(self, make_engine: Callable[[ReplicaSettings], Engine]) -> EngineLoad:
        engine = await asyncio.to_thread(make_engine, self._settings)
        gc.collect()
        gc.freeze()  # the model's objects live as long as the process: keep the collector from walking them
        thread = EngineThread(engine, self._deltas_from_engine, self._engine_failed)
        thread.start()
        self._engine = thread
        wanted = self._settings.min_version
        if wanted is not None:
            async with asyncio.timeout(self._settings.pull_timeout_s):
                await self._pull(thread, self._settings.epoch, wanted, Running.ABORT, self._settings.pull_timeout_s)
        return thread.load

    async def wait_failed(self) -> NoReturn:
        raise EngineError(await self._failed)

    async def stop(self) -> None:
        self._source.cancel()  # nobody waits any more for what a worker thread may be pulling
        if self._update is not None and not self._update.done():
            self._update.cancel()
            await asyncio.gather(self._update, return_exceptions=True)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    # --- generation ---

    async def Stream(self, frames: AsyncIterator[pb.ClientFrame], context: Any) -> AsyncIterator[pb.ServerFrame]:
        stream = ReplicaStream(self, self._settings.max_message_bytes // 2)
        self._streams[stream.prefix] = stream
        reader = asyncio.create_task(stream.read(frames))
        try:
            async for frame in stream.frames():
                yield frame
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.cancel()
            del self._streams[stream.prefix]
            stream.close()

    def submit(self, request: EngineRequest) -> None:
        if self._engine is None:
            self._route(
                EngineDelta(request.request_id, [], [], Version(-1), FinishReason.ABORT, _LOADING),
            )
        else:
            self._engine.submit(request)

    def abort(self, request_ids: list[str]) -> None:
        if self._engine is not None:
            self._engine.abort(request_ids)

    def _deltas_from_engine(self, deltas: list[EngineDelta]) -> None:
        """On the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._route_all, deltas)
        except RuntimeError:
            logger.warning("%d deltas came after the event loop was closed", len(deltas))

    def _route_all(self, deltas: list[EngineDelta]) -> None:
        for delta in deltas:
            self._route(delta)

    def _route(self, delta: EngineDelta) -> None:
        stream = self._streams.get(delta.request_id[: delta.request_id.index("/") + 1])
        if stream is not None:  # else its client is gone
            stream.take(delta)

    def _engine_failed(self, text: str) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(lambda: None if self._failed.done() else self._failed.set_result(text))

    # --- control ---

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.StateReply:
        engine = await self._loaded(context)
        return self._state(await asyncio.wrap_future(engine.pause()))

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.StateReply:
        engine = await self._loaded(context)
        return self._state(await asyncio.wrap_future(engine.resume()))

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.StateReply:
        if self._engine is None:
            return pb.StateReply(version=-1, epoch=self._settings.epoch, failure=_LOADING)
        return self._state(self._engine.load)

    async def Load(self, request: pb.LoadRequest, context: Any) -> pb.LoadReply:
        load = (await self._loaded(context)).load
        return pb.LoadReply(
            version=load.version,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_generated_tokens=load.num_generated_tokens,
            busy_s=load.busy_s,
        )

    async def Update(self, request: pb.UpdateRequest, context: Any) -> pb.StateReply:
        engine = await self._loaded(context)
        result: UpdateResult | None = None
        try:
            running = Running(request.running)
            async with asyncio.timeout(request.timeout_s):
                while not _serves(engine.load, Epoch(request.epoch), Version(request.version)):
                    if self._update is None or self._update.done():
                        self._update = asyncio.create_task(
                            self._pull(
                                engine, Epoch(request.epoch), Version(request.version), running, request.timeout_s
                            )
                        )
                        self._update.add_done_callback(_retrieve)
                    result = await asyncio.shield(self._update)
        except TimeoutError as error:
            text = f"version {request.version} could not be had within {request.timeout_s} s"
            await self._refuse(context, TimeoutError(text), error)
        except Exception as error:
            await self._refuse(context, error)
        state = self._state(engine.load)
        if result is not None:
            state.pause_s, state.transfer_s, state.num_bytes = result.pause_s, result.transfer_s, result.num_bytes
            state.full_load = result.load.full_load
        return state

    async def _pull(
        self, engine: EngineThread, epoch: Epoch, version: Version, running: Running, timeout_s: float
    ) -> UpdateResult:
        """Wait for the weights, then have the engine copy them. A lease revoked amid the copy: again, on the newest."""
        deadline = now() + timeout_s
        while True:
            try:
                pulled, lease = await asyncio.to_thread(self._enter, epoch, version, max(deadline - now(), 0.0))
                _check_newer(pulled, engine.load, epoch, version, lease)
                return await asyncio.wrap_future(engine.update(pulled, lease, running))
            except Revoked:
                if now() >= deadline:
                    raise
                logger.warning("the lease on version %d was revoked; pulling again", version)

    def _enter(self, epoch: Epoch, version: Version, timeout_s: float) -> tuple[PulledWeights, ExitStack]:
        with ExitStack() as stack:
            pulled = stack.enter_context(self._source.pull(version, timeout_s, min_epoch=epoch))
            return pulled, stack.pop_all()
        raise AssertionError("unreachable")

    async def _loaded(self, context: Any) -> EngineThread:
        if self._engine is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _LOADING)
            raise AssertionError("abort raises")
        return self._engine

    async def _refuse(self, context: Any, error: BaseException, cause: BaseException | None = None) -> None:
        logger.error("update failed: %s", error, exc_info=cause or error)
        await context.abort(grpc.StatusCode.INTERNAL, describe_error(error))

    def _state(self, load: EngineLoad) -> pb.StateReply:
        paused = self._engine is not None and self._engine.paused
        return pb.StateReply(version=load.version, epoch=load.epoch, paused=paused, failure=load.failure)


def _retrieve(task: "asyncio.Task[UpdateResult]") -> None:
    """Whoever asked may have stopped waiting; its error is in the engine's state then, not in a warning."""
    if not task.cancelled() and task.exception() is not None:
        logger.warning("an update failed: %s", task.exception())


def _serves(load: EngineLoad, epoch: Epoch, version: Version) -> bool:
    """Whether an update to this version has happened. StaleMessage if its epoch is over."""
    if epoch < load.epoch:
        raise StaleMessage(f"epoch {epoch} is over; the replica serves {load.epoch}")
    return not load.failure and (load.epoch, load.version) >= (epoch, version)


def _check_newer(pulled: PulledWeights, load: EngineLoad, epoch: Epoch, version: Version, lease: ExitStack) -> None:
    """Versions never go back within an epoch, epochs never."""
    if (pulled.epoch, pulled.version) < max((epoch, version), (load.epoch, load.version)):
        lease.close()
        raise StaleMessage(
            f"pulled version {pulled.version} of epoch {pulled.epoch}; wanted {version} of {epoch}, "
            f"the replica serves {load.version} of {load.epoch}"
        )
