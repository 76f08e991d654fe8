"""Causal attention within each sequence of a packed batch, as an attention function of transformers.

The model is built with attn_implementation=NAME and called with `packed=Layout`. On CUDA in half precision this is
torch's variable-length flash attention; elsewhere SDPA over buckets of similar length, with the same result.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from psrl.train.packed import Bucket, Layout

NAME = "psrl_packed"


def register() -> None:
    """Make NAME known to transformers. Idempotent; called when a model is built, not on import."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """The layout says who sees whom; no mask is ever made."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> ([1, T, H, D], None). Dropout is never applied."""
    window = sliding_window if sliding_window is not None and sliding_window < packed.longest else None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 takes grouped heads as they are, later ones ask for a flag
        flags = {"enable_gqa"} & inspect.signature(varlen_attn).parameters.keys()
        grouped: dict[str, Any] = dict.fromkeys(flags, True)
        result = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            packed.offsets,
            packed.offsets,
            packed.longest,
            packed.longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            **grouped,
        )
        assert isinstance(result, Tensor)  # a tuple only when more than the output is asked for
        return result.unsqueeze(0), None
    outputs = [_bucket_attention(q, k, v, b, packed.restore is None, scaling, window) for b in packed.buckets]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (joined if packed.restore is None else joined.index_select(0, packed.restore)).unsqueeze(0), None


def _bucket_attention(
    q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, in_order: bool, scaling: float | None, window: int | None
) -> Tensor:
    """[T, H, D] -> [num_rows * width, H, D] of one bucket."""

    def rows(x: Tensor) -> Tensor:
        picked = x if in_order else x.index_select(0, bucket.index)
        return picked.reshape(bucket.num_rows, bucket.width, *x.shape[1:]).transpose(1, 2)

    q, k, v = rows(q), rows(k), rows(v)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = None
    if window is not None:
        at = torch.arange(bucket.width, device=q.device)
        ahead = at[:, None] - at[None, :]
        mask = (ahead >= 0) & (ahead < window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2).reshape(bucket.num_rows * bucket.width, *out.shape[1:2], out.shape[3])
