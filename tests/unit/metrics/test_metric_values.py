import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.metrics.data_metrics import data_metrics, rollout_agreement, timing_metrics
from psrl.metrics.flops import mfu
from psrl.metrics.intervals import intersection, total, union
from psrl.metrics.staleness import rollout_rates, staleness_metrics
from psrl.metrics.validation import metric_names, validation_metrics


def batch(**changed: object) -> dict[str, float]:
    columns = {
        "raw_scores_B": [1.0, 0.0, 1.0],
        "shaped_rewards_B": [1.0, -0.5, 0.25],
        "advantages_N": [0.5, -0.5],
        "prompt_lengths_B": [4, 4, 2],
        "response_lengths_B": [8, 3, 0],
        "max_prompt_length": 4,
        "max_response_length": 8,
    }
    return data_metrics(**{**columns, **changed})


def test_raw_scores_and_shaped_rewards_stand_apart():
    found = batch(data_sources_B=["a", "b", "a"])
    assert found["critic/score/mean"] == 0.5  # the row without a response does not count
    assert found["critic/rewards/mean"] == 0.25
    assert found["critic/original_score/a/mean"] == 1.0
    assert found["critic/original_score/b/max"] == 0.0
    assert found["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["response_length_non_aborted/clip_ratio"] == 0.5
    assert found["prompt_length/clip_ratio"] == pytest.approx(2 / 3)


def test_statistics_of_nothing_are_left_out():
    found = batch(response_lengths_B=[0, 0, 0], advantages_N=[])
    assert not any(key.startswith("critic/") for key in found)
    assert all(math.isfinite(value) for value in found.values())
    empty = {name: [] for name in ("raw_scores_B", "shaped_rewards_B", "prompt_lengths_B", "response_lengths_B")}
    assert batch(**empty, advantages_N=[]) == {}
    assert timing_metrics({"gen": 1.0, "adv": 1.0}, 0, 0) == {"timing_s/gen": 1.0, "timing_s/adv": 1.0}


def test_agreement_of_rollout_and_trainer():
    log_probs = np.log([0.1, 0.5, 0.9])
    same = rollout_agreement(log_probs, log_probs)
    assert same["training/rollout_probs_diff_max"] == 0.0
    assert same["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    other = rollout_agreement(log_probs, np.log([0.2, 0.5, 0.9]))
    assert other["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert rollout_agreement([], []) == {"training/rollout_probs_diff_valid": 0.0}
    assert "training/rollout_actor_probs_pearson_corr" not in rollout_agreement([0.0, 0.0], [0.0, 0.0])


def test_staleness_has_all_bins():
    assert staleness_metrics([0, 0, 2], 3) == {
        "staleness/mean": pytest.approx(2 / 3),
        "staleness/max": 2.0,
        "staleness/min": 0.0,
        "staleness/hist/0": 2.0,
        "staleness/hist/1": 0.0,
        "staleness/hist/2": 1.0,
        "staleness/hist/3": 0.0,
    }
    assert staleness_metrics([], 0) == {"staleness/hist/0": 0.0}
    for outside in ([4], [-1]):
        with pytest.raises(AssertionError):
            staleness_metrics(outside, 3)


def test_rates_from_totals():
    before = {"rollout/num_generated_tokens": 100.0, "rollout/busy_s": 1.0, "sync/transfer_s": 1.0}
    before |= {"sync/num_bytes": 10.0, "sync/pause_s": 5.0}
    after = {"rollout/num_generated_tokens": 300.0, "rollout/busy_s": 2.0, "sync/transfer_s": 1.5}
    after |= {"sync/num_bytes": 110.0, "sync/pause_s": 1.0}  # the pause went back: the head restarted
    assert rollout_rates(before, after, 4.0) == {
        "rollout/tokens_per_s": 50.0,
        "rollout/busy_share": 0.25,
        "sync/bytes_per_s": 200.0,
    }
    assert rollout_rates({}, after, 4.0) == {}


def test_validation_names_and_bootstrap():
    values = {"acc": [1.0, 0.0, 1.0, 1.0], "reward": [1.0, -0.5, 1.0, 1.0], "pred": ["a", "b", "c", "c"]}
    nested = validation_metrics(["s"] * 4, ["u", "u", "v", "v"], values)
    assert nested["s"]["acc"]["mean@2"] == 0.75
    assert nested["s"]["acc"]["std@2"] == 0.25
    assert nested["s"]["acc"]["best@2/mean"] == pytest.approx((0.75 + 1) / 2, abs=0.03)  # 1 - (1/2)^2
    assert nested["s"]["acc"]["worst@2/mean"] == pytest.approx((0.25 + 1) / 2, abs=0.03)
    flat = metric_names(nested)
    core = {key for key in flat if key.startswith("val-core/")}
    assert core == {f"val-core/s/acc/{metric}" for metric in _core_metrics(2)}
    assert "val-aux/s/reward/mean@2" in flat
    assert "val-aux/s/acc/worst@2/mean" in flat


def _core_metrics(count: int) -> set[str]:
    return {f"mean@{count}", *(f"{kind}@{count}/{stat}" for kind in ("best", "maj") for stat in ("mean", "std"))}


def test_validation_without_acc_has_reward_as_core():
    flat = metric_names(validation_metrics(["s"], ["u"], {"reward": [0.5]}))
    assert flat == {"val-core/s/reward/mean@1": 0.5}


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [1.0]])
def test_validation_refuses_scores_that_are_missing(bad: list):
    with pytest.raises(ValueError, match="acc"):
        validation_metrics(["s", "s"], ["u", "v"], {"acc": bad})


def test_mfu_knows_its_devices():
    assert mfu(989.0, 2.0, "NVIDIA H200", 1) == 0.5
    assert mfu(1.0, 1.0, "abacus", 1) is None
    assert mfu(1.0, 0.0, "cpu", 1) is None


stretches = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=8
)


@given(stretches, stretches)
def test_intervals_agree_with_counting_moments(first: list, second: list):
    def covered(intervals: list, moment: float) -> bool:
        return any(start <= moment < end for start, end in intervals)

    moments = [i + 0.5 for i in range(40)]
    merged = union(first)
    assert total(merged) == sum(covered(first, moment) for moment in moments)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    both = intersection(merged, union(second))
    assert total(both) == sum(covered(first, moment) and covered(second, moment) for moment in moments)


def test_golden_validation_of_a_hand_made_generator():
    """k draws with replacement from {0, 1}: E[max] = 1 - 2^-k; the bootstrap is within 4 standard errors."""
    for seed in range(3):
        found = validation_metrics(["s"] * 4, ["u"] * 4, {"acc": [0.0, 1.0, 0.0, 1.0]}, seed=seed, num_draws=4000)
        for k in (2, 4):
            expected = 1 - 0.5**k
            error = math.sqrt(expected * (1 - expected) / 4000)
            assert abs(found["s"]["acc"][f"best@{k}/mean"] - expected) < 4 * error
