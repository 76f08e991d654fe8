"""Packed batches: every value where it belongs, and no copy that is not needed."""

import gc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_house import house

from psrl.errors import StorageError, UnknownKey
from psrl.transfer import Jagged, as_torch


async def test_packed_rows_are_the_rows_one_after_the_other() -> None:
    async with house(num_extents=128) as at:
        chance = np.random.default_rng(0)
        lengths = [5, 0, 7, 1, 12]
        rows = [
            {
                "tokens": chance.integers(0, 99, n).astype(np.int32),
                "logits": chance.normal(size=(n, 3)).astype(np.float32),
                "score": np.float64(n),
                "image": np.full((2, 4), n, np.uint8),
            }
            for n in lengths
        ]
        keys = [str(i) for i in range(5)]
        await at.queue.kv_batch_put(keys, "train", rows)
        await at.queue.kv_put("2", "train", {"tokens": np.arange(4, dtype=np.int32)})  # replaced: two records
        rows[2]["tokens"] = np.arange(4, dtype=np.int32)
        order = ["3", "1", "2", "2", "0", "4"]
        packed = await at.queue.kv_batch_get(order, "train", layout="jagged")
        assert set(packed) == {"tokens", "logits", "score", "image"}
        for name, column in packed.items():
            assert len(column) == 6
            for key, got in zip(order, column):
                want = np.atleast_1d(np.asarray(rows[int(key)][name]))
                assert got.dtype == want.dtype
                assert np.array_equal(got, want), name
        assert packed["tokens"].lengths().tolist() == [1, 0, 4, 4, 5, 12]
        assert packed["tokens"].values.flags.writeable
        del packed["logits"]
        base = packed["tokens"].values.base
        assert base is not None
        chosen = await at.queue.kv_batch_get(order, "train", ["score"], layout="jagged")
        assert list(chosen) == ["score"]
        assert chosen["score"].values.tolist() == [1, 0, 7, 7, 5, 12]


async def test_a_single_row_is_packed_without_a_copy() -> None:
    async with house(extent_bytes=1 << 20) as at:
        await at.queue.kv_put("k", "train", {"x": np.arange(1000.0), "s": np.float32(2)})
        (view,) = await at.queue.kv_batch_get(["k"], "train")
        packed = await at.queue.kv_batch_get(["k"], "train", layout="jagged")
        assert packed["x"].values.ctypes.data == view["x"].ctypes.data
        assert packed["s"].values.tolist() == [2]
        assert packed["x"].offsets.tolist() == [0, 1000]


async def test_packing_gives_leases_back_at_once() -> None:
    async with house(num_extents=8) as at:
        before = (await at.usage()).free_bytes
        await at.queue.kv_batch_put(["a", "b"], "train", [{"x": np.arange(500)}] * 2)
        packed = await at.queue.kv_batch_get(["a", "b"], "train", layout="jagged")
        await at.queue.kv_clear(["a", "b"], "train")
        at.queue.close()
        assert (await at.usage()).free_bytes == before
        assert packed["x"].values.tolist() == 2 * list(range(500))


async def test_what_cannot_stand_in_one_column_is_named() -> None:
    async with house() as at:
        await at.queue.kv_batch_put(
            list("abcd"),
            "train",
            [
                {"x": np.arange(3)},
                {"x": np.arange(3.0)},
                {"x": np.zeros((2, 2), np.int64)},
                {"x": np.arange(3), "y": np.arange(1)},
            ],
        )
        for keys in ("ab", "ac"):
            with pytest.raises(StorageError, match=f"field x of key {keys[1]} .* that of key a <i8"):
                await at.queue.kv_batch_get(list(keys), "train", layout="jagged")
        for keys in ("ad", "da"):
            with pytest.raises(UnknownKey):
                await at.queue.kv_batch_get(list(keys), "train", layout="jagged")
        assert len((await at.queue.kv_batch_get(list("ad"), "train", ["x"], layout="jagged"))["x"]) == 2


async def test_torch_sees_packed_rows_as_a_nested_tensor_of_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    async with house() as at:
        await at.queue.kv_batch_put(list("abc"), "train", [{"x": np.full((n, 2), n, np.float32)} for n in (2, 0, 3)])
        packed = await at.queue.kv_batch_get(list("abc"), "train", layout="jagged")
        nested = packed["x"].torch()
        assert nested.is_nested
        assert nested.layout == torch.jagged
        assert nested.values().data_ptr() == packed["x"].values.ctypes.data
        assert [tuple(row.shape) for row in nested.unbind()] == [(2, 2), (0, 2), (3, 2)]
        single = await at.queue.kv_batch_get(["c"], "train", layout="jagged")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = single["x"].torch()
        (view,) = await at.queue.kv_batch_get(["c"], "train")
        assert tensor.values().data_ptr() == view["x"].ctypes.data


async def test_a_tensor_of_a_view_keeps_it_and_needs_no_copy() -> None:
    torch = pytest.importorskip("torch")
    async with house(num_extents=4) as at:
        await at.queue.kv_put("k", "train", {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "e": np.zeros(0)})
        (row,) = await at.queue.kv_batch_get(["k"], "train")
        tensor, empty = as_torch(row["x"]), as_torch(row["e"])
        assert tensor.data_ptr() == row["x"].ctypes.data
        assert (tensor.dtype, tuple(tensor.shape), tuple(empty.shape)) == (torch.float32, (2, 3), (0,))
        del row
        gc.collect()
        await at.queue.kv_clear(["k"], "train")
        at.queue.close()
        assert (await at.usage()).leased_bytes > 0
        assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
        del tensor, empty
        gc.collect()
        assert (await at.usage()).leased_bytes == 0


async def test_tensors_can_be_put() -> None:
    torch = pytest.importorskip("torch")
    async with house() as at:
        await at.queue.kv_put(
            "k", "train", {"x": torch.arange(3, dtype=torch.int32), "g": torch.ones(2, requires_grad=True)}
        )
        (row,) = await at.queue.kv_batch_get(["k"], "train")
        assert (row["x"].dtype, row["x"].tolist(), row["g"].tolist()) == (np.int32, [0, 1, 2], [1, 1])


@given(lengths=st.lists(st.integers(0, 4), max_size=6))
@settings(deadline=None)
def test_rows_of_a_jagged(lengths: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    jagged = Jagged(np.arange(sum(lengths)), offsets)
    assert len(jagged) == len(lengths)
    assert [len(row) for row in jagged] == lengths == jagged.lengths().tolist()
    assert [value for row in jagged for value in row] == list(range(sum(lengths)))
    with pytest.raises(IndexError):
        jagged[len(lengths)]
    if lengths:
        assert jagged[-1].tolist() == jagged[len(lengths) - 1].tolist()
