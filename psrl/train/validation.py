"""Validation metrics from samples: per data source, per prompt, per variable; then means over prompts. Pure.

`mean@N` and `std@N` over the N responses of a prompt, and for k = 2, 4, ..., N `best@k` and `worst@k` by 1000 seeded
bootstrap draws. Names: val-core/<source>/<acc, or reward if there is no acc>/<mean or best>@N..., val-aux/... else.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from psrl.control.messages import ValidationDone, ValidationSample

_NUM_DRAWS = 1000
_SEED = 42


def validation_metrics(done: ValidationDone) -> dict[str, float]:
    """All metrics of one validation round. Prompts whose trajectories failed count apart, not as wrong answers."""
    metrics = {
        "val-aux/num_prompts": float(done.num_prompts),
        "val-aux/num_failed": float(done.num_failed),
    }
    if done.samples:
        lengths = [sample.num_response_tokens for sample in done.samples]
        metrics["val-aux/response_length/mean"] = float(np.mean(lengths))
    for source, variables in _by_source(done.samples).items():
        core = "acc" if "acc" in variables else "reward"
        for variable, prompts in variables.items():
            most = max(len(values) for values in prompts)
            for name, value in reduce_prompts(prompts).items():
                is_core = variable == core and name.startswith(("mean@", "best@")) and f"@{most}" in name
                metrics[f"val-{'core' if is_core else 'aux'}/{source}/{variable}/{name}"] = value
    return metrics


def reduce_prompts(prompts: Iterable[Sequence[float]]) -> dict[str, float]:
    """Means over prompts of each prompt's statistics; a statistic is averaged over the prompts that have it."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for values in prompts:
        for name, value in _prompt_statistics(np.asarray(values, dtype=np.float64)).items():
            found[name].append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _prompt_statistics(values: NDArray[np.float64]) -> dict[str, float]:
    num = len(values)
    statistics = {f"mean@{num}": float(values.mean())}
    if num == 1:
        return statistics
    statistics[f"std@{num}"] = float(values.std())
    sizes = [size for size in (2**power for power in range(1, num.bit_length() + 1)) if size < num]
    for size in [*sizes, num]:
        draws = values[np.random.RandomState(_SEED).randint(0, num, (_NUM_DRAWS, size))]
        for kind, chosen in (("best", draws.max(1)), ("worst", draws.min(1))):
            statistics[f"{kind}@{size}/mean"] = float(chosen.mean())
            statistics[f"{kind}@{size}/std"] = float(chosen.std())
    return statistics


def _by_source(samples: Iterable[ValidationSample]) -> dict[str, dict[str, list[list[float]]]]:
    """source -> variable -> values of each prompt's samples."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for sample in samples:
        variables = found.setdefault(sample.data_source, {})
        for name, value in {"reward": sample.reward, **sample.metrics}.items():
            variables.setdefault(name, {}).setdefault(int(sample.group), []).append(value)
    return {
        source: {name: list(prompts.values()) for name, prompts in variables.items()}
        for source, variables in found.items()
    }
