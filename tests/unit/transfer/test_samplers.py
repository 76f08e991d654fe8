"""What each sampler draws, and that none draws what it must not."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.errors import StorageError
from psrl.transfer import (
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    StalenessBufferSampler,
)
from psrl.transfer.samplers import AnySampler, Candidate, Named, balanced


def rows(indices: Sequence[int], tags: Mapping[int, Mapping[str, Any]] | None = None) -> list[Candidate]:
    return [Candidate(str(i), i, msgspec.msgpack.encode((tags or {}).get(i, {}))) for i in indices]


def numbers(keys: Sequence[str]) -> list[int]:
    return [int(key) for key in keys]


def test_sequential_takes_the_first_or_none() -> None:
    sampler = SequentialSampler()
    assert sampler.sample(rows([3, 5, 8]), 2) == (["3", "5"], ["3", "5"])
    assert sampler.sample(rows([3, 5, 8]), 4) == ([], [])


@pytest.mark.parametrize(
    ("ready", "size", "drawn"),
    [
        ([0, 1, 3, 4, 6, 7], 6, []),
        ([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 6, [3, 4, 5, 9, 10, 11]),
        ([0, 1, 2, 3, 4, 5], 3, [0, 1, 2]),
        ([0, 1, 2, 4, 5], 6, []),
    ],
)
def test_groups_of_neighbours_are_whole(ready: list[int], size: int, drawn: list[int]) -> None:
    sampled, consumed = GRPOGroupNSampler(3).sample(rows(ready), size)
    assert numbers(sampled) == drawn
    assert consumed == sampled


def test_groups_by_tag_need_no_neighbours() -> None:
    tags = {i: {"parent_id": "ab"[i % 2]} for i in range(6)}
    del tags[4]["parent_id"]
    sampled, _ = GRPOGroupNSampler(3, by="parent_id").sample(rows(range(6), tags), 3)
    assert numbers(sampled) == [1, 3, 5]
    assert GRPOGroupNSampler(3, by="parent_id").sample(rows(range(6), tags), 6) == ([], [])


def test_a_batch_that_is_no_whole_number_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="10 rows is not made of groups of 4"):
        GRPOGroupNSampler(4).check(10)
    with pytest.raises(ValueError, match="groups of 4"):
        SeqlenBalancedSampler(dp_size=2, dp_rank=0, batch_index=0, n=4).check(6)
    with pytest.raises(ValueError, match="dp_rank 2 of 2"):
        SeqlenBalancedSampler(dp_size=2, dp_rank=2, batch_index=0).check(6)


@given(
    versions=st.lists(st.integers(0, 8), max_size=20),
    buffer=st.integers(0, 8),
    staleness=st.integers(0, 4),
    size=st.integers(1, 8),
)
def test_staleness_is_never_exceeded(versions: list[int], buffer: int, staleness: int, size: int) -> None:
    tags = {i: {"version_tag": version} for i, version in enumerate(versions)}
    sampled, consumed = StalenessBufferSampler(buffer, staleness).sample(rows(range(len(versions)), tags), size)
    fit = [version for version in versions if 0 <= buffer - version <= staleness]
    assert consumed == sampled
    assert len(sampled) == (size if len(fit) >= size else 0)
    drawn = [versions[i] for i in numbers(sampled)]
    assert drawn == sorted(fit)[: len(drawn)]


def test_a_row_without_a_version_is_named() -> None:
    with pytest.raises(StorageError, match="key '0': its tag has no integer 'version_tag'"):
        StalenessBufferSampler(1, 1).sample(rows([0]), 1)


@given(weights=st.lists(st.integers(1, 1000), max_size=8), parts=st.integers(1, 5))
def test_balanced_parts_have_equal_number(weights: list[int], parts: int) -> None:
    weights = weights * parts
    shares = balanced(weights, parts)
    assert sorted(i for share in shares for i in share) == list(range(len(weights)))
    assert {len(share) for share in shares} == {len(weights) // parts}


def test_balanced_parts_are_near_each_other() -> None:
    chance = random.Random(0)
    weights = [chance.randint(500, 4000) for _ in range(64)]
    totals = [sum(weights[i] for i in share) for share in balanced(weights, 8)]
    in_order = [sum(weights[i : i + 8]) for i in range(0, 64, 8)]
    assert max(totals) - min(totals) < 0.05 * (max(in_order) - min(in_order))


def test_ranks_share_a_balanced_draw() -> None:
    lengths = [100, 100, 1, 1, 60, 60, 40, 40]
    ready = rows(range(8), {i: {"total_lengths": length} for i, length in enumerate(lengths)})
    ranks = [SeqlenBalancedSampler(dp_size=2, dp_rank=rank, batch_index=0, n=2) for rank in range(2)]
    assert ranks[0].draw_id == ranks[1].draw_id
    sampled, consumed = ranks[0].sample(ready, 4)
    shares = [numbers(rank.share(sampled, 4)) for rank in ranks]
    assert sorted(shares) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(numbers(consumed)) == list(range(8))
    assert ranks[0].sample(ready[:7], 4) == ([], [])


def test_rank_aware_draws_are_named_by_group_and_batch() -> None:
    same = [RankAwareSampler(dp_rank=1, batch_index=2), RankAwareSampler(1, 2, GRPOGroupNSampler(2))]
    assert same[0].draw_id == same[1].draw_id
    assert len({RankAwareSampler(rank, batch).draw_id for rank in range(3) for batch in range(3)}) == 9
    assert same[1].sample(rows([0, 2, 3]), 2) == (["2", "3"], ["2", "3"])


def test_samplers_travel() -> None:
    for sampler in (
        SequentialSampler(),
        GRPOGroupNSampler(3, "p"),
        RankAwareSampler(0, 1, StalenessBufferSampler(3, 1)),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampler), type=AnySampler) == sampler
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Named("x")), type=AnySampler) == Named("x")
