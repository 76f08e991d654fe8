"""Packing: full coverage, budgets kept, ranks in step, and no worse than the reference's balance."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.train.packing import balance_metrics, micro_batches, partition, plan, workload

lengths_lists = st.lists(st.integers(1, 512), max_size=60)


def reference_cases(kind: str) -> list[dict]:
    folder = os.environ.get("PSRL_VECTORS")
    if not folder:
        pytest.skip("PSRL_VECTORS is not set")
    return [c for c in json.loads((Path(folder) / "packing.json").read_text())["cases"] if c["kind"] == kind]


@given(lengths_lists, st.integers(1, 7))
def test_partition_covers_everything_once(lengths, num_parts) -> None:
    parts = partition([workload(length) for length in lengths], num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@given(lengths_lists, st.integers(512, 2048))
def test_micro_batches_keep_to_the_budget(lengths, budget) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in batch) <= budget for batch in batches)


@given(lengths_lists, st.integers(1, 4))
def test_ranks_have_equally_many_micro_batches(lengths, num_ranks) -> None:
    cut = plan(range(len(lengths)), lengths, num_ranks, 600)
    assert len({len(batches) for batches in cut.micro}) == 1
    assert sorted(row for rank in range(num_ranks) for row in cut.rows(rank)) == list(range(len(lengths)))


def test_one_sequence_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match=r"9 tokens does not fit into actor\.ppo_max_token_len_per_gpu=8"):
        micro_batches([3, 9], 8)


def test_balance_is_no_worse_than_the_reference() -> None:
    for case in reference_cases("partition"):
        works = [workload(length) for length in case["seqlens"]]
        parts = partition(works, case["k"])
        assert max(sum(works[i] for i in part) for part in parts) <= case["expect"]["free_max"], case["id"]


def test_micro_batches_where_the_reference_overflows() -> None:
    for case in reference_cases("micro_batches"):
        if max(case["seqlens"]) > case["max_token_len"]:
            continue
        batches = micro_batches(case["seqlens"], case["max_token_len"])
        assert all(sum(case["seqlens"][i] for i in batch) <= case["max_token_len"] for batch in batches)
        if not case["params"] and not case["expect"]["over_budget"]:
            assert len(batches) <= case["expect"]["num_micro"], case["id"]


def test_balance_metrics() -> None:
    metrics = balance_metrics([10, 1, 1, 8], [[0], [1, 2, 3]])
    assert metrics["global_seqlen/min"] == 9.0
    assert metrics["global_seqlen/max"] == 11.0
    assert metrics["global_seqlen/balanced_max"] == 10.0
    assert metrics["global_seqlen/mean"] == 10.0
