"""Advantages of whole sequences relative to their group. Pure.

An estimator takes one score per sequence and the group of each, and returns one advantage per sequence;
`spread` lays it over the trained tokens, packed or padded.

Shapes: B sequences; N packed tokens of all sequences.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from psrl.config.schema import Algorithm

_EPS = 1e-6

Estimator = Callable[[Tensor, Tensor], Tensor]
"""(scores [B] float, groups [B] integer ids) -> advantages [B]."""


def grpo(scores: Tensor, groups: Tensor, *, norm_by_std: bool = True, min_spread: float = 0.0) -> Tensor:
    """(score - mean) / (std + 1e-6) within each group, std with n - 1; the mean alone without `norm_by_std`.

    A group whose scores differ by no more than `min_spread` (largest minus smallest, as dynamic sampling has it) gets
    advantage 0 if `min_spread` > 0.
    A group of one keeps its score (mean 0, std 1): whoever drops such groups does it before.
    """
    _, slots = torch.unique(groups, return_inverse=True)
    num_groups = int(slots.max().item()) + 1 if slots.numel() else 0
    exact = scores.double()  # equal scores must have spread 0, which float32 sums don't grant
    zeros = torch.zeros(num_groups, dtype=exact.dtype, device=scores.device)
    count = zeros.index_add(0, slots, torch.ones_like(exact))
    single = count == 1
    mean = torch.where(single, zeros, zeros.index_add(0, slots, exact) / count)
    centred = exact - mean[slots]
    variance = zeros.index_add(0, slots, centred**2) / (count - 1).clamp(min=1)
    std = torch.where(single, torch.ones_like(zeros), variance.sqrt())
    result = centred / (std[slots] + _EPS) if norm_by_std else centred
    if min_spread > 0:
        largest = zeros.scatter_reduce(0, slots, exact, "amax", include_self=False)
        smallest = zeros.scatter_reduce(0, slots, exact, "amin", include_self=False)
        differ = single | (largest - smallest > min_spread)
        result = torch.where(differ[slots], result, torch.zeros_like(result))
    return result.to(scores.dtype)


def spread(advantages: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Lay advantages [B] over packed tokens: [N] float, 0 where mask [N] is 0. `lengths` [B] sum to N."""
    return torch.repeat_interleave(advantages, lengths) * mask.to(advantages.dtype)


def make_estimator(algorithm: Algorithm) -> Estimator:
    """The estimator that the configuration names. Raises ValueError for an unknown name."""
    if algorithm.adv_estimator != "grpo":
        raise ValueError(f"algorithm.adv_estimator={algorithm.adv_estimator!r} is not known; there is 'grpo'")

    def estimate(scores: Tensor, groups: Tensor) -> Tensor:
        return grpo(
            scores,
            groups,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            min_spread=algorithm.min_spread,
        )

    return estimate
