"""Validation scores with bootstrap estimates, under the field's names. Pure; numpy.

Per data source, prompt and variable with N samples a prompt: `mean@N`; for N > 1 also `std@N` (over the samples) and,
for k = 2, 4, 8, ... below N and N itself, `best@k` and `worst@k`, and `maj@k` where the samples carry a `pred`: mean
and standard deviation over draws of k samples with replacement. Prompts of a source are averaged. The generator is
seeded anew for each prompt and variable, so a figure does not depend on what else is in the set.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Nested = dict[str, dict[str, dict[str, float]]]
"""Data source -> variable -> metric, for example `mean@4` or `best@2/std`."""

PREDICTION = "pred"


def validation_metrics(
    data_sources: Sequence[str],
    uids: Sequence[str],
    variables: Mapping[str, Sequence[float] | Sequence[str]],
    *,
    seed: int = 42,
    num_draws: int = 1000,
) -> Nested:
    """All sequences have one entry per sample; samples of one prompt share their uid. Text variables but `pred` and
    values that are not finite raise ValueError: a score must not go missing unseen."""
    prompts: dict[str, dict[str, list[int]]] = {}
    for sample, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        prompts.setdefault(source, {}).setdefault(uid, []).append(sample)
    predictions = variables.get(PREDICTION)
    nested: Nested = {}
    for name, column in variables.items():
        if name == PREDICTION:
            continue
        values = np.asarray(column, dtype=np.float64)
        if values.shape != (len(uids),) or not np.isfinite(values).all():
            raise ValueError(f"validation: {name} has shape {values.shape} of {len(uids)} samples, or is not finite")
        for source, by_uid in prompts.items():
            found: dict[str, list[float]] = {}
            for samples in by_uid.values():
                said = [str(predictions[i]) for i in samples] if predictions is not None else None
                for metric, value in _of_prompt(values[samples], said, seed, num_draws).items():
                    found.setdefault(metric, []).append(value)
            nested.setdefault(source, {})[name] = {metric: float(np.mean(found[metric])) for metric in found}
    return nested


def metric_names(nested: Nested) -> dict[str, float]:
    """Flat: `val-core/<source>/<variable>/<metric>` for mean, maj and best at the largest N of the core variable, which
    is `acc` where there is one and else `reward`; all else under `val-aux`."""
    flat: dict[str, float] = {}
    for source, by_variable in nested.items():
        core = "acc" if "acc" in by_variable else "reward"
        for variable, metrics in by_variable.items():
            largest = max(_count(metric) for metric in metrics)
            for metric, value in metrics.items():
                is_core = variable == core and metric.startswith(("mean", "maj", "best")) and _count(metric) == largest
                flat[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{metric}"] = value
    return flat


def _count(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _of_prompt(
    values: npt.NDArray[np.float64], predictions: list[str] | None, seed: int, num_draws: int
) -> dict[str, float]:
    total = len(values)
    metrics = {f"mean@{total}": float(values.mean())}
    if total == 1:
        return metrics
    metrics[f"std@{total}"] = float(values.std())
    sizes = [2**power for power in range(1, total.bit_length()) if 2**power < total] + [total]
    for size in sizes:
        drawn = np.random.RandomState(seed).randint(0, total, size=(num_draws, size))
        estimates = {"best": values[drawn].max(axis=1), "worst": values[drawn].min(axis=1)}
        if predictions is not None:
            estimates["maj"] = np.array([_majority(values, predictions, row.tolist()) for row in drawn])
        for kind, estimate in estimates.items():
            metrics[f"{kind}@{size}/mean"] = float(estimate.mean())
            metrics[f"{kind}@{size}/std"] = float(estimate.std())
    return metrics


def _majority(values: npt.NDArray[np.float64], predictions: list[str], drawn: list[int]) -> float:
    """The value of the answer that was drawn most often; of several, the one drawn first."""
    winner = Counter(predictions[i] for i in drawn).most_common(1)[0][0]
    return float(values[next(i for i in drawn if predictions[i] == winner)])
