"""Attention of a Hugging Face model over the engine's own cache.

transformers calls the function registered as `ATTENTION` with the layer's queries, keys and values after position
embedding. It writes the new keys and values into the cache and attends over the rows of the batch. The batch travels
as the keyword argument `cached_batch` of the model's forward. Nothing of transformers' own cache and mask machinery
runs.

Legend: B rows, H query heads, K key heads, G = H / K, T new tokens per row (right-aligned, so the last is at T - 1),
L cached length, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F

from psrl.errors import EngineError
from psrl.rollout.engine.kv_cache import KVCache

ATTENTION = "psrl_cached"

# What a layer may hand over beside q, k, v without changing the result of plain scaled dot-product attention here.
_HARMLESS = frozenset({"position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states",
                       "is_causal", "cache_position", "return_dict", "output_router_logits"})  # fmt: skip


def register() -> None:
    """Make `ATTENTION` known to transformers. Idempotent; called when an engine is built, not on import."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, cached_attention)


class CachedBatch:
    """One forward pass: where its keys and values go and what each token may see.

    position_BT: position of each token in its row; padding has position 0 and is not written.
    rows: the cache rows of the batch; None for the first B rows (decode: no gather).
    valid: (batch index, time index) of the tokens that are not padding; None when all are and T = 1.
    """

    def __init__(
        self,
        cache: KVCache,
        position_BT: torch.Tensor,
        length: int,
        rows: torch.Tensor,
        *,
        leading: bool,
        valid: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._cache, self._position_BT, self._length = cache, position_BT, length
        self._rows, self._leading, self._valid = rows, leading, valid
        self._masks: dict[int | None, torch.Tensor] = {}
        if valid is None:
            self._write_index = (rows, position_BT[:, 0])
        else:
            self._write_index = (rows[valid[0]], position_BT[valid])

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key and value [B, K, T, D]; return all of the batch's rows up to its length, [B, K, L, D]."""
        keys, values = self._cache.layer(layer, key, value)
        row, position = self._write_index
        if self._valid is None:
            keys[row, :, position] = key[:, :, 0]
            values[row, :, position] = value[:, :, 0]
        else:
            batch, time = self._valid
            keys[row, :, position] = key[batch, :, time]
            values[row, :, position] = value[batch, :, time]
        if self._leading:
            return keys[: key.shape[0], :, : self._length], values[: key.shape[0], :, : self._length]
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive [B, 1, T, L]: a token sees the positions up to its own (within `window`). The same for
        all layers."""
        known = self._masks.get(window)
        if known is None:
            at = torch.arange(self._length, device=self._position_BT.device)
            hidden = at > self._position_BT[..., None]
            if window is not None:
                hidden |= at <= self._position_BT[..., None] - window
            known = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = known = known[:, None]
        return known


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cached_batch: CachedBatch,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D] over the cache; returns [B, T, H, D]. Raises EngineError for kinds of attention it does not
    know."""
    unknown = [name for name, setting in others.items() if setting is not None and name not in _HARMLESS]
    if unknown or dropout:
        raise EngineError(
            f"{type(module).__name__} wants attention with {', '.join(unknown) or 'dropout'}: not supported"
        )
    keys, values = cached_batch.store(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    num_rows, num_heads, num_new, head_size = query.shape
    num_key_heads = key.shape[1]
    groups = num_heads // num_key_heads
    mask = cached_batch.mask(sliding_window, query.dtype)
    if num_new == 1:  # heads of a group share their keys: fold the group into the query's length
        query = query.reshape(num_rows, num_key_heads, groups, head_size)
    elif groups > 1:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(num_rows, num_heads, num_new, -1).transpose(1, 2), None
