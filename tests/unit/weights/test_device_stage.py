"""Staging through Python, on the host as the device. The native thread's own rules are in tests/cpp/cuda_test.cpp."""

import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from psrl._core import WEIGHT_CHUNK_BYTES, Segment, WeightStore
from psrl.errors import StorageError
from psrl.weights.device_copies import DirectCopies, record
from psrl.weights.publish import WeightPublisher, describe
from psrl.weights.stage import Device, HostRegistration, Staging
from psrl.weights.subscribe import WeightSubscriber

SHAPES = {"w": (WEIGHT_CHUNK_BYTES // 2, 5), "b": (3,), "s": ()}


class Weights:
    def __init__(self, store: WeightStore, segment: Segment) -> None:
        self.store, self.segment = store, segment
        self.manifest = describe(self.tensors(0).items())
        self._publisher = WeightPublisher(store, self.manifest)

    @staticmethod
    def tensors(version: int) -> dict[str, torch.Tensor]:
        return {name: torch.full(shape, float(version), dtype=torch.bfloat16) for name, shape in SHAPES.items()}

    def publish(self, version: int) -> None:
        self.store.commit(0, version, self._publisher.write(0, version, self.tensors(version).items()))

    def equal(self, tensors: dict[str, torch.Tensor], version: int) -> bool:
        return all(torch.equal(tensors[name], tensor) for name, tensor in self.tensors(version).items())


@pytest.fixture
def weights(make_store: Callable) -> Weights:
    total = describe(Weights.tensors(0).items()).total_bytes
    return Weights(*make_store(total))


def test_a_version_is_staged_while_python_does_other_things(weights: Weights) -> None:
    staging = Staging(weights.store, weights.manifest, "r0")
    staging.start(1, 30.0)
    assert staging.progress().running
    with pytest.raises(StorageError, match="already"):
        staging.start(1, 30.0)
    weights.publish(1)
    staged = staging.wait()
    assert (staged.lease.version, staged.num_revoked) == (1, 0)
    assert weights.equal(staging.tensors, 1)
    progress = staging.progress()
    assert (progress.running, progress.num_bytes) == (False, weights.manifest.total_bytes)


def test_pulls_give_the_same_tensors_so_that_copies_can_be_replayed(weights: Weights) -> None:
    subscriber = WeightSubscriber(weights.store, weights.manifest, "r0", Device("cpu"))
    model = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    weights.publish(1)
    with subscriber.pull(1, 30.0) as first:
        copies = record(
            lambda: [model[name].copy_(tensor) for name, tensor in first.tensors.items()],
            first.tensors.items(),
            model.items(),
        )
        assert isinstance(copies, DirectCopies)
    for version in (2, 3):
        weights.publish(version)
        with subscriber.pull(version, 30.0) as pulled:
            assert pulled.tensors is first.tensors
            assert pulled.transfer_s > 0
            copies.apply()
        assert weights.equal({name: tensor.bfloat16() for name, tensor in model.items()}, version)


def test_another_thread_can_call_it_off(weights: Weights) -> None:
    subscriber = WeightSubscriber(weights.store, weights.manifest, "r0")
    threading.Timer(0.1, subscriber.cancel).start()
    with pytest.raises(StorageError, match="cancelled"), subscriber.pull(1, 3600.0):
        pass
    weights.publish(1)
    with subscriber.pull(1, 30.0) as pulled:
        assert weights.equal(pulled.tensors, 1)


def test_ctrl_c_breaks_off_a_wait_and_what_it_waits_for(weights: Weights) -> None:
    staging = Staging(weights.store, weights.manifest, "r0")
    staging.start(1, 3600.0)
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            staging.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.perf_counter() + 30
    while staging.progress().running:
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def test_what_is_let_go_amid_a_stage_ends_it(weights: Weights) -> None:
    weights.publish(1)
    for _ in range(5):
        staging = Staging(weights.store, weights.manifest, "r0")
        staging.start(0, 3600.0)
        del staging
    assert all(slot.leases == 0 for slot in weights.store.slots())


def test_devices_and_registrations_on_a_host(weights: Weights) -> None:
    device = Device("cpu")
    assert device.name == "cpu"
    registration = HostRegistration(device, weights.segment)
    assert registration.num_pieces == 0
    registration.close()
    registration.close()
    with pytest.raises(StorageError, match="no device is called tpu"):
        Device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(StorageError, match=r"CUDA|cuda"):
        Device("cuda")
