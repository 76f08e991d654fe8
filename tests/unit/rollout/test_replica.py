"""The replica's server and client over real sockets; the process that dies is a real one."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl.errors import ActorDied, CallTimeout, ConfigError, EngineError, RemoteError, Revoked
from psrl.rollout import replica_pb2 as pb
from psrl.rollout.engine.torch_engine import TorchEngineSettings
from psrl.rollout.replica import ReplicaSettings, serve_replica
from psrl.rollout.replica_client import ReplicaClient

LIMIT_S = 90.0
AT_ONCE_S = 20.0  # less than pings take to find a peer that vanished


class Source:
    """Commits versions when told to; `fault` is raised instead of (or on leaving) the next pull."""

    def __init__(self, weights: Any, pulled: Any) -> None:
        self._weights, self._pulled = weights, pulled
        self._newest = 0
        self._epoch = 0
        self._changed = threading.Condition()
        self._cancelled = False
        self.fault: Exception | None = None
        self.fault_on_leaving: Exception | None = None
        self.num_pulls = 0

    def commit(self, version: int, epoch: int = 0) -> None:
        with self._changed:
            self._newest, self._epoch = version, epoch
            self._changed.notify_all()

    @contextmanager
    def pull(self, min_version: int, timeout_s: float, *, min_epoch: int) -> Iterator[Any]:
        self.num_pulls += 1
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._cancelled or (self._newest >= min_version and self._epoch >= min_epoch), timeout_s
            )
            if self._cancelled or not there:
                raise TimeoutError(f"no version {min_version}")
            pulled = self._pulled(self._newest, self._weights(self._newest), self._epoch)
        yield pulled
        fault, self.fault_on_leaving = self.fault_on_leaving, None
        if fault is not None:
            raise fault

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()


class Served:
    def __init__(self, client: ReplicaClient, source: Source, address: str, engine: Any) -> None:
        self.client, self.source, self.address, self.engine = client, source, address, engine

    async def wait_running(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not (await self.client.load()).num_running:
                await asyncio.sleep(0.005)


@pytest.fixture
def model_dir(build_model: Any, tmp_path: Path) -> Path:
    build_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def serve(model_dir: Path, marked_weights: Any, pulled: Any, paced: Any) -> Any:
    """serve(limit=..., **settings): a replica whose engine stands still after about so many tokens."""

    @asynccontextmanager
    async def serving(*, limit: float = math.inf, **changes: Any) -> AsyncIterator[Served]:
        engines = []

        def make_engine(settings: ReplicaSettings) -> Any:
            sizes = TorchEngineSettings(max_model_len=settings.max_model_len, max_num_seqs=settings.max_num_seqs)
            engines.append(paced.from_pretrained(settings.model_path, sizes))
            engines[0].limit = limit
            return engines[0]

        source = Source(marked_weights, pulled)
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def ready(where: str, load: Any) -> None:
            address.set_result(where)

        settings = ReplicaSettings("r0", str(model_dir), **{"max_model_len": 256, "max_num_seqs": 16, **changes})
        if settings.min_version is not None:
            source.commit(settings.min_version, settings.epoch)
        server = asyncio.create_task(serve_replica(settings, source, ready, make_engine=make_engine))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([server, address], return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            await server
        client = ReplicaClient(await address, max_message_bytes=settings.max_message_bytes)
        try:
            yield Served(client, source, await address, engines[0])
        finally:
            await client.close()
            server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await server

    return serving


def wire(name: str, prompt: list[int], **fields: Any) -> pb.GenerateRequest:
    settings = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, **fields}
    return pb.GenerateRequest(request_id=name, token_ids=np.array(prompt, "<i4").tobytes(), **settings)


class Whole:
    """All deltas of one generation."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.reason = self.error = ""

    async def follow(self, stream: AsyncIterator[pb.Delta]) -> "Whole":
        async with asyncio.timeout(LIMIT_S):
            async for delta in stream:
                assert not self.reason
                tokens = np.frombuffer(delta.token_ids, "<i4").tolist()
                self.tokens += tokens
                self.log_probs += np.frombuffer(delta.log_probs, "<f4").tolist()
                self.versions += [delta.version] * len(tokens)
                self.reason, self.error = delta.finish_reason, delta.error
        return self


async def generate(client: ReplicaClient, request: pb.GenerateRequest) -> Whole:
    return await Whole().follow(client.generate(request))


