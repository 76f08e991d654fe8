"""Plans against direct slicing: every byte once over ranks, and an engine's slices equal those of the whole tensor."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from psrl.errors import StorageError
from psrl.weights.copies import Copy, apply, clip, written_intervals
from psrl.weights.manifest import ITEM_BYTES, Manifest
from psrl.weights.reshard import (
    Layout,
    Part,
    Replicate,
    Shard,
    StridedShard,
    dim_slice,
    pull_plan,
    push_plan,
    shard_shape,
    whole,
)

DTYPES = ("bool", "float8_e4m3fn", "int8", "bfloat16", "float32", "int64", "complex128")
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple).filter(lambda mesh: math.prod(mesh) <= 12)


@st.composite
def manifests(draw) -> Manifest:
    tensors = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=5))
    return Manifest.of((f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))


@st.composite
def layouts(draw, manifest: Manifest) -> dict[str, Layout]:
    """FSDP2, HSDP, tensor parallel, both, whole: anything that torch.chunk can make, on one of two meshes."""
    num = draw(meshes)
    orders = [tuple(range(math.prod(num))), tuple(draw(st.permutations(range(math.prod(num)))))]
    found = {}
    for spec in manifest.tensors:
        kinds = [st.just(Replicate())]
        if spec.shape:
            kinds.append(st.integers(0, len(spec.shape) - 1).map(Shard))
        placements = draw(st.lists(st.one_of(kinds), min_size=len(num), max_size=len(num)))
        found[spec.name] = Layout(num, draw(st.sampled_from(orders)), tuple(placements))
    return found


def random_version(manifest: Manifest, seed: int = 0) -> np.ndarray:
    """Random bytes where tensors are, zeros between them."""
    version = np.zeros(manifest.total_bytes, dtype=np.uint8)
    rng = np.random.default_rng(seed)
    for spec in manifest.tensors:
        version[spec.offset : spec.offset + spec.nbytes] = rng.integers(0, 256, spec.nbytes)
    return version


def tensor_of(version: np.ndarray, spec) -> np.ndarray:
    """[*shape, bytes of an element]."""
    return version[spec.offset : spec.offset + spec.nbytes].reshape(*spec.shape, ITEM_BYTES[spec.dtype])


def torch_shard(tensor: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """The shard as torch cuts it."""
    cut = torch.from_numpy(tensor)
    for size, at, placement in zip(layout.mesh, layout.coordinate(rank), layout.placements):
        if isinstance(placement, Replicate):
            continue
        theirs = (
            TorchShard(placement.dim)
            if isinstance(placement, Shard)
            else _StridedShard(placement.dim, split_factor=placement.split_factor)
        )
        cut = theirs._split_tensor(cut, size, with_padding=False)[0][at]
    return np.ascontiguousarray(cut.numpy())


def flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def push_all(manifest: Manifest, where: dict[str, Layout], version: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """What all ranks together put; bytes by rank."""
    num_ranks = max(max(layout.ranks) for layout in where.values()) + 1
    found = np.zeros_like(version)
    written: list[Copy] = []
    loads = []
    for rank in range(num_ranks):
        plan = push_plan(manifest, where, rank)
        loads.append(sum(copy.nbytes for copies in plan.values() for copy in copies))
        for spec in manifest.tensors:
            shard = torch_shard(tensor_of(version, spec), where[spec.name], rank)
            if spec.nbytes:
                assert shard.shape[:-1] == shard_shape(spec.shape, where[spec.name], rank)
            apply(plan.get(spec.name, []), flat(shard), found)
            written += plan.get(spec.name, [])
    starts, stops = written_intervals(written)
    assert (starts[1:] >= stops[:-1]).all(), "a byte is put twice"
    assert (stops - starts).sum() == manifest.payload_bytes
    return found, loads


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ranks_together_put_each_byte_once(data) -> None:
    manifest = data.draw(manifests())
    version = random_version(manifest)
    found, _ = push_all(manifest, data.draw(layouts(manifest)), version)
    assert np.array_equal(found, version)


@pytest.mark.parametrize(("rows", "dp", "tp"), [(24, 3, 2), (7, 2, 2), (5, 4, 2), (1, 2, 4), (0, 2, 2)])
def test_fsdp_over_tensor_parallel_rows(rows: int, dp: int, tp: int) -> None:
    manifest = Manifest.of([("w", "bfloat16", (rows, 3))])
    version = random_version(manifest)
    layout = Layout((dp, tp), tuple(range(dp * tp)), (StridedShard(0, tp), Shard(0)))
    found, _ = push_all(manifest, {"w": layout}, version)
    assert np.array_equal(found, version)


def test_replicas_share_the_work() -> None:
    manifest = Manifest.of([(f"t{i}", "float32", (11, 100)) for i in range(9)] + [("norm", "float32", (7,))])
    ranks = tuple(range(8))
    hsdp = Layout((4, 2), ranks, (Replicate(), Shard(0)))
    where = {spec.name: Layout.whole(8) if spec.name == "norm" else hsdp for spec in manifest.tensors}
    found, loads = push_all(manifest, where, random_version(manifest))
    assert max(loads) <= 1.1 * manifest.payload_bytes / 8 + 100
    assert np.array_equal(found, random_version(manifest))


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_a_clipped_copy_is_the_part_of_the_whole_one(first, end, length, num, gap) -> None:
    copy = Copy(5, 2, length, num, length + gap, length + 1)
    moves = {c.offset + i * c.stride + j: c.into + i * c.into_stride + j for c in (copy,) for i, j in every(c)}
    clipped = [
        (c.offset + i * c.stride + j, c.into + i * c.into_stride + j)
        for c in clip(copy, first, end)
        for i, j in every(c)
    ]
    assert dict(clipped) == {a: b for a, b in moves.items() if first <= a < end}
    assert len(dict(clipped)) == len(clipped)


def every(copy: Copy) -> itertools.product:
    return itertools.product(range(copy.num), range(copy.length))


# -- engines ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_shards_to_version_to_engine_slices_equals_slicing(data) -> None:
    """Random placements of random tensors, put by all ranks; then every rank of an engine takes its slices."""
    manifest = data.draw(manifests())
    version, _ = push_all(manifest, data.draw(layouts(manifest)), random_version(manifest, 1))
    tp = data.draw(st.integers(1, 3))
    dims = {spec.name: data.draw(st.sampled_from([None, *range(len(spec.shape))])) for spec in manifest.tensors}
    for rank in range(tp):
        parts, engine = [], []
        for spec in manifest.tensors:
            box, dim = whole(spec.shape), dims[spec.name]
            if dim is not None:
                size = spec.shape[dim]
                box = dim_slice(spec.shape, dim, size * rank // tp, size * (rank + 1) // tp)
            parts.append(Part(spec.name, f"engine.{spec.name}", box))
            engine.append((f"engine.{spec.name}", spec.dtype, tuple(stop - start for start, stop in box)))
        target = Manifest.of(engine)
        copies, coverage = pull_plan(manifest, target, parts)
        coverage.require_complete("the trainer", "the engine")
        into = np.zeros(target.total_bytes, dtype=np.uint8)
        apply(copies, version, into)
        for part in parts:
            theirs = tensor_of(into, target.by_name()[part.target])
            slices = tuple(slice(*interval) for interval in part.box)
            assert np.array_equal(theirs, tensor_of(version, manifest.by_name()[part.source])[slices])


def test_fused_parameters_are_filled_part_by_part() -> None:
    h, kv = 8, 4
    manifest = Manifest.of(
        [("q", "bfloat16", (h, h)), ("k", "bfloat16", (kv, h)), ("v", "bfloat16", (kv, h)), ("o", "bfloat16", (h, h))]
    )
    version = random_version(manifest)
    rows, tp = h // 2 + 2 * (kv // 2), 2
    for rank in range(tp):
        target = Manifest.of([("qkv", "bfloat16", (rows, h)), ("o", "bfloat16", (h, h // tp))])
        parts, at = [], 0
        for name, size in (("q", h), ("k", kv), ("v", kv)):
            n = size // tp
            box = dim_slice((size, h), 0, rank * n, (rank + 1) * n)
            parts.append(Part(name, "qkv", box, dim_slice((rows, h), 0, at, at + n)))
            at += n
        parts.append(Part("o", "o", dim_slice((h, h), 1, rank * h // tp, (rank + 1) * h // tp)))
        copies, coverage = pull_plan(manifest, target, parts)
        coverage.require_complete("the trainer", "the engine")
        assert len(copies) == 4  # whole rows are one run, columns one strided copy
        into = np.zeros(target.total_bytes, dtype=np.uint8)
        apply(copies, version, into)
        q, k, v, o = (tensor_of(version, manifest.by_name()[name]) for name in "qkvo")
        mine = [part[len(part) // tp * rank : len(part) // tp * (rank + 1)] for part in (q, k, v)]
        assert np.array_equal(tensor_of(into, target.by_name()["qkv"]), np.concatenate(mine))
        assert np.array_equal(tensor_of(into, target.by_name()["o"]), o[:, rank * h // tp : (rank + 1) * h // tp])


MODEL = Manifest.of([("a", "float32", (4, 6)), ("b", "float32", (3,)), ("empty", "float32", (0, 2))])
ENGINE = Manifest.of([("a", "float32", (4, 6)), ("extra", "float32", (3,)), ("short", "float32", (4,))])


def test_leftovers_on_both_sides_are_named() -> None:
    half = Part("a", "a", dim_slice((4, 6), 0, 0, 2), dim_slice((4, 6), 0, 0, 2))
    _, coverage = pull_plan(MODEL, ENGINE, [half])
    assert coverage.unread == ("b",)
    assert coverage.unwritten == ("a", "extra", "short")
    with pytest.raises(StorageError, match=r"1 tensors of the trainer are never read: b; 3 tensors of the engine"):
        coverage.require_complete("the trainer", "the engine")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([Part("a", "a"), Part("a", "a", ((0, 1), (0, 6)), ((3, 4), (0, 6)))], "a would be written twice"),
        ([Part("nowhere", "a")], "no tensor nowhere"),
        ([Part("a", "nowhere")], "no tensor nowhere"),
        ([Part("b", "short")], "does not fit"),
        ([Part("b", "short", ((0, 4),))], "no part of b"),
        ([Part("b", "short", ((0, 3), (0, 1)))], "no part of b"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: list[Part], says: str) -> None:
    with pytest.raises(StorageError, match=says):
        pull_plan(MODEL, ENGINE, parts)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(StorageError, match="bfloat16"):
        pull_plan(MODEL, Manifest.of([("b", "bfloat16", (3,))]), [Part("b", "b")])


def test_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(StorageError, match="dimension 1"):
        push_plan(Manifest.of([("b", "float32", (3,))]), {"b": Layout((2,), (0, 1), (Shard(1),))}, 0)


def test_a_copy_outside_of_its_memory_is_refused() -> None:
    with pytest.raises(StorageError, match="outside"):
        apply([Copy(0, 0, 5)], np.zeros(4, np.uint8), np.zeros(9, np.uint8))


def test_plans_of_twenty_thousand_tensors_take_linear_time() -> None:
    def seconds(num: int) -> float:
        manifest = Manifest.of([(f"layer.{i:05}", "bfloat16", (8, 16)) for i in range(num)])
        hsdp = Layout((2, 8), tuple(range(16)), (Replicate(), Shard(0)))
        where = dict.fromkeys((spec.name for spec in manifest.tensors), hsdp)
        started = time.process_time()
        plan = push_plan(manifest, where, 5)
        copies, coverage = pull_plan(manifest, manifest, [Part(spec.name, spec.name) for spec in manifest.tensors])
        took = time.process_time() - started
        coverage.require_complete("the trainer", "the engine")
        assert len(plan) in range(num // 2, num // 2 + 2)
        assert len(copies) == num
        return took

    small, large = min(seconds(5_000) for _ in range(3)), seconds(20_000)
    assert large < 8 * small
    assert large < 10
