"""Scoring rules and shaping against golden values, and what must hold for any text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import ConfigError
from psrl.reward import gsm8k, rules
from psrl.reward.manager import BadScore, Judged, Overlong, judged, shape

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "reward_rules.json").read_text(encoding="utf-8"))


def vectors(name: str) -> list[dict[str, Any]]:
    folder = os.environ.get("PSRL_VECTORS")
    if not folder:
        pytest.skip("PSRL_VECTORS is not set")
    cases: list[dict[str, Any]] = json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    return cases


def test_gsm8k_agrees_with_reference_vectors() -> None:
    for case in vectors("score_gsm8k"):
        solution, truth, expect = case["solution"], case["ground_truth"], case["expect"]
        for method in gsm8k.METHODS:
            assert gsm8k.extract(solution, method) == expect[f"extract_{method}"], case["id"]
            assert gsm8k.score(solution, truth, method) == expect[f"score_{method}"], case["id"]
            assert gsm8k.score(solution, truth, method, 0.1) == expect[f"score_{method}_fmt0.1"], case["id"]
        assert rules.score("openai/gsm8k", solution, truth, {}) == expect["default_compute_score"], case["id"]


def test_overlong_agrees_with_reference_vectors() -> None:
    for case in vectors("overlong"):
        params, expect = case["params"], case["expect"]
        overlong = Overlong(params["max_resp_len"], params["overlong_buffer_len"], params["penalty_factor"], log=True)
        shaped = shape([judged(case["score"])], [overlong], [1.0], case["response_length"])
        assert shaped.raw_score == case["score"], case["id"]
        assert shaped.shaped_reward == pytest.approx(expect["reward"], abs=1e-6, rel=1e-6), case["id"]
        assert shaped.metrics["overlong_reward"] == pytest.approx(expect["overlong_reward"], abs=1e-6, rel=1e-6)
        assert shaped.metrics["overlong"] == expect["overlong"], case["id"]


def test_gsm8k_agrees_with_golden_values() -> None:
    for case in GOLDEN["scores"]:
        assert gsm8k.extract(case["solution"], "strict") == case["strict"], case
        assert gsm8k.extract(case["solution"], "flexible") == case["flexible"], case
        assert gsm8k.score(case["solution"], case["ground_truth"]) == case["score"], case


def test_overlong_agrees_with_golden_values() -> None:
    for case in GOLDEN["penalties"]:
        overlong = Overlong(case["max_resp_len"], case["len"], case["penalty_factor"])
        assert overlong.penalty(case["num_tokens"]) == pytest.approx(case["penalty"], rel=1e-12), case
        shaped = shape([judged(case["score"])], [overlong], [1.0], case["num_tokens"])
        assert shaped.shaped_reward == pytest.approx(case["reward"], rel=1e-12), case
        assert shaped.raw_score == case["score"]


def test_arithmetic_wants_an_answer_that_ended() -> None:
    assert rules.score("psrl/arithmetic", "#### 17", "17", {"finish_reason": "stop"}) == 1.0
    assert rules.score("psrl/arithmetic", "#### 17", "17", {"finish_reason": "length"}) == 0.0
    assert rules.score("psrl/arithmetic", "#### 17", "17", {}) == 0.0
    assert rules.score("psrl/arithmetic", "#### 18", "17", {"finish_reason": "stop"}) == 0.0


def test_unknown_source_and_odd_truth_are_errors() -> None:
    with pytest.raises(ConfigError, match="data source 'lab/unknown'"):
        rules.score("lab/unknown", "x", "x", {})
    assert rules.score("openai/gsm8k", "#### 5", 5, {}) == 1.0
    with pytest.raises(TypeError, match="takes text or a whole number, not float"):
        rules.score("openai/gsm8k", "#### 5", 5.0, {})


@settings(deadline=None)
@given(st.text(max_size=400), st.integers(-(10**9), 10**9))
def test_an_answer_at_the_end_is_found(text: str, answer: int) -> None:
    solution = f"{text}\n#### {answer:,}"
    assert gsm8k.extract(solution) == str(answer)
    assert gsm8k.score(solution, str(answer)) == 1.0
    assert gsm8k.score(text, "not a number") == 0.0


@settings(deadline=None)
@given(
    st.integers(1, 5000).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length))),
    st.floats(0, 10),
    st.integers(0, 10000),
)
def test_penalty_never_rewards_and_grows_with_length(lengths: tuple[int, int], factor: float, num_tokens: int) -> None:
    max_resp_len, buffer_len = lengths
    overlong = Overlong(max_resp_len, buffer_len, factor)
    assert overlong.penalty(num_tokens + 1) <= overlong.penalty(num_tokens) <= 0
    assert overlong.penalty(max_resp_len - buffer_len) == 0
    assert overlong.penalty(max_resp_len) == pytest.approx(-factor)


def test_answers_of_functions() -> None:
    assert judged(1) == Judged(1.0, {"acc": 1.0})
    assert judged(True) == Judged(1.0, {"acc": 1.0})
    assert judged({"score": -1, "acc": False, "pred": "7", "steps": 3, "bad": float("inf"), 5: 1}) == Judged(
        -1.0, {"acc": 0.0, "steps": 3.0}
    )
    for answer in (
        None,
        "1",
        b"1",
        float("nan"),
        [1.0],
        {},
        {"acc": 1},
        {"score": None},
        1j,
        {"score": 1, "acc": float("nan")},
        {"score": 1, "acc": "yes"},
    ):
        with pytest.raises(BadScore):
            judged(answer)


def test_sources_add_up_weighted_with_raw_and_shaped_apart() -> None:
    answers = [Judged(1.0, {"acc": 1.0}), Judged(0.5, {"acc": 0.0, "tone": 2.0})]
    shaped = shape(answers, [Overlong(10, 4, 1.0), None], [1.0, 2.0], num_tokens=8)
    assert (shaped.raw_score, shaped.shaped_reward) == (2.0, 1.5)
    assert shaped.metrics == {"acc": 1.0, "1_acc": 0.0, "1_tone": 2.0}
