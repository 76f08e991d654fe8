"""Rows, mini-batches and their metrics."""

import msgspec
import numpy as np
import pytest
from train_scripted import make_fields

from psrl.control.messages import Batch, BatchGroup, Counters, ValidationDone, ValidationSample
from psrl.errors import RunFailed
from psrl.train.ranks import Ranks
from psrl.train.rows import batch_meta, make_rows, mini_batches
from psrl.train.stats import agreement_metrics, batch_metrics, group_metrics
from psrl.train.validation import round_metrics
from psrl.transfer import KVBatchMeta
from psrl.types import GroupId, Version


def make_meta(num_groups: int = 3) -> KVBatchMeta:
    groups = tuple(BatchGroup(GroupId(g), (f"{g}_0", f"{g}_1"), Version(0)) for g in range(num_groups))
    return batch_meta(Batch(2, groups, tuple(i % 3 for i in range(2 * num_groups)), num_filtered=4))


def make(num_groups: int = 3):
    meta = make_meta(num_groups)
    fields = [make_fields(0, number) for number in range(2 * num_groups)]
    return meta, fields, make_rows(meta, fields)


def test_rows_keep_order_group_and_age() -> None:
    _, _, rows = make()
    assert [row.key for row in rows] == ["0_0", "0_1", "1_0", "1_1", "2_0", "2_1"]
    assert [row.staleness for row in rows] == [0, 1, 2, 0, 1, 2]
    assert mini_batches(rows, 2) == [[0, 1, 2, 3], [4, 5]]
    assert mini_batches([], 2) == []


def test_a_malformed_row_is_named() -> None:
    meta, fields, _ = make()
    fields[3]["rollout_log_probs"] = fields[3]["rollout_log_probs"][:-1]
    with pytest.raises(RunFailed, match="row 1_1 is malformed"):
        make_rows(meta, fields)


def test_batch_metrics() -> None:
    meta, fields, rows = make()
    fields[0]["rollout_versions"][0] = 7
    metrics = batch_metrics(
        meta,
        rows,
        dict.fromkeys(range(6), 0.5),
        staleness=3,
        max_prompt_length=8,
        max_response_length=12,
    )
    assert metrics["critic/advantages/mean"] == 0.5
    assert metrics["staleness/max"] == 2.0
    assert metrics["staleness/hist/0"] == 2.0
    assert metrics["staleness/mixed_ratio"] == pytest.approx((len(rows[0].responses) > 1) / 6)
    assert metrics["batch/groups_used"] == 3.0
    assert metrics["batch/groups_filtered"] == 4.0


def test_no_rows_give_no_nan() -> None:
    metrics = batch_metrics(make_meta(0), [], {}, staleness=0, max_prompt_length=8, max_response_length=12)
    assert all(np.isfinite(value) for value in metrics.values())


def test_agreement_looks_at_trained_tokens_alone() -> None:
    _, fields, _ = make(1)
    for columns in fields:
        columns["response_mask"][-1] = 0
    rows = make_rows(make_meta(1), fields)
    ours = {n: row.rollout_log_probs.copy() for n, row in enumerate(rows)}
    for values in ours.values():
        values[-1] = 0.0
    metrics = agreement_metrics(rows, ours, Ranks.alone())
    assert metrics["training/rollout_probs_diff_max"] == 0.0


def test_agreement_leaves_out_tokens_made_over_older_keys_and_values() -> None:
    meta, fields, _ = make(1)
    for columns in fields:
        columns["mixed_cache"][0] = 1
    rows = make_rows(meta, fields)
    ours = {n: row.rollout_log_probs.copy() for n, row in enumerate(rows)}
    for values in ours.values():
        values[0] = 0.0
    assert agreement_metrics(rows, ours, Ranks.alone()).get("training/rollout_probs_diff_max", 0.0) == 0.0
    metrics = batch_metrics(meta, rows, {0: 0.0, 1: 0.0}, staleness=3, max_prompt_length=8, max_response_length=12)
    assert metrics["staleness/mixed_cache_ratio"] == 2 / sum(len(row.responses) for row in rows)


def test_conservation_counters() -> None:
    assert group_metrics(Counters(offered=3, trained=2, in_flight=1))["groups/offered"] == 3.0


def test_validation_round() -> None:
    samples = tuple(
        ValidationSample(GroupId(i // 2), i % 2, "words", 0.5, {"acc": float(i % 2), **({"x": 1.0} if i else {})}, 4)
        for i in range(6)
    )
    done = ValidationDone(Version(3), samples, num_failed=1, num_prompts=4)
    metrics = round_metrics(done)
    assert metrics["val-core/words/acc/mean@2"] == 0.5
    assert metrics["val-aux/words/reward/mean@2"] == 0.5
    assert metrics["val-aux/num_failed"] == 1.0
    assert not any("/x/" in name for name in metrics)  # not all samples have it
    empty = round_metrics(msgspec.structs.replace(done, samples=()))
    assert empty == {"val-aux/num_prompts": 4.0, "val-aux/num_failed": 1.0}
