"""A replica fed through shared memory, as in a run: publish, commit, update."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl._core import Segment, WeightStore
from psrl.rollout import replica_pb2 as pb
from psrl.rollout.replica import ReplicaSettings, serve_replica
from psrl.rollout.replica_client import ReplicaClient
from psrl.types import Version
from psrl.weights.publish import WeightPublisher, describe
from psrl.weights.subscribe import Pulled, WeightSubscriber


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
async def test_versions_come_through_the_store(
    architecture: str, build_model: Any, reference_log_probs: Any, tmp_path: Path
) -> None:
    models = {version: build_model(architecture, seed=version) for version in range(1, 6)}
    build_model(architecture).save_pretrained(tmp_path)
    manifest = describe(models[1].named_parameters())
    segment = Segment.create("weights", WeightStore.required_bytes(manifest.total_bytes))
    store = WeightStore.format(segment, manifest.total_bytes)
    publisher = WeightPublisher(store, manifest)

    def publish(version: int) -> None:
        store.commit(0, version, publisher.write(0, version, models[version].named_parameters()))

    async def generate(name: str) -> tuple[list[int], list[float], set[int]]:
        tokens, log_probs, versions = [], [], set()
        prompt = np.arange(9, dtype="<i4").tobytes()
        request = pb.GenerateRequest(
            request_id=name, token_ids=prompt, max_new_tokens=12, temperature=1, top_p=1, top_k=-1, seed=1
        )
        async for delta in client.generate(request):
            tokens += np.frombuffer(delta.token_ids, "<i4").tolist()
            log_probs += np.frombuffer(delta.log_probs, "<f4").tolist()
            versions.add(delta.version)
        return tokens, log_probs, versions

    publish(1)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(where: str, load: Any) -> None:
        assert load.version == 1
        address.set_result(where)

    settings = ReplicaSettings("r0", str(tmp_path), max_model_len=64, min_version=Version(1))
    source = WeightSubscriber(store, manifest, client="r0")
    server = asyncio.create_task(serve_replica(settings, source, ready))
    async with asyncio.timeout(100):
        await asyncio.wait([server, address], return_when=asyncio.FIRST_COMPLETED)
        client = ReplicaClient(await address)
        for version in range(1, 6):
            if version > 1:
                publish(version)
                state = await client.update(epoch=0, version=version, running="recompute", timeout_s=60)
                assert (state.num_bytes, state.full_load) == (manifest.payload_bytes, "")
                assert state.transfer_s > state.pause_s > 0  # staged before the pause
            tokens, log_probs, versions = await generate(str(version))
            assert versions == {version}
            expected = reference_log_probs(models[version], [*range(9), *tokens], 9)
            np.testing.assert_allclose(log_probs, expected, atol=1e-4)
        await client.close()
    server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await server


class Watched(WeightSubscriber):
    """Tells when a pull begins and how it ended."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun, self.ended = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def pull(self, *args: Any, **settings: Any) -> Iterator[Pulled]:
        self.begun.set()
        try:
            with super().pull(*args, **settings) as pulled:
                yield pulled
        finally:
            self.ended.set()


async def test_stopping_does_not_wait_for_weights_that_do_not_come(build_model: Any, tmp_path: Path) -> None:
    model = build_model("llama")
    model.save_pretrained(tmp_path)
    manifest = describe(model.named_parameters())
    segment = Segment.create("weights", WeightStore.required_bytes(manifest.total_bytes))
    source = Watched(WeightStore.format(segment, manifest.total_bytes), manifest, "r0")

    async def ready(where: str, load: Any) -> None:
        raise AssertionError("there are no weights to be ready with")

    settings = ReplicaSettings("r0", str(tmp_path), max_model_len=64, min_version=Version(1), pull_timeout_s=3600.0)
    server = asyncio.create_task(serve_replica(settings, source, ready))
    assert await asyncio.to_thread(source.begun.wait, 60)
    await asyncio.sleep(0.1)
    server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await server
    assert await asyncio.to_thread(source.ended.wait, 30)