async def test_a_request_over_the_wire_equals_one_in_process(
    serve: Any, build_model: Any, run: Any, request_of: Any
) -> None:
    from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings

    engine = TorchEngine(build_model("llama"), TorchEngineSettings(max_model_len=256))
    expected = run(engine, request_of("a", [1, 2, 3], max_new_tokens=40, seed=11, temperature=0.5, top_k=20, top_p=0.5))
    async with serve() as served:
        request = wire("a", [1, 2, 3], max_new_tokens=40, seed=11, temperature=0.5, top_k=20, top_p=0.5)
        answer = await generate(served.client, request)
    assert answer.tokens == expected["a"].tokens
    np.testing.assert_allclose(answer.log_probs, expected["a"].log_probs, atol=1e-4)
    assert (answer.reason, set(answer.versions)) == ("length", {0})


async def test_many_requests_share_a_stream_in_few_frames(serve: Any) -> None:
    async with serve(max_num_seqs=64) as served:
        requests = [wire(str(i), [i % 100, 3], max_new_tokens=1 + i % 3, seed=i) for i in range(4096)]
        answers = await asyncio.gather(*(generate(served.client, request) for request in requests))
        assert [len(answer.tokens) for answer in answers] == [1 + i % 3 for i in range(4096)]
        load = await served.client.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.num_generated_tokens == sum(1 + i % 3 for i in range(4096))


async def test_recorded_versions_are_true_across_updates_amid_generation(serve: Any) -> None:
    async with serve(min_version=1, max_num_seqs=8, limit=300) as served:
        running = [
            asyncio.create_task(generate(served.client, wire(str(i), [1, 2, 3], max_new_tokens=150))) for i in range(12)
        ]
        for version in (2, 3, 4):
            while (await served.client.load()).num_generated_tokens < 300 * (version - 1):
                await asyncio.sleep(0.005)
            served.source.commit(version)
            served.engine.limit = 300 * version if version < 4 else math.inf
            state = await served.client.update(epoch=0, version=version, running="recompute", timeout_s=LIMIT_S)
            assert state.version == version
            assert state.num_bytes > 0
            assert 0 < state.transfer_s <= state.pause_s
        answers = await asyncio.gather(*running)
    for answer in answers:
        assert answer.tokens == answer.versions
        assert (len(answer.tokens), answer.reason) == (150, "length")
    assert {token for answer in answers for token in answer.tokens} == {1, 2, 3, 4}


async def test_an_update_is_idempotent_and_waits_for_its_version(serve: Any) -> None:
    async with serve() as served:
        client = served.client
        both = [
            asyncio.create_task(client.update(epoch=0, version=2, running="keep", timeout_s=LIMIT_S)) for _ in range(2)
        ]
        await asyncio.sleep(0.05)
        assert (await client.health()).version == 0  # and it serves on meanwhile
        assert (await generate(client, wire("a", [1]))).versions == [0] * 8
        served.source.commit(2)
        assert [(await one).version for one in both] == [2, 2]
        again = await client.update(epoch=0, version=1, running="keep", timeout_s=LIMIT_S)
        assert (again.version, again.num_bytes, served.source.num_pulls) == (2, 0, 1)
        with pytest.raises(RemoteError, match=r"TimeoutError.*version 9"):
            await client.update(epoch=0, version=9, running="keep", timeout_s=0.05)
        assert (await generate(client, wire("a", [1]))).tokens == [2] * 8


async def test_a_failure_in_the_replica_is_told_with_its_traceback(serve: Any) -> None:
    async with serve(min_version=1) as served:
        served.source.commit(2)
        served.source.fault = ValueError("boom")
        with pytest.raises(RemoteError, match="boom") as failed:
            await served.client.update(epoch=0, version=2, running="recompute", timeout_s=LIMIT_S)
        assert failed.value.error == "ValueError"
        assert "in pull" in failed.value.remote_traceback
        assert (await generate(served.client, wire("a", [1]))).tokens == [1] * 8
        with pytest.raises(RemoteError, match="not a valid Running"):
            await served.client.update(epoch=0, version=2, running="", timeout_s=LIMIT_S)
        served.source.fault_on_leaving = Revoked("taken back")
        state = await served.client.update(epoch=0, version=2, running="recompute", timeout_s=LIMIT_S)
        assert (state.version, state.failure, served.source.num_pulls) == (2, "", 4)


