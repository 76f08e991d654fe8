"""How stale the trained data was, and what rollout and sync did in a step. Pure; numpy."""

from collections.abc import Mapping, Sequence

import numpy as np

from psrl.metrics.data_metrics import spread


def staleness_metrics(staleness: Sequence[int], bound: int) -> dict[str, float]:
    """`staleness/{mean,max,min}` over a batch's trajectories, and `staleness/hist/k` for k = 0..bound: how many have k.

    A trajectory's staleness is the version that it was trained at less the version of its oldest token. One outside of
    0..bound breaks the run's promise and raises AssertionError.
    """
    values = np.asarray(staleness, dtype=np.int64)
    assert values.size == 0 or (values.min() >= 0 and values.max() <= bound), (staleness, bound)
    counts = np.bincount(values, minlength=bound + 1)
    return {
        **spread("staleness", values),
        **{f"staleness/hist/{k}": float(count) for k, count in enumerate(counts)},
    }


def rollout_rates(before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Rates between two looks at the head's totals, `elapsed_s` apart. Totals that went back (a restart) give none.

    `rollout/tokens_per_s`; `rollout/busy_share`, of the time in which any replica generated; `sync/pause_share`, of the
    time in which replicas stood still for weights, summed over replicas; `sync/bytes_per_s` while transferring.
    """
    rates: dict[str, float] = {}

    def grown(key: str) -> float | None:
        if key not in before or key not in after or after[key] < before[key]:
            return None
        return after[key] - before[key]

    if elapsed_s > 0:
        for name, total in (
            ("rollout/tokens_per_s", "rollout/num_generated_tokens"),
            ("rollout/busy_share", "rollout/busy_s"),
            ("sync/pause_share", "sync/pause_s"),
        ):
            if (growth := grown(total)) is not None:
                rates[name] = growth / elapsed_s
    transfer_s, num_bytes = grown("sync/transfer_s"), grown("sync/num_bytes")
    if transfer_s and num_bytes is not None:
        rates["sync/bytes_per_s"] = num_bytes / transfer_s
    return rates
