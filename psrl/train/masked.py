"""Sums, means and variances over the entries where a mask is 1.

Values under mask 0 are replaced by 0 before anything is computed, so NaN padding is harmless.
All functions take tensors of any one shape; `mask` has the shape of `values` and holds 0 or 1.
"""

import torch
from torch import Tensor

_EPS = 1e-8


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where mask is 1, over all entries or along `dim`."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where mask is 1; 0 where the mask is all 0."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / (count + _EPS)


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance where mask is 1; with `unbiased`, scaled by n / (n - 1).

    Raises ValueError if `unbiased` and the mask selects fewer than two entries.
    """
    centred = torch.where(mask.bool(), values - masked_mean(values, mask), torch.zeros_like(values))
    variance = masked_mean(centred**2, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count.item() < 2:
        raise ValueError(f"an unbiased variance needs at least two entries under the mask, got {int(count.item())}")
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(values - mean) / std with the statistics under the mask, applied to all entries.

    With `shift_mean` False the mean is added back. Raises ValueError as masked_var does.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + _EPS)
    return whitened if shift_mean else whitened + mean