async def test_an_old_epoch_is_refused_and_a_new_one_may_go_back(serve: Any) -> None:
    async with serve(min_version=5, limit=100) as served:
        client = served.client
        running = asyncio.create_task(generate(client, wire("old", [1], max_new_tokens=250)))
        await served.wait_running()
        served.source.commit(3, epoch=1)
        served.engine.limit = math.inf
        state = await client.update(epoch=1, version=3, running="recompute", timeout_s=LIMIT_S)
        assert (state.epoch, state.version) == (1, 3)
        answer = await running
        assert (answer.reason, set(answer.versions)) == ("abort", {5})
        assert "epoch" in answer.error
        refused = await generate(client, wire("late", [1], epoch=0))
        assert (refused.reason, refused.tokens) == ("error", [])
        assert "epoch" in refused.error
        assert (await generate(client, wire("new", [1], epoch=1))).tokens == [3] * 8
        with pytest.raises(RemoteError, match="epoch 0 is over") as stale:
            await client.update(epoch=0, version=9, running="recompute", timeout_s=LIMIT_S)
        assert stale.value.error == "StaleMessage"


async def test_a_pinned_request_is_served_by_its_version_or_not_at_all(serve: Any) -> None:
    async with serve(min_version=3) as served:
        right = await generate(served.client, wire("a", [1], pinned_version=3))
        assert right.tokens == [3] * 8
        wrong = await generate(served.client, wire("b", [1], pinned_version=2))
        assert (wrong.reason, wrong.tokens) == ("abort", [])
        assert "version" in wrong.error


async def test_pause_and_resume_may_be_repeated(serve: Any) -> None:
    async with serve() as served:
        client = served.client
        running = asyncio.create_task(generate(client, wire("a", [1], max_new_tokens=100)))
        doomed = asyncio.create_task(generate(client, wire("b", [1], max_new_tokens=100)))
        for _ in range(2):
            assert (await client.pause()).paused
        assert (await client.health()).paused
        made = (await client.load()).num_generated_tokens
        await client.abort(["b", "unknown"])
        assert (await doomed).reason in ("abort", "length")
        assert (await client.load()).num_generated_tokens == made
        for _ in range(2):
            assert not (await client.resume()).paused
        assert len((await running).tokens) == 100


async def test_a_client_that_leaves_stops_its_requests(serve: Any) -> None:
    async with serve() as served:
        other = ReplicaClient(served.address)

        async def idle() -> None:
            async with asyncio.timeout(LIMIT_S):
                while (load := await served.client.load()).num_running or load.num_waiting:
                    await asyncio.sleep(0.01)

        async for _ in other.generate(wire("early", [1], max_new_tokens=250)):
            break  # the generator is closed by its end of life: the request is aborted
        task = asyncio.create_task(generate(other, wire("cancelled", [1], max_new_tokens=250)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(CallTimeout, match="did not finish"):
            async for _ in other.generate(wire("late", [1], max_new_tokens=254), timeout_s=0.01):
                pass
        await idle()
        served.engine.limit = (await served.client.load()).num_generated_tokens + 100
        tasks = [asyncio.create_task(generate(other, wire(str(i), [1], max_new_tokens=250))) for i in range(40)]
        await served.wait_running()
        await other.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, ActorDied | Whole) for result in results)
        assert any(isinstance(result, ActorDied) for result in results)
        await idle()
        with pytest.raises(ActorDied, match="closed"):
            await generate(other, wire("a", [1]))


