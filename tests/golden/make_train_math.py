"""Write train_*.json: small cases of the training mathematics, from its formulas in float64 loops of plain numpy.

Independent of psrl: run `python tests/golden/make_train_math.py` to make them again.
"""

import json
import math
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RNG = np.random.default_rng(20240)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def holes(rows: int, width: int) -> np.ndarray:
    mask = (RNG.random((rows, width)) < 0.6).astype(float)
    mask[0, 0] = mask[1, 1] = 1.0
    return mask


def write(name: str, cases: list[dict]) -> None:
    text = json.dumps({"dtype": "float64", "made_by": Path(__file__).name, "cases": cases}, indent=1)
    (HERE / name).write_text(text + "\n")


def masked_case(number: int, values: np.ndarray, mask: np.ndarray) -> dict:
    picked = values[mask == 1]
    mean = picked.sum() / max(len(picked), 1)
    rows = [float(v[m == 1].mean()) if m.any() else 0.0 for v, m in zip(values, mask)]
    biased = float(((picked - mean) ** 2).mean()) if len(picked) else 0.0
    error = {"error": "ValueError"}
    few = len(picked) < 2
    unbiased = error if few else biased * len(picked) / (len(picked) - 1)
    whitened = None if few else (values - mean) / math.sqrt(unbiased + 1e-8)
    return {
        "id": f"own-masked-{number}",
        "values": values.tolist(),
        "mask": mask.tolist(),
        "expect": {
            "masked_sum": float(picked.sum()),
            "masked_mean": float(mean),
            "masked_mean_axis1": rows,
            "masked_var_unbiased": unbiased,
            "masked_var_biased": biased,
            "masked_whiten": error if few else whitened.tolist(),
            "masked_whiten_keepmean": error if few else (whitened + mean).tolist(),
        },
    }


def grpo_case(number: int, norm: bool) -> dict:
    index = [0, 1, 0, 1, 0, 2, 1, 3, 3]
    mask = holes(len(index), 4)
    rewards = np.zeros_like(mask)
    rewards[:, -1] = RNG.integers(0, 2, len(index)) + RNG.normal(0, 0.1, len(index))
    scores = rewards.sum(1)
    advantages = np.zeros_like(mask)
    for row, group in enumerate(index):
        members = [scores[i] for i, other in enumerate(index) if other == group]
        mean, std = (0.0, 1.0) if len(members) == 1 else (np.mean(members), np.std(members, ddof=1))
        advantages[row] = (scores[row] - mean) / (std + 1e-6 if norm else 1.0) * mask[row]
    return {
        "id": f"own-grpo-{number}-{'std' if norm else 'nostd'}",
        "estimator": "grpo",
        "params": {"norm_adv_by_std_in_grpo": norm, "epsilon": 1e-6},
        "rewards": rewards.tolist(),
        "mask": mask.tolist(),
        "index": index,
        "expect": {"advantages": advantages.tolist()},
    }


def aggregate(loss: np.ndarray, mask: np.ndarray, mode: str, params: dict) -> float:
    ranks = params.get("dp_size", 1)
    tokens = params.get("batch_num_tokens", mask.sum())
    sequences = params.get("global_batch_size", (mask.sum(1) > 0).sum())
    if mode == "token-mean":
        return float((loss * mask).sum() / tokens * ranks)
    total = 0.0
    for row, kept in zip(loss, mask):
        part = sum(x for x, m in zip(row, kept) if m)
        total += part / (kept.sum() + 1e-8) if mode == "seq-mean-token-mean" else part
    if mode == "seq-mean-token-sum-norm":
        total /= params.get("loss_scale_factor", mask.shape[1])
    return float(total / sequences * ranks)


def agg_case(mode: str, kind: str) -> dict:
    loss, mask = RNG.normal(size=(4, 5)), holes(4, 5)
    mask[3] = 0
    counts = {"dp_size": 2, "batch_num_tokens": 23, "global_batch_size": 9}
    params = {"local": {}, "global": counts, "missing": {"dp_size": 2}}[kind]
    expect = {"error": "ValueError"} if kind == "missing" else aggregate(loss, mask, mode, params)
    return {
        "id": f"own-agg-{mode}-{kind}",
        "loss_mat": loss.tolist(),
        "mask": mask.tolist(),
        "loss_agg_mode": mode,
        "params": params,
        "expect": expect,
    }


def token_loss(delta: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, bool, bool]:
    ratio = math.exp(max(-20.0, min(20.0, delta)))
    plain, bounded = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    loss = max(plain, bounded)
    lower = advantage < 0 and loss > -advantage * dual
    return (-advantage * dual if lower else loss), bounded > plain, lower


def policy_case(name: str, mode: str, low: float, high: float, dual: float, spread: float) -> dict:
    shape, mask = (3, 6), holes(3, 6)
    old = -RNG.random(shape) * 3
    new = old + RNG.normal(0, spread, shape)
    advantages = RNG.normal(size=(3, 1)) * mask
    losses, clipped, lower = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def loss_of(log_probs: np.ndarray) -> float:
        for at in np.ndindex(shape):
            losses[at], clipped[at], lower[at] = token_loss(log_probs[at] - old[at], advantages[at], low, high, dual)
        return aggregate(losses, mask, mode, {})

    gradient, step = np.zeros(shape), 1e-6
    for at in np.ndindex(shape):  # central differences
        if mask[at]:
            up, down = new.copy(), new.copy()
            up[at] += step
            down[at] -= step
            gradient[at] = (loss_of(up) - loss_of(down)) / (2 * step)
    loss = loss_of(new)
    mean = lambda x: float((x * mask).sum() / mask.sum())  # noqa: E731
    return {
        "id": f"own-{name}-{mode}",
        "loss_mode": "vanilla",
        "loss_agg_mode": mode,
        "params": {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual, "global_batch_info": {}},
        "old_log_prob": old.tolist(),
        "log_prob": new.tolist(),
        "advantages": advantages.tolist(),
        "mask": mask.tolist(),
        "rollout_is_weights": None,
        "expect": {
            "loss": loss,
            "metrics": {
                "actor/pg_clipfrac": mean(clipped),
                "actor/pg_clipfrac_lower": mean(lower),
                "actor/ppo_kl": mean(old - new),
            },
            "grad_log_prob": gradient.tolist(),
        },
    }


def main() -> None:
    masks = [holes(3, 5) for _ in range(3)] + [np.zeros((3, 5)), np.eye(3, 5) * [[1], [0], [0]]]
    write("train_masked.json", [masked_case(i, RNG.normal(0, 5, (3, 5)), mask) for i, mask in enumerate(masks)])
    write("train_advantages.json", [grpo_case(i, norm) for i in range(3) for norm in (True, False)])
    write("train_agg_loss.json", [agg_case(m, k) for m in MODES for k in ("local", "global", "missing")])
    settings = [("vanilla", 0.2, 0.2, 3.0, 0.3), ("dapo", 0.2, 0.28, 10.0, 0.3), ("dual", 0.2, 0.2, 1.5, 1.5)]
    write("train_policy_loss.json", [policy_case(n, m, *rest) for n, *rest in settings for m in MODES])


if __name__ == "__main__":
    main()
