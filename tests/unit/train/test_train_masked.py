"""Masked sums, means and variances against golden vectors and by themselves."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from psrl.train.masked import masked_mean, masked_sum, masked_var, masked_whiten

OWN = Path(__file__).parents[2] / "golden"


def cases() -> list[dict]:
    own = json.loads((OWN / "train_masked.json").read_text())["cases"]
    folder = os.environ.get("PSRL_VECTORS")
    return own + (json.loads((Path(folder) / "masked_ops.json").read_text())["cases"] if folder else [])


def check(compute, expected) -> None:
    if isinstance(expected, dict):
        with pytest.raises(ValueError, match="at least two"):
            compute()
    else:
        torch.testing.assert_close(compute(), torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_agrees_with_golden(case) -> None:
    values, mask, expect = torch.tensor(case["values"]), torch.tensor(case["mask"]), case["expect"]
    check(lambda: masked_sum(values, mask), expect["masked_sum"])
    check(lambda: masked_mean(values, mask), expect["masked_mean"])
    check(lambda: masked_mean(values, mask, 1), expect["masked_mean_axis1"])
    check(lambda: masked_var(values, mask), expect["masked_var_unbiased"])
    check(lambda: masked_var(values, mask, unbiased=False), expect["masked_var_biased"])
    check(lambda: masked_whiten(values, mask), expect["masked_whiten"])
    check(lambda: masked_whiten(values, mask, shift_mean=False), expect["masked_whiten_keepmean"])


def test_nan_padding_is_harmless() -> None:
    values, mask = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, 0.0, 1.0])
    assert masked_sum(values, mask).item() == 4.0
    assert masked_mean(values, mask).item() == pytest.approx(2.0)
    assert masked_var(values, mask).item() == pytest.approx(2.0)
