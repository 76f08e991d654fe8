import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import psrl
from psrl._core import WEIGHT_CHUNK_BYTES
from psrl.errors import StorageError
from psrl.weights.manifest import ITEM_BYTES
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


class Threads:
    """Ranks of one process: `Group` by barriers. A rank that dies breaks the collectives of the others."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.said: list = [None] * world_size

    def run(self, work: Callable[["Rank"], object]) -> list[object]:
        """What each rank returned or raised."""
        results: list[object] = [None] * self.world_size

        def rank(index: int) -> None:
            try:
                results[index] = work(Rank(self, index))
            except BaseException as error:
                results[index] = error
                if not isinstance(error, StorageError):
                    self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return results


class Rank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.world_size = threads, rank, threads.world_size

    def exchange(self, what: object) -> list:
        self.threads.said[self.rank] = what
        self.threads.barrier.wait(timeout=20)
        said = list(self.threads.said)
        self.threads.barrier.wait(timeout=20)
        return said

    def broadcast(self, payload: bytes | None) -> bytes:
        return self.exchange(payload)[0]

    def problems(self, problem: str) -> list[str]:
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.exchange(problem)) if text]


WHOLE = {"w": torch.arange(301.0 * 4099).view(301, 4099), "v": torch.ones(10).bfloat16()}  # two chunks


def push(make_store: Callable, work: Callable[[WeightPublisher, Rank], object], num_ranks: int = 3):
    """Each rank with a publisher of its own over the same store."""
    manifest = describe(WHOLE.items())
    store, _ = make_store(manifest.total_bytes)
    WeightPublisher(store, manifest).write(0, 0, WHOLE.items())
    store.commit(0, 0, 0)

    def rank(me: Rank) -> object:
        publisher = WeightPublisher(store, manifest)
        publisher.shard(WHOLE.items(), me.rank, num_ranks)  # whole tensors, of which each rank puts a third
        return work(publisher, me)

    return Threads(num_ranks).run(rank), store, manifest


def test_ranks_push_side_by_side(make_store: Callable):
    new = {name: tensor + 1 for name, tensor in WHOLE.items()}
    results, store, manifest = push(make_store, lambda publisher, me: publisher.push(me, 0, 1, new.items()))
    assert results == [1, 1, 1]
    store.commit(0, 1, 1)
    with WeightSubscriber(store, manifest, "replica-0").pull(1, 5.0) as pulled:
        require_same(pulled.tensors, new)


def test_if_one_rank_fails_none_has_pushed(make_store: Callable):
    def work(publisher: WeightPublisher, me: Rank) -> int:
        names = ["w"] if me.rank == 1 else WHOLE
        return publisher.push(me, 0, 1, [(name, WHOLE[name]) for name in names])

    results, store, _ = push(make_store, work)
    assert all(isinstance(result, StorageError) for result in results)
    assert "v is missing" in str(results[1])
    assert "rank 1: StorageError: weights: v is missing" in str(results[0])
    assert [slot.state for slot in store.slots()] == ["committed", "free", "free"]
    assert store.newest().version == 0


def test_a_version_that_does_not_follow_is_told_to_all_ranks(make_store: Callable):
    results, store, _ = push(make_store, lambda publisher, me: publisher.push(me, 0, 7, WHOLE.items()))
    assert all("does not follow" in str(result) for result in results)
    assert [slot.state for slot in store.slots()] == ["committed", "free", "free"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_the_middle_leaves_the_old_version(make_store: Callable, victim: int):
    def work(publisher: WeightPublisher, me: Rank) -> int:
        def tensors():
            yield "w", WHOLE["w"]
            if me.rank == victim:
                raise SystemExit
            yield "v", WHOLE["v"]

        return publisher.push(me, 0, 1, tensors())

    results, store, manifest = push(make_store, work)
    assert not any(isinstance(result, int) for result in results)
    assert store.newest().version == 0
    store.verify(store.acquire("test", 0))
    store.commit(1, 1, WeightPublisher(store, manifest).write(1, 1, WHOLE.items()))  # the next epoch


def test_other_shards_than_planned_are_refused(make_store: Callable):
    manifest = describe(WHOLE.items())
    store, _ = make_store(manifest.total_bytes)
    publisher = WeightPublisher(store, manifest)
    with pytest.raises(StorageError, match="lacks v"):
        publisher.shard([("w", WHOLE["w"])], 0, 2)
    with pytest.raises(StorageError, match="x that the manifest lacks"):
        publisher.shard([*WHOLE.items(), ("x", WHOLE["w"])], 0, 2)


def test_real_dtensors_of_two_and_four_ranks():
    """FSDP2 and HSDP over gloo, uneven rows, tied weights, wrappers: the engine's slices are those of the whole."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    script = Path(__file__).with_name("push_ranks.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_twenty_thousand_tensors(make_store: Callable):
    tensors = {f"layer.{i}": torch.full((3,), float(i)) for i in range(20_000)}
    for found in published(make_store, tensors):
        require_same(found, tensors)
