"""GRPO advantages against golden vectors, and the edge cases that hurt in the field."""

import json
import os
from pathlib import Path

import pytest
import torch

from psrl.config.schema import Algorithm
from psrl.train.advantages import grpo, make_estimator, spread

OWN = Path(__file__).parents[2] / "golden"
ESTIMATORS = ("grpo", "grpo_nostd", "grpo_vectorized")


def cases() -> list[dict]:
    own = json.loads((OWN / "train_advantages.json").read_text())["cases"]
    folder = os.environ.get("PSRL_VECTORS")
    theirs = json.loads((Path(folder) / "advantages.json").read_text())["cases"] if folder else []
    return own + [case for case in theirs if case["estimator"] in ESTIMATORS]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_agrees_with_golden(case) -> None:
    rewards, mask = torch.tensor(case["rewards"]), torch.tensor(case["mask"])
    scores = rewards.sum(-1)
    advantages = grpo(scores, torch.tensor(case["index"]), norm_by_std=case["params"]["norm_adv_by_std_in_grpo"])
    lengths = torch.full((len(scores),), mask.shape[1])
    result = spread(advantages, lengths, mask.flatten()).view_as(mask)
    torch.testing.assert_close(result, torch.tensor(case["expect"]["advantages"]), atol=1e-5, rtol=1e-5)


def test_equal_scores_that_are_not_exact_in_binary_have_no_advantage() -> None:
    scores = torch.full((8,), 0.1 + 0.2 + 0.05, dtype=torch.float32)
    assert grpo(scores, torch.zeros(8, dtype=torch.long)).tolist() == [0.0] * 8


def test_small_spread_counts_as_none() -> None:
    scores = torch.tensor([0.3500001, 0.35, 0.35, 0.35, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    result = grpo(scores, groups, min_spread=1e-3)
    assert result[:4].tolist() == [0.0] * 4
    assert result[4].item() == pytest.approx(0.7071, abs=1e-3)
    assert grpo(scores, groups, norm_by_std=False, min_spread=1e-3)[0].item() == 0.0


def test_spread_is_measured_as_dynamic_sampling_measures_it() -> None:
    """Else a group that the filter lets through for its spread would still train nothing."""
    scores, groups = torch.tensor([0.0, 0.1]), torch.tensor([0, 0])  # largest minus smallest 0.1, deviation 0.07
    assert grpo(scores, groups, norm_by_std=False, min_spread=0.08).tolist() == pytest.approx([-0.05, 0.05])
    assert grpo(scores, groups, norm_by_std=False, min_spread=0.12).tolist() == [0.0, 0.0]


def test_packed_rows_of_different_length() -> None:
    result = spread(torch.tensor([2.0, -1.0]), torch.tensor([1, 3]), torch.tensor([1, 1, 0, 1]))
    assert result.tolist() == [2.0, -1.0, 0.0, -1.0]


def test_no_rows() -> None:
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_estimator_by_name() -> None:
    estimate = make_estimator(Algorithm(norm_adv_by_std_in_grpo=False))
    assert estimate(torch.tensor([1.0, 0.0]), torch.tensor([7, 7])).tolist() == [0.5, -0.5]
    with pytest.raises(ValueError, match="adv_estimator='gae'"):
        make_estimator(Algorithm(adv_estimator="gae"))
