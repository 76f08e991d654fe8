"""What a training batch looked like, under the field's names. Pure; numpy.

Legend: B rows (trajectories), N trained tokens of all rows together.

`critic/score/*` is the raw score of the reward function and `critic/rewards/*` the shaped reward, with penalties: two
things that many systems mix. Rows without a response (aborted) count in lengths, not in scores. A statistic over
nothing is left out, not NaN.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.ArrayLike
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor", "old_log_prob")


def spread(name: str, values: Floats, statistics: Sequence[str] = ("mean", "max", "min")) -> dict[str, float]:
    """`name/mean`, `name/max`, `name/min`; nothing of nothing."""
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0:
        return {}
    return {f"{name}/{statistic}": float(getattr(array, statistic)()) for statistic in statistics}


def data_metrics(
    *,
    raw_scores_B: Floats,
    shaped_rewards_B: Floats,
    advantages_N: Floats,
    prompt_lengths_B: Floats,
    response_lengths_B: Floats,
    max_prompt_length: int,
    max_response_length: int,
    returns_N: Floats | None = None,
    values_N: Floats | None = None,
    data_sources_B: Sequence[str] | None = None,
) -> dict[str, float]:
    """`critic/*`, `response_length/*`, `response/aborted_ratio`, `prompt_length/*`.

    `clip_ratio` is the share of rows at the maximal length. With `data_sources_B` also raw scores by source, as
    `critic/original_score/<source>/*`; with values also `critic/vf_explained_var`.
    """
    raw_B, shaped_B, prompt_B, response_B = (
        np.asarray(column, dtype=np.float64)
        for column in (raw_scores_B, shaped_rewards_B, prompt_lengths_B, response_lengths_B)
    )
    assert raw_B.shape == shaped_B.shape == prompt_B.shape == response_B.shape
    answered_B = response_B > 0
    metrics = {
        **spread("critic/score", raw_B[answered_B]),
        **spread("critic/rewards", shaped_B[answered_B]),
        **spread("critic/advantages", advantages_N),
        **_lengths("response_length", response_B, max_response_length),
        **_lengths("response_length_non_aborted", response_B[answered_B], max_response_length),
        **_lengths("prompt_length", prompt_B, max_prompt_length),
    }
    if response_B.size:
        metrics["response/aborted_ratio"] = float((~answered_B).mean())
    if returns_N is not None:
        metrics |= spread("critic/returns", returns_N)
    if values_N is not None:
        metrics |= spread("critic/values", values_N)
    if returns_N is not None and values_N is not None and np.size(returns_N) > 1:
        returns = np.asarray(returns_N, dtype=np.float64)
        rest = np.var(returns - np.asarray(values_N, dtype=np.float64), ddof=1)
        metrics["critic/vf_explained_var"] = float(1.0 - rest / (np.var(returns, ddof=1) + 1e-5))
    if data_sources_B is not None:
        sources_B = np.asarray(data_sources_B)
        for source in np.unique(sources_B):
            metrics |= spread(f"critic/original_score/{source}", raw_B[answered_B & (sources_B == source)])
    return metrics


def _lengths(name: str, lengths: npt.NDArray[np.float64], maximum: int) -> dict[str, float]:
    metrics = spread(name, lengths)
    if lengths.size:
        metrics[f"{name}/clip_ratio"] = float((lengths == maximum).mean())
    return metrics


def timing_metrics(timing_s: Mapping[str, float], num_prompt_tokens: int, num_response_tokens: int) -> dict[str, float]:
    """`timing_s/<stage>` and, where a stage's work is in tokens, `timing_per_token_ms/<stage>`.

    `gen` is counted by response tokens, the trainer's stages by all tokens; without tokens there is no such number.
    """
    metrics = {f"timing_s/{stage}": float(seconds) for stage, seconds in timing_s.items()}
    for stages, count in (
        (_PER_RESPONSE_TOKEN, num_response_tokens),
        (_PER_TOKEN, num_prompt_tokens + num_response_tokens),
    ):
        for stage in stages:
            if stage in timing_s and count > 0:
                metrics[f"timing_per_token_ms/{stage}"] = timing_s[stage] * 1000.0 / count
    return metrics


def throughput_metrics(num_tokens: int, step_s: float, num_devices: int) -> dict[str, float]:
    """`perf/*`: tokens (prompt + response) a second and device. Each device counts once, whatever it is used for."""
    metrics = {"perf/total_num_tokens": float(num_tokens), "perf/time_per_step": float(step_s)}
    if step_s > 0:
        metrics["perf/throughput"] = num_tokens / (step_s * num_devices)
    return metrics


def rollout_agreement(old_log_probs_N: Floats, rollout_log_probs_N: Floats) -> dict[str, float]:
    """`training/rollout_probs_diff_*` and the correlation: trainer's and engine's probabilities of the same tokens."""
    old = np.exp(np.asarray(old_log_probs_N, dtype=np.float64))
    rollout = np.exp(np.asarray(rollout_log_probs_N, dtype=np.float64))
    name = "training/rollout_probs_diff"
    if old.size == 0:
        return {f"{name}_valid": 0.0}
    difference = np.abs(old - rollout)
    metrics = {f"{name}_valid": 1.0, f"{name}_max": float(difference.max()), f"{name}_mean": float(difference.mean())}
    if old.size > 1:
        metrics[f"{name}_std"] = float(difference.std(ddof=1))
        if old.std() > 0 and rollout.std() > 0:
            metrics["training/rollout_actor_probs_pearson_corr"] = float(np.corrcoef(old, rollout)[0, 1])
    return metrics
