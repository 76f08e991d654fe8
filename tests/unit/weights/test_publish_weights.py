import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from psrl._core import WEIGHT_CHUNK_BYTES, WeightTicket
from psrl.errors import StorageError
from psrl.weights.manifest import ITEM_BYTES, Manifest
from psrl.weights.publish import WeightPublisher, describe, dtype_name
from psrl.weights.subscribe import WeightSubscriber


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern, NaNs with their payloads too (bool aside, which has two)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = ITEM_BYTES[dtype_name(dtype)]
    raw = torch.randint(0, 256, (torch.Size(shape).numel() * size,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def published(make_store: Callable, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Both kinds of pull of version 0."""
    manifest = describe(tensors.items())
    store, _ = make_store(manifest.total_bytes)
    slot = WeightPublisher(store, manifest).write(0, 0, tensors.items())
    store.commit(0, 0, slot)
    subscriber = WeightSubscriber(store, manifest, "replica-0")
    for views in (False, True):
        with subscriber.pull(0, 5.0, views=views) as pulled:
            yield pulled.tensors


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def test_every_dtype_arrives_bit_for_bit(make_store: Callable):
    torch.manual_seed(0)
    tensors = {name: random_bits(getattr(torch, name), 13, 7) for name in ITEM_BYTES}
    for found in published(make_store, tensors):
        require_same(found, tensors)


def test_odd_tensors_arrive_bit_for_bit(make_store: Callable):
    torch.manual_seed(0)
    large = torch.randn(40, 50)
    tensors = {
        "transposed": large.T,
        "slice": large[3:20:2, 5:9],
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "expanded": torch.randn(1, 4).expand(6, 4),
        "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.randn(3)),
        "larger than a chunk": torch.randn(WEIGHT_CHUNK_BYTES // 4 + 77),
    }
    for found in published(make_store, tensors):
        require_same(found, tensors)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)  # buffers, one of them a 0-dim integer
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_listed_once_and_buffers_too(make_store: Callable):
    model = Tied()
    manifest = describe(model.state_dict().items())
    assert manifest.tied == (("head.weight", "embed.weight"),)
    names = [spec.name for spec in manifest.tensors]
    norm = ("bias", "num_batches_tracked", "running_mean", "running_var", "weight")
    assert names == ["embed.weight", *(f"norm.{name}" for name in norm)]
    for found in published(make_store, model.state_dict()):
        require_same(found, {k: v for k, v in model.state_dict().items() if k != "head.weight"})


def test_manifest_is_the_same_in_every_process():
    compiled = [(f"_orig_mod.{name}", tensor) for name, tensor in Tied().state_dict().items()]
    as_pushed = describe(compiled, floating=torch.bfloat16)
    plain = describe(Tied().bfloat16().state_dict().items())
    assert as_pushed == plain
    with torch.device("meta"):
        meta = Tied().bfloat16()
    # named_parameters lists tied ones once; state_dict makes new objects on the meta device
    unlisted = [*meta.named_parameters(), *meta.named_buffers()]
    assert describe(unlisted).tensors == plain.tensors


def test_tied_weights_that_came_apart_are_refused(make_store: Callable):
    model = Tied()
    manifest = describe(model.state_dict().items())
    store, _ = make_store(manifest.total_bytes)
    publisher = WeightPublisher(store, manifest)
    apart = {**model.state_dict(), "head.weight": model.head.weight.detach() + 1}
    with pytest.raises(StorageError, match="tied"):
        publisher.write(0, 0, apart.items())
    with pytest.raises(StorageError, match="tied"):
        publisher.write(0, 0, reversed(apart.items()))
    store.commit(0, 0, publisher.write(0, 0, model.state_dict().items()))  # the slot was freed


GOOD = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([("a", GOOD["a"])], "missing"),
        ([*GOOD.items(), ("a", GOOD["a"])], "twice"),
        ([*GOOD.items(), ("c", GOOD["a"])], "not in the manifest"),
        ([("a", GOOD["a"].double())], "float64"),
        ([("a", GOOD["a"].T)], "manifest says"),
        ([("a", GOOD["a"].view(-1), 4)], "outside"),
        ([("a", GOOD["a"].view(-1), -4)], "outside"),
    ],
)
def test_other_tensors_than_the_manifests_are_refused(make_store: Callable, tensors: list, says: str):
    manifest = describe(GOOD.items())
    store, _ = make_store(manifest.total_bytes)
    publisher = WeightPublisher(store, manifest)
    with pytest.raises(StorageError, match=says):
        publisher.write(0, 0, tensors)
    assert [slot.state for slot in store.slots()] == ["free"] * 3
    assert store.newest() is None


def test_store_of_another_size_is_refused(make_store: Callable):
    store, _ = make_store(1 << 20)
    with pytest.raises(StorageError, match="manifest"):
        WeightPublisher(store, describe(GOOD.items()))
    with pytest.raises(StorageError, match="manifest"):
        WeightSubscriber(store, describe(GOOD.items()), "replica-0")


def test_ranks_write_shards_side_by_side(make_store: Callable):
    torch.manual_seed(0)
    full = {"w": torch.randn(301, 4099), "v": torch.randn(10).bfloat16()}  # two chunks
    manifest = describe(full.items())
    store, _ = make_store(manifest.total_bytes)
    publishers = [WeightPublisher(store, manifest) for _ in range(2)]
    ticket = publishers[0].begin(0, 0)
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    def rank(index: int) -> None:
        try:
            rows = full["w"].chunk(2)
            start = index * rows[0].numel() * 4
            mine = [("w", rows[index], start), *([("v", full["v"])] if index else [])]
            sent = WeightTicket(ticket.slot, ticket.generation)
            publishers[index].put(sent, mine)
            barrier.wait(timeout=30)
            publishers[index].checksum_share(sent, index, 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not errors
    publishers[0].seal(ticket)
    store.commit(0, 0, ticket.slot)
    with WeightSubscriber(store, manifest, "replica-0").pull(0, 5.0) as pulled:
        require_same(pulled.tensors, full)


def test_dtensors_are_refused_by_name(make_store: Callable):
    from torch import distributed
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])
        manifest = Manifest.of([("w", "float32", (3,))])
        store, _ = make_store(manifest.total_bytes)
        with pytest.raises(StorageError, match="DTensor"):
            WeightPublisher(store, manifest).write(0, 0, [("w", tensor)])
    finally:
        distributed.destroy_process_group()


def test_twenty_thousand_tensors(make_store: Callable):
    tensors = {f"layer.{i}": torch.full((3,), float(i)) for i in range(20_000)}
    for found in published(make_store, tensors):
        require_same(found, tensors)
