"""Agreement with the reference where the definitions coincide; vectors come from the folder that PSRL_VECTORS names."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from psrl.metrics.data_metrics import data_metrics, throughput_metrics, timing_metrics
from psrl.metrics.flops import training_tflops
from psrl.metrics.validation import validation_metrics

FOLDER = os.environ.get("PSRL_VECTORS")
CASES = json.loads((Path(FOLDER) / "metrics.json").read_text())["cases"] if FOLDER else []
pytestmark = pytest.mark.skipif(not FOLDER, reason="PSRL_VECTORS is not set")


def cases(kind: str) -> list:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["kind"] == kind]


def require_close(found: dict[str, float], expected: dict, tolerance: float) -> None:
    """What the reference reports as NaN (a mean of nothing) we leave out."""
    finite = {key: value for key, value in expected.items() if value != "nan"}
    assert found.keys() == finite.keys()
    for key, value in finite.items():
        assert math.isclose(found[key], value, rel_tol=tolerance, abs_tol=tolerance), (key, found[key], value)


@pytest.mark.parametrize("case", cases("data_metrics"))
def test_data_metrics(case: dict):
    mask = np.array(case["mask"], dtype=bool)
    critic = case["use_critic"]
    found = data_metrics(
        raw_scores_B=np.array(case["token_level_scores"]).sum(axis=1),
        shaped_rewards_B=np.array(case["token_level_rewards"]).sum(axis=1),
        advantages_N=np.array(case["advantages"])[mask],
        returns_N=np.array(case["returns"])[mask],
        values_N=np.array(case["values"])[mask] if critic else None,
        prompt_lengths_B=case["prompt_length"],
        response_lengths_B=case["response_length"],
        max_prompt_length=case["max_prompt_length"],
        max_response_length=case["max_response_length"],
    )
    require_close(found, case["expect"]["data"], 1e-5)


@pytest.mark.parametrize("case", cases("data_metrics"))
def test_timing_and_throughput(case: dict):
    num_prompt, num_response = sum(case["prompt_length"]), sum(case["response_length"])
    if "error" not in case["expect"]["timing"]:
        require_close(timing_metrics(case["timing_raw"], num_prompt, num_response), case["expect"]["timing"], 1e-9)
    found = throughput_metrics(num_prompt + num_response, case["timing_raw"]["step"], case["n_gpus"])
    require_close(found, case["expect"]["throughput"], 1e-9)


@pytest.mark.parametrize("case", cases("validation_metrics"))
def test_validation_metrics(case: dict):
    found = validation_metrics(
        case["data_sources"], case["sample_uids"], case["infos"], seed=case["seed"], num_draws=case["n_bootstrap"]
    )
    assert found.keys() == case["expect"].keys()
    for source, variables in case["expect"].items():
        assert found[source].keys() == variables.keys()
        for variable, metrics in variables.items():
            require_close(found[source][variable], metrics, 1e-6)


@pytest.mark.parametrize("case", cases("qwen2_flops"))
def test_flops(case: dict):
    found = training_tflops(SimpleNamespace(**case["config"]), case["batch_seqlens"]) / case["delta_time"]
    assert math.isclose(found, case["expect"]["tflops_per_s"], rel_tol=1e-6)
