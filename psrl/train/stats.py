"""From the rows of a batch to its metrics: what `psrl.metrics` asks for, taken from rows. Pure but for one gather."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from psrl.control.messages import Counters
from psrl.metrics.data_metrics import data_metrics, rollout_agreement
from psrl.metrics.staleness import staleness_metrics
from psrl.train.ranks import Ranks
from psrl.train.rows import Row
from psrl.transfer import KVBatchMeta


def batch_metrics(
    meta: KVBatchMeta,
    rows: Sequence[Row],
    advantages: Mapping[int, float],
    *,
    staleness: int,
    max_prompt_length: int,
    max_response_length: int,
) -> dict[str, float]:
    """Scores, lengths and advantages of the rows; how old they are, and how many were made by several versions."""
    per_token = np.repeat([advantages[number] for number in range(len(rows))], [row.num_trained for row in rows])
    metrics = {
        **data_metrics(
            raw_scores_B=[row.raw_score for row in rows],
            shaped_rewards_B=[row.reward for row in rows],
            advantages_N=per_token,
            returns_N=per_token,
            prompt_lengths_B=[len(row.prompts) for row in rows],
            response_lengths_B=[len(row.responses) for row in rows],
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
        ),
        **staleness_metrics([row.staleness for row in rows], staleness),
        "batch/groups_used": float(meta.extra_info["num_groups"]),
        "batch/groups_filtered": float(meta.extra_info["num_filtered"]),
    }
    if rows:
        mixed = sum(len(np.unique(row.rollout_versions)) > 1 for row in rows)
        metrics["staleness/mixed_ratio"] = mixed / len(rows)
        metrics["staleness/mixed_cache_ratio"] = sum(int(row.mixed_cache.sum()) for row in rows) / max(
            sum(len(row.responses) for row in rows), 1
        )
    return metrics


def group_metrics(counters: Counters) -> dict[str, float]:
    """The conservation counters: offered is the sum of the rest."""
    return {f"groups/{name}": float(getattr(counters, name)) for name in counters.__struct_fields__}


def agreement_metrics(
    rows: Sequence[Row], old_log_probs: Mapping[int, NDArray[np.float32]], ranks: Ranks
) -> dict[str, float]:
    """How far the trainer's probabilities are from the engine's, over the trained tokens of all ranks. Collective.

    Large values mean that the two disagree about the model, the tokens or the sampling. Tokens made over keys and
    values of older weights are left out: there the two must differ.
    """
    ours, theirs = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for number, values in old_log_probs.items():
        kept = rows[number].response_mask.astype(bool) & ~rows[number].mixed_cache.astype(bool)
        ours.append(values[kept])
        theirs.append(rows[number].rollout_log_probs[kept])
    everyone = [
        np.concatenate([np.frombuffer(part, np.float32) for part in ranks.gather(np.concatenate(side).tobytes())])
        for side in (ours, theirs)
    ]
    return rollout_agreement(*everyone)
