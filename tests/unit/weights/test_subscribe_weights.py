import threading
from collections.abc import Callable

import pytest
import torch

from psrl._core import WEIGHT_CHUNK_BYTES, Segment, WeightStore
from psrl.errors import ChecksumMismatch, Revoked, StorageError
from psrl.weights.manifest import Manifest
from psrl.weights.publish import WeightPublisher, describe
from psrl.weights.subscribe import WeightSubscriber

SHAPES = {"embed": (WEIGHT_CHUNK_BYTES // 4,), "norm": (7,), "scale": ()}


def filled(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


class Node:
    """A trainer, a head and a replica over one store."""

    def __init__(self, store: WeightStore, manifest: Manifest) -> None:
        self.store = store
        self.publisher = WeightPublisher(store, manifest)
        self.subscriber = WeightSubscriber(store, manifest, "replica-0")

    def publish(self, version: int, epoch: int = 0) -> int:
        slot = self.publisher.write(epoch, version, filled(version).items())
        self.store.commit(epoch, version, slot)
        return slot


@pytest.fixture
def node(make_store: Callable) -> Node:
    manifest = describe(filled(0).items())
    store, _ = make_store(manifest.total_bytes)
    return Node(store, manifest)


def require_version(tensors: dict[str, torch.Tensor], version: int) -> None:
    assert tensors.keys() == SHAPES.keys()
    assert all((tensor == version).all() for tensor in tensors.values())


@pytest.mark.parametrize("views", [False, True])
def test_pull_gives_the_newest(node: Node, views: bool):
    for version in range(5):
        node.publish(version)
        with node.subscriber.pull(version, 5.0, views=views) as pulled:
            assert (pulled.version, pulled.epoch, pulled.num_revoked) == (version, 0, 0)
            require_version(pulled.tensors, version)
    with node.subscriber.pull(1, 5.0, views=views) as pulled:
        assert pulled.version == 4
    assert all(slot.leases == 0 for slot in node.store.slots())


def test_private_copy_outlives_any_push(node: Node):
    node.publish(0)
    with node.subscriber.pull(0, 5.0) as pulled:
        for version in range(1, 6):
            node.publish(version)
        require_version(pulled.tensors, 0)


def test_view_that_was_revoked_is_told(node: Node):
    node.publish(0)

    def read_while_versions_are_pushed() -> None:
        with node.subscriber.pull(0, 5.0, views=True) as pulled:
            node.publish(1)
            node.publish(2)
            require_version(pulled.tensors, 0)  # two pushes leave it alone
            node.publish(3)

    with pytest.raises(Revoked):
        read_while_versions_are_pushed()
    with pytest.raises(ValueError, match="body"), node.subscriber.pull(0, 5.0, views=True):
        raise ValueError("the body's own error comes first")
    assert all(slot.leases == 0 for slot in node.store.slots())


def test_push_does_not_wait_for_a_lease_that_is_never_given_back(node: Node):
    node.publish(0)
    leases = [node.store.acquire("hung", 0)]
    for version in range(1, 6):
        node.publish(version)
        leases.append(node.store.acquire("hung", version))
    assert [node.store.valid(lease) for lease in leases] == [False, False, False, True, True, True]


def test_pull_waits_for_the_version(node: Node):
    node.publish(0)
    timer = threading.Timer(0.1, node.publish, (1,))
    timer.start()
    with node.subscriber.pull(1, 30.0) as pulled:
        require_version(pulled.tensors, 1)
    timer.join()


def test_pull_that_gets_nothing_says_what_there_is(node: Node):
    with pytest.raises(StorageError, match="newest is none"), node.subscriber.pull(0, 0.01):
        pass
    node.publish(3)
    with pytest.raises(StorageError, match="version 3 of epoch 0"), node.subscriber.pull(4, 0.01):
        pass
    with pytest.raises(StorageError, match="epoch >= 1"), node.subscriber.pull(0, 0.01, min_epoch=1):
        pass
    node.publish(2, epoch=1)  # rolled back
    with node.subscriber.pull(0, 5.0, min_epoch=1) as pulled:
        assert (pulled.epoch, pulled.version) == (1, 2)


def test_pulls_beside_pushes_are_whole_and_never_go_back(node: Node):
    node.publish(0)
    pushes = threading.Thread(target=lambda: [node.publish(version) for version in range(1, 41)])
    pushes.start()
    seen = 0
    while seen < 40:
        with node.subscriber.pull(seen, 30.0) as pulled:
            require_version(pulled.tensors, pulled.version)
            assert pulled.version >= seen
            seen = pulled.version
    pushes.join()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("tensor", ["embed", "scale"])
def test_damage_is_told_and_the_next_version_is_good_again(node: Node, tensor: str, views: bool):
    node.publish(0)
    with node.subscriber.pull(0, 5.0, views=True) as pulled:
        pulled.tensors[tensor].view(-1)[-1:].add_(1)
    with pytest.raises(ChecksumMismatch, match="chunk"), node.subscriber.pull(0, 5.0, views=views):
        pass
    node.publish(1)
    with node.subscriber.pull(0, 5.0, views=views) as pulled:
        require_version(pulled.tensors, 1)
    assert all(slot.leases == 0 for slot in node.store.slots())


def test_two_tensors_that_changed_places_are_told(make_store: Callable):
    pair = {"a": torch.zeros(16), "b": torch.ones(16)}
    manifest = describe(pair.items())
    store, _ = make_store(manifest.total_bytes)
    store.commit(0, 0, WeightPublisher(store, manifest).write(0, 0, pair.items()))
    subscriber = WeightSubscriber(store, manifest, "replica-0")
    with subscriber.pull(0, 5.0, views=True) as pulled:
        pulled.tensors["a"].fill_(1)
        pulled.tensors["b"].fill_(0)
    with pytest.raises(ChecksumMismatch), subscriber.pull(0, 5.0):
        pass


def test_another_model_is_refused(node: Node):
    node.publish(0)
    other = describe({**filled(0), "norm": torch.ones(7, dtype=torch.int32)}.items())
    assert other.total_bytes == node.store.data_bytes
    with (
        pytest.raises(StorageError, match="different models"),
        WeightSubscriber(node.store, other, "replica-1").pull(0, 5.0),
    ):
        pass


def test_one_pull_at_a_time(node: Node):
    node.publish(0)
    with (
        node.subscriber.pull(0, 5.0),
        pytest.raises(StorageError, match="still open"),
        node.subscriber.pull(0, 5.0),
    ):
        pass
    with node.subscriber.pull(0, 5.0):
        pass


def test_views_keep_the_memory(make_store: Callable):
    manifest = describe(filled(0).items())
    store, segment = make_store(manifest.total_bytes)
    store.commit(0, 0, WeightPublisher(store, manifest).write(0, 0, filled(0).items()))
    array = store.view(store.acquire("replica-0", 0))
    del store, segment
    assert array.nbytes == manifest.total_bytes
    assert (array == 0).all()


def test_open_wants_a_formatted_segment():
    segment = Segment.create("weights", WeightStore.required_bytes(100))
    with pytest.raises(StorageError, match="not formatted"):
        WeightStore.open(segment)
    with pytest.raises(StorageError, match="need a segment"):
        WeightStore.format(segment, 1 << 30)
