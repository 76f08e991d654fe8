import json
from pathlib import Path

import numpy as np
import pytest

from psrl.metrics.data_metrics import data_metrics
from psrl.metrics.validation import validation_metrics

CASES = json.loads((Path(__file__).parents[2] / "golden" / "metrics.json").read_text())["cases"]


def cases(kind: str) -> list:
    return [case for case in CASES if case["kind"] == kind]


@pytest.mark.parametrize("case", cases("data"))
def test_data_metrics_agree_with_plain_arithmetic(case: dict):
    rows = case["rows"]
    raw = np.array([row["raw"] for row in rows])
    found = data_metrics(
        raw_scores_B=raw,
        shaped_rewards_B=raw + [row["penalty"] for row in rows],
        advantages_N=case["advantages"],
        prompt_lengths_B=[row["prompt"] for row in rows],
        response_lengths_B=[row["response"] for row in rows],
        max_prompt_length=5,
        max_response_length=6,
    )
    assert found == pytest.approx(case["expect"], abs=1e-12)


@pytest.mark.parametrize("case", cases("validation"))
def test_validation_metrics_agree_with_draws_one_by_one(case: dict):
    uids = [uid for uid, values in case["samples"].items() for _ in values]
    values = [value for sample in case["samples"].values() for value in sample]
    answers = [answer for sample in case["answers"].values() for answer in sample]
    found = validation_metrics(["s"] * len(uids), uids, {"acc": values, "pred": answers})
    assert found["s"]["acc"] == pytest.approx(case["expect"], abs=1e-12)
