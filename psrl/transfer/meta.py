"""KVBatchMeta: which rows a batch is made of. Some hundred bytes that travel instead of data."""

import itertools
from collections.abc import Sequence
from typing import Any, Self

import msgspec


class KVBatchMeta(msgspec.Struct, frozen=True, tag=True):
    """Rows of one partition. `tags` has one dict for each key; `fields` None means whatever a row has."""

    keys: list[str]
    tags: list[dict[str, Any]]
    partition_id: str
    fields: list[str] | None = None
    extra_info: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if len(self.tags) != len(self.keys):
            raise ValueError(f"{len(self.keys)} keys with {len(self.tags)} tags")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("a batch has each key once")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ValueError("a batch has each field once")

    def __len__(self) -> int:
        return len(self.keys)

    def select_keys(self, keys: Sequence[str]) -> Self:
        """Those rows, in that order. Raises KeyError for one that is not in the batch."""
        place = {key: i for i, key in enumerate(self.keys)}
        return self.reorder([place[key] for key in keys])

    def reorder(self, indices: Sequence[int]) -> Self:
        """The rows at these places (not necessarily all)."""
        keys = [self.keys[i] for i in indices]
        tags = [dict(self.tags[i]) for i in indices]
        return msgspec.structs.replace(self, keys=keys, tags=tags, extra_info=dict(self.extra_info))

    def chunk(self, num_chunks: int) -> list[Self]:
        """Consecutive parts, the first ones larger by one; some are empty if there are fewer rows than parts."""
        size, larger = divmod(len(self), num_chunks)
        starts = [i * size + min(i, larger) for i in range(num_chunks + 1)]
        return [self.reorder(range(start, end)) for start, end in itertools.pairwise(starts)]

    @classmethod
    def concat(cls, metas: Sequence[Self]) -> Self:
        """All rows, one batch after the other. Raises ValueError unless partition and fields agree."""
        if not metas:
            raise ValueError("nothing to concatenate")
        first = metas[0]
        for meta in metas[1:]:
            if (meta.partition_id, meta.fields) != (first.partition_id, first.fields):
                raise ValueError("batches of different partitions or fields cannot be one")
        extra_info: dict[str, Any] = {}
        for meta in metas:
            extra_info.update(meta.extra_info)
        return msgspec.structs.replace(
            first,
            keys=[key for meta in metas for key in meta.keys],
            tags=[dict(tag) for meta in metas for tag in meta.tags],
            extra_info=extra_info,
        )