async def test_a_name_may_be_used_again_at_once(serve: Any) -> None:
    async with serve() as served:
        for round_ in range(20):
            async with contextlib.aclosing(served.client.generate(wire("a", [1], max_new_tokens=250))) as stream:
                if round_ % 2:
                    await anext(stream)
        answer = await generate(served.client, wire("a", [1], max_new_tokens=30, seed=4))
        assert answer.tokens == (await generate(served.client, wire("b", [1], max_new_tokens=30, seed=4))).tokens
        first = asyncio.create_task(generate(served.client, wire("c", [1], max_new_tokens=100)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="running already"):
            await generate(served.client, wire("c", [1]))
        assert len((await first).tokens) == 100


async def test_a_stream_that_breaks_the_protocol_ends_with_a_reason(serve: Any) -> None:
    async with serve(limit=100) as served:
        other = ReplicaClient(served.address)
        running = asyncio.create_task(generate(other, wire("a", [1], max_new_tokens=250)))
        await served.wait_running()
        await other._stream.write(pb.ClientFrame(generate=wire("a#0", [1])))
        with pytest.raises(ActorDied, match="running already"):
            await running
        await other.close()
        served.engine.limit = math.inf
        assert len((await generate(served.client, wire("b", [1]))).tokens) == 8


async def test_two_clients_may_use_the_same_names(serve: Any) -> None:
    async with serve() as served:
        other = ReplicaClient(served.address)
        mine, theirs = await asyncio.gather(
            generate(served.client, wire("same", [1], max_new_tokens=30, seed=1)),
            generate(other, wire("same", [2], max_new_tokens=20, seed=2)),
        )
        await other.close()
        assert (len(mine.tokens), len(theirs.tokens)) == (30, 20)


async def test_what_is_too_large_or_malformed_fails_alone(serve: Any) -> None:
    async with serve(max_message_bytes=4096) as served:
        running = asyncio.create_task(generate(served.client, wire("a", [1], max_new_tokens=200)))
        with pytest.raises(EngineError, match="the limit is 4096"):
            await generate(served.client, wire("big", [1] * 1100))
        odd = wire("odd", [1])
        odd.token_ids = b"abc"
        refused = await generate(served.client, odd)
        assert refused.reason == "error"
        many = await asyncio.gather(
            *(generate(served.client, wire(str(i), [1], max_new_tokens=200)) for i in range(30))
        )
        assert {len(answer.tokens) for answer in many} == {200}
        assert len((await running).tokens) == 200


async def test_a_port_in_use_is_a_config_error(serve: Any) -> None:
    async with serve() as served:
        with pytest.raises(ConfigError, match=r"rollout_port: cannot listen on 127\.0\.0\.1"):
            async with serve(port=int(served.address.rsplit(":", 1)[1])):
                pass


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:  # short: socket paths are limited
        yield f"{folder}/r0.sock"


async def test_health_answers_while_the_model_loads(
    model_dir: Path, marked_weights: Any, pulled: Any, socket_path: str
) -> None:
    from psrl.rollout.replica import torch_engine

    go_on = threading.Event()

    def slow(settings: ReplicaSettings) -> Any:
        assert go_on.wait(LIMIT_S)
        return torch_engine(settings)

    ready = asyncio.Event()

    async def on_ready(address: str, load: Any) -> None:
        ready.set()

    settings = ReplicaSettings("r0", str(model_dir), max_model_len=64, socket_path=socket_path)
    server = asyncio.create_task(serve_replica(settings, Source(marked_weights, pulled), on_ready, make_engine=slow))
    client = ReplicaClient(f"unix:{socket_path}")
    async with asyncio.timeout(LIMIT_S):
        while not Path(socket_path).exists():
            await asyncio.sleep(0.005)
    assert "loading" in (await client.health()).failure
    early = await generate(client, wire("a", [1]))
    assert (early.reason, early.tokens) == ("abort", [])
    with pytest.raises(RemoteError, match="loading"):
        await client.update(epoch=0, version=1, running="recompute", timeout_s=LIMIT_S)
    go_on.set()
    async with asyncio.timeout(LIMIT_S):
        await ready.wait()
    assert len((await generate(client, wire("a", [1]))).tokens) == 8
    await client.close()
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


CHILD = """
    import asyncio, sys
    import torch
    from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings
    from psrl.rollout.replica import ReplicaSettings, serve_replica

    class Paced(TorchEngine):
        def has_work(self):  # stands still when some requests have many tokens and none has all
            return super().has_work() and self.load().num_generated_tokens < 1000

    def make_engine(settings):
        return Paced.from_pretrained(settings.model_path, TorchEngineSettings(max_model_len=256, max_num_seqs=16))

    class NoWeights:
        def pull(self, min_version, timeout_s, *, min_epoch):
            raise TimeoutError("there are none")

    async def ready(address, load):
        print(address, flush=True)

    torch.set_num_threads(1)
    settings = ReplicaSettings("r0", sys.argv[1], max_model_len=256)
    asyncio.run(serve_replica(settings, NoWeights(), ready, make_engine=make_engine))
"""


async def test_a_killed_replica_fails_its_requests_at_once_with_what_was_streamed(model_dir: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(CHILD), str(model_dir), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            address = (await child.stdout.readline()).decode().strip()
        client = ReplicaClient(address)
        wholes = [Whole() for _ in range(40)]
        tasks = [
            asyncio.create_task(whole.follow(client.generate(wire(str(i), [1], max_new_tokens=250, seed=i))))
            for i, whole in enumerate(wholes)
        ]
        async with asyncio.timeout(LIMIT_S):
            while not any(whole.tokens for whole in wholes):
                await asyncio.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(AT_ONCE_S):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, ActorDied) and wholes[i].tokens for i, result in enumerate(results))
        assert all(isinstance(result, ActorDied | Whole) for result in results)
        for whole in wholes:
            assert len(whole.tokens) == len(whole.log_probs) == len(whole.versions)
        with pytest.raises(ActorDied):
            await generate(client, wire("next", [1]))
        with pytest.raises(ActorDied):
            await client.health()
        await client.abort(["0"])
        await client.close()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await child.wait()
