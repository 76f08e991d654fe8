import msgspec
import pytest

from psrl.transfer import KVBatchMeta


def meta(num: int, partition: str = "train", start: int = 0) -> KVBatchMeta:
    keys = [str(i) for i in range(start, start + num)]
    return KVBatchMeta(keys, [{"n": int(key)} for key in keys], partition, ["x"], {"step": start})


def test_selects_and_reorders_keys_with_their_tags() -> None:
    batch = meta(5)
    assert batch.select_keys(["3", "1"]).tags == [{"n": 3}, {"n": 1}]
    assert batch.reorder([4, 0]).keys == ["4", "0"]
    assert batch.keys == ["0", "1", "2", "3", "4"]
    with pytest.raises(KeyError):
        batch.select_keys(["9"])


def test_tags_are_copies() -> None:
    batch = meta(2)
    batch.reorder([0]).tags[0]["n"] = 99
    assert batch.tags[0] == {"n": 0}


@pytest.mark.parametrize(
    ("num", "chunks", "sizes"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (4, 1, [4])]
)
def test_chunks_are_consecutive_and_the_first_are_larger(num: int, chunks: int, sizes: list[int]) -> None:
    batch = meta(num)
    parts = batch.chunk(chunks)
    assert [len(part) for part in parts] == sizes
    assert KVBatchMeta.concat(parts) == batch


def test_concat_needs_one_partition_and_one_set_of_fields() -> None:
    both = KVBatchMeta.concat([meta(2), meta(2, start=2)])
    assert both.keys == ["0", "1", "2", "3"]
    assert both.extra_info == {"step": 2}
    with pytest.raises(ValueError, match="different partitions"):
        KVBatchMeta.concat([meta(1), meta(1, "val", start=1)])
    with pytest.raises(ValueError, match="each key once"):
        KVBatchMeta.concat([meta(1), meta(1)])
    with pytest.raises(ValueError, match="nothing"):
        KVBatchMeta.concat([])


def test_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="2 keys with 1 tags"):
        KVBatchMeta(["a", "b"], [{}], "train")
    with pytest.raises(ValueError, match="each field once"):
        KVBatchMeta(["a"], [{}], "train", ["x", "x"])


def test_travels_as_a_message() -> None:
    batch = meta(3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVBatchMeta) == batch
