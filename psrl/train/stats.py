"""The metrics of a batch, under the field's names. Pure.

Means over nothing are left out rather than logged as NaN.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from psrl.control.messages import Batch, Counters
from psrl.train.ranks import Ranks
from psrl.train.rows import Row


def _three(name: str, values: Sequence[float] | NDArray[np.float32]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return {}
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max()), f"{name}/min": float(array.min())}


def _lengths(name: str, lengths: Sequence[int], longest: int) -> dict[str, float]:
    metrics = _three(name, lengths)
    if lengths:
        metrics[f"{name}/clip_ratio"] = sum(length >= longest for length in lengths) / len(lengths)
    return metrics


def data_metrics(
    rows: Sequence[Row], advantages: Mapping[int, float], *, max_prompt_length: int, max_response_length: int
) -> dict[str, float]:
    """Scores (raw), rewards (shaped), advantages and lengths. Rows without a response count as aborted alone."""
    answered = [row for row in rows if len(row.responses)]
    tokens = np.repeat([advantages[number] for number in range(len(rows))], [row.num_trained for row in rows])
    responses = [len(row.responses) for row in rows]
    whole = [length for length in responses if length]
    return {
        **_three("critic/score", [row.raw_score for row in answered]),
        **_three("critic/rewards", [row.reward for row in answered]),
        **_three("critic/advantages", tokens),
        **_three("critic/returns", tokens),
        **_lengths("response_length", responses, max_response_length),
        **_lengths("response_length_non_aborted", whole, max_response_length),
        **({"response/aborted_ratio": 1 - len(whole) / len(rows)} if rows else {}),
        **_lengths("prompt_length", [len(row.prompts) for row in rows], max_prompt_length),
    }


def staleness_metrics(batch: Batch, rows: Sequence[Row]) -> dict[str, float]:
    """How old the trajectories are that this batch trains, in versions, and how many were made by more than one."""
    metrics = _three("staleness", batch.staleness)
    for age, count in Counter(batch.staleness).items():
        metrics[f"staleness/hist/{age}"] = float(count)
    if rows:
        mixed = sum(len(np.unique(row.rollout_versions)) > 1 for row in rows)
        metrics["staleness/mixed_ratio"] = mixed / len(rows)
    metrics["batch/groups_used"] = float(len(batch.groups))
    metrics["batch/groups_filtered"] = float(batch.num_filtered)
    return metrics


def group_metrics(counters: Counters) -> dict[str, float]:
    """The conservation counters: offered is the sum of the rest."""
    return {f"groups/{name}": float(getattr(counters, name)) for name in counters.__struct_fields__}


def timing_metrics(seconds: Mapping[str, float], *, num_response_tokens: int, num_tokens: int) -> dict[str, float]:
    """timing_s/* of each stage, and per token where a stage works on tokens."""
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    per_token = {"gen": num_response_tokens, **dict.fromkeys(("ref", "values", "adv", "update_actor"), num_tokens)}
    for name, count in per_token.items():
        if name in seconds and count:
            metrics[f"timing_per_token_ms/{name}"] = seconds[name] * 1000 / count
    return metrics


def probability_metrics(
    rows: Sequence[Row], old_log_probs: Mapping[int, NDArray[np.float32]], ranks: Ranks
) -> dict[str, float]:
    """How far the trainer's probabilities are from the engine's, over the trained tokens of all ranks. Collective.

    Large values mean that the two disagree about the model, the tokens or the sampling.
    """
    mine, theirs = [np.zeros(0)], [np.zeros(0)]
    for number, values in old_log_probs.items():
        kept = rows[number].response_mask.astype(bool)
        mine.append(np.exp(values[kept].astype(np.float64)))
        theirs.append(np.exp(rows[number].rollout_log_probs[kept].astype(np.float64)))
    x, y = np.concatenate(mine), np.concatenate(theirs)
    gap = np.abs(x - y)
    sums = [len(x), gap.sum(), (gap**2).sum(), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]
    count, s_gap, s_gap2, sx, sy, sxx, syy, sxy = ranks.sum([float(value) for value in sums])
    largest = max(ranks.gather_floats(float(gap.max(initial=0.0))))
    if not count:
        return {"training/rollout_probs_diff_valid": 0.0}
    mean = s_gap / count
    variance = max(s_gap2 / count - mean**2, 0.0) * count / max(count - 1, 1)
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": largest,
        "training/rollout_probs_diff_mean": mean,
        "training/rollout_probs_diff_std": variance**0.5,
    }
    spread = (sxx - sx * sx / count) * (syy - sy * sy / count)
    if spread > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = (sxy - sx * sy / count) / spread**0.5
    return metrics
