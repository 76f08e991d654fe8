import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psrl.rollout.engine.noise import uniforms
from psrl.rollout.engine.sampling import SamplingRows, sample

MASK = (1 << 64) - 1


def rows(count: int, *, temperature: Any = 1.0, top_k: Any = -1, top_p: Any = 1.0, uniform: Any = 0.5) -> SamplingRows:
    def spread(value: Any, dtype: Any) -> Any:
        return np.broadcast_to(np.asarray(value, dtype), (count,)).copy()

    return SamplingRows(
        spread(temperature, np.float32), spread(top_k, np.int64), spread(top_p, np.float32), spread(uniform, np.float64)
    )


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The plain definition, in float64 and one token at a time."""
    weights = [math.exp(logit / temperature - max(logits) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    if top_k > 0:
        order = order[:top_k]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@given(st.integers(0, MASK), st.integers(0, 1 << 40))
def test_noise_is_what_its_definition_says(seed: int, position: int) -> None:
    bits = mix(mix((seed + 0x9E3779B97F4A7C15) & MASK) ^ mix((position + 0xD1B54A32D192ED03) & MASK))
    got = uniforms(np.array([seed], np.uint64), np.array([position], np.uint64))
    assert got[0] == (bits >> 11) / 2.0**53


def test_noise_is_uniform_along_positions_and_along_seeds() -> None:
    many = np.arange(200_000, dtype=np.uint64)
    for noise in (uniforms(np.full_like(many, 7), many), uniforms(many, np.zeros_like(many))):
        counts, _ = np.histogram(noise, bins=100, range=(0, 1))
        chi_square = float(((counts - 2000) ** 2 / 2000).sum())
        assert 50 < chi_square < 165  # 99 degrees of freedom: beyond 5 sigma on either side
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.015


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1, -1, 1), (0.7, -1, 1), (1.3, 5, 1), (1, -1, 0.8), (0.9, 6, 0.7)]
)
def test_frequencies_and_log_probs_are_those_of_the_truncated_distribution(
    temperature: float, top_k: int, top_p: float
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(12) * 2
    expected = distribution(logits.double().tolist(), temperature, top_k, top_p)
    count = 40_000
    noise = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64))
    tokens, log_probs = sample(
        logits.expand(count, -1), rows(count, temperature=temperature, top_k=top_k, top_p=top_p, uniform=noise)
    )
    frequency = np.bincount(tokens, minlength=12) / count
    np.testing.assert_allclose(frequency, expected, atol=0.012)
    assert all(expected[token] > 0 for token in set(tokens))
    np.testing.assert_allclose(log_probs, [math.log(expected[token]) for token in tokens], atol=1e-5)


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 50)
    settings = rows(
        6,
        temperature=[1, 0, 0.5, 1, 2, 0],
        top_k=[-1, -1, 3, -1, 10, 2],
        top_p=[1, 1, 1, 0.5, 0.9, 0.1],
        uniform=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    )
    tokens, log_probs = sample(logits, settings)
    for row in range(6):
        token, log_prob = sample(logits[row : row + 1], settings[row : row + 1])
        assert token == [tokens[row]]
        assert log_prob == pytest.approx([log_probs[row]], abs=1e-6)


def test_greedy_takes_the_first_largest_and_reports_the_probability_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0]])
    tokens, log_probs = sample(logits, rows(1, temperature=0, top_k=1))
    assert tokens == [1]
    assert log_probs[0] == pytest.approx(float(torch.log_softmax(logits.double(), -1)[0, 1]), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, 64), -torch.inf)
    logits[0, [3, 40]] = torch.tensor([0.0, 1.0])
    tokens, log_probs = sample(logits, rows(1, uniform=uniform))
    assert tokens[0] in (3, 40)
    assert math.isfinite(log_probs[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_told_for_their_row_alone(bad: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    for temperature in (0.0, 1.0):
        _, log_probs = sample(logits, rows(3, temperature=temperature))
        assert [math.isnan(value) for value in log_probs] == [False, True, False]
    _, log_probs = sample(torch.full((1, 8), -torch.inf), rows(1))
    assert math.isnan(log_probs[0])


def test_large_vocabularies_go_in_pieces_with_the_same_result() -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 150_000)
    noise = uniforms(np.arange(40, dtype=np.uint64), np.zeros(40, np.uint64))
    tokens, log_probs = sample(logits, rows(40, uniform=noise))
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(40), torch.tensor(tokens)]
    np.testing.assert_allclose(log_probs, expected.numpy(), atol=1e-4)
