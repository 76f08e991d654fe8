"""Registration, staging and recorded copies with a real CUDA driver. `bench/gpu_check` runs these and measures."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from psrl._core import WEIGHT_CHUNK_BYTES, Segment, WeightStore
from psrl.errors import StorageError
from psrl.weights.device_copies import DirectCopies, record
from psrl.weights.publish import WeightPublisher, describe
from psrl.weights.stage import Device, HostRegistration, Staging
from psrl.weights.subscribe import WeightSubscriber

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PIECE_BYTES = 16 << 20
SHAPES = {"w": (3 * PIECE_BYTES // 2, 1), "odd": (WEIGHT_CHUNK_BYTES // 2 + 77,), "b": (3,), "s": ()}


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


class Weights:
    """A store with a publisher; `expected` are the tensors of each version."""

    def __init__(self, store: WeightStore, segment: Segment) -> None:
        self.store, self.segment = store, segment
        self.manifest = describe(tensors_of(0).items())
        self._publisher = WeightPublisher(store, self.manifest)

    def publish(self, version: int) -> None:
        self.store.commit(0, version, self._publisher.write(0, version, tensors_of(version).items()))

    def require(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        for name, expected in tensors_of(version).items():
            assert tensors[name].is_cuda
            assert torch.equal(tensors[name].cpu(), expected), (name, version)


@pytest.fixture
def weights(make_store: Callable) -> Weights:
    return Weights(*make_store(describe(tensors_of(0).items()).total_bytes))


@pytest.fixture
def busy() -> Iterator[None]:
    """Kernels on the default stream all the while, as of an engine that generates."""
    stop = threading.Event()

    def work() -> None:
        a = torch.randn(1024, 1024, device="cuda")
        while not stop.is_set():
            for _ in range(20):
                a = torch.nn.functional.normalize(a @ a)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_segment_is_registered_in_pieces_and_given_back(read_only: bool) -> None:
    segment = Segment.create("weights", 2 * PIECE_BYTES + 5000)
    mapped = Segment.attach(segment.fd, read_only=read_only)
    device = Device("cuda:0")
    for _ in range(2):  # given back: else the second would be refused
        registration = HostRegistration(device, mapped, pause_s=0)
        assert registration.num_pieces == 3
        with pytest.raises(StorageError, match=r"segment weights: bytes 0 and on.*ALREADY_REGISTERED"):
            HostRegistration(device, mapped, pause_s=0)
        registration.close()


def test_a_failed_registration_gives_back_what_it_had() -> None:
    segment = Segment.create("weights", 2 * PIECE_BYTES)
    device = Device("cuda")
    registration = HostRegistration(device, segment)
    with pytest.raises(StorageError):
        HostRegistration(device, segment)
    registration.close()
    HostRegistration(device, segment).close()


def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(StorageError, match=rf"cuda:4096: this process sees {torch.cuda.device_count()} GPUs"):
        Device("cuda:4096")


@pytest.mark.parametrize("registered", [False, True])
def test_staged_versions_are_whole(weights: Weights, registered: bool, busy: None) -> None:
    device = Device("cuda:0")
    registration = HostRegistration(device, weights.segment) if registered else None
    staging = Staging(weights.store, weights.manifest, "r0", device)
    for version in range(1, 6):
        weights.publish(version)
        staging.start(version, 30.0)
        assert staging.wait().lease.version == version
        weights.require(staging.tensors, version)
        assert staging.progress().num_bytes == weights.manifest.total_bytes
    if registration is not None:
        registration.close()
        weights.publish(6)
        staging.start(6, 30.0)
        staging.wait()
        weights.require(staging.tensors, 6)


def test_pulls_beside_pushes_are_whole(weights: Weights) -> None:
    """Pushes come faster than stages end, so leases are revoked on the way."""
    device = Device("cuda:0")
    registration = HostRegistration(device, weights.segment, pause_s=0)
    subscriber = WeightSubscriber(weights.store, weights.manifest, "r0", device)
    weights.publish(0)
    pushes = threading.Thread(target=lambda: [weights.publish(version) for version in range(1, 31)])
    pushes.start()
    seen = 0
    while seen < 30:
        with subscriber.pull(seen, 60.0) as pulled:
            weights.require(dict(pulled.tensors), pulled.version)
            assert pulled.version >= seen
            seen = pulled.version
    pushes.join()
    registration.close()


def fused(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Callable[[], None]]:
    """A checkpoint in one buffer on the GPU, an engine's fused parameters, and what loads the one into the other."""
    rows = {"q": 896, "k": 128, "v": 128, "gate": 4864, "up": 4864, "down": 896}
    flat = torch.randn(sum(rows.values()), 896, device="cuda").to(dtype)
    checkpoint = dict(zip(rows, flat.split(list(rows.values()))))
    shapes = {"qkv": (1152, 896), "gate_up": (9728, 896), "half_down": (896, 448)}
    model = {name: torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()}

    def load() -> None:
        at = 0
        for name in ("q", "k", "v"):
            model["qkv"].narrow(0, at, rows[name]).copy_(checkpoint[name])
            at += rows[name]
        for part, name in zip(model["gate_up"].chunk(2), ("gate", "up")):
            part.copy_(checkpoint[name])
        model["half_down"].copy_(checkpoint["down"].narrow(1, 448, 448))

    return checkpoint, model, load


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_direct_copies_are_one_graph_and_give_what_loading_gives(dtype: torch.dtype, busy: None) -> None:
    checkpoint, model, load = fused(dtype)
    copies = record(load, checkpoint.items(), model.items())
    assert isinstance(copies, DirectCopies), copies
    assert copies.is_graph
    for _ in range(5):
        for tensor in checkpoint.values():
            tensor.normal_()
        for tensor in model.values():
            tensor.zero_()
        torch.cuda.synchronize()
        copies.apply()
        replayed = {name: tensor.clone() for name, tensor in model.items()}
        load()
        assert all(torch.equal(replayed[name], tensor) for name, tensor in model.items())


def test_copies_straight_from_the_host_are_replayed_without_a_graph() -> None:
    checkpoint = {"w": torch.randn(1000, 100)}
    parameter = torch.zeros(1000, 100, device="cuda", dtype=torch.bfloat16)
    copies = record(lambda: parameter.copy_(checkpoint["w"]), checkpoint.items(), [("w", parameter)])
    assert isinstance(copies, DirectCopies), copies
    assert not copies.is_graph
    checkpoint["w"].normal_()
    copies.apply()
    assert torch.equal(parameter.cpu(), checkpoint["w"].bfloat16())
