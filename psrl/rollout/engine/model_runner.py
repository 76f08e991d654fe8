"""Runs a Hugging Face causal LM over cache rows: one new token for the leading rows (decode), or several for some
(prefill)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from psrl.errors import ConfigError
from psrl.rollout.engine import attention
from psrl.rollout.engine.attention import CachedBatch
from psrl.rollout.engine.kv_cache import KVCache

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Chunk(msgspec.Struct, frozen=True):
    """Compute `tokens` of cache row `row`, the first of them at position `start`."""

    row: int
    start: int
    tokens: Sequence[int]


def load_model(
    path: str, *, dtype: str = "auto", device: str = "cpu", override_config: dict[str, Any] | None = None
) -> torch.nn.Module:
    """A causal LM from a directory, ready for inference. dtype auto: bfloat16 on GPU, float32 on CPU. ConfigError if
    it cannot be served."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    if not Path(path).is_dir():
        raise ConfigError(f"train_actor_rollout_ref.model.path: {path} is not a directory")
    wanted = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    if wanted not in _DTYPES:
        raise ConfigError(f"gen_actor_rollout_ref.rollout.dtype: {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    config = AutoConfig.from_pretrained(path, local_files_only=True, **(override_config or {}))
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=_DTYPES[wanted], local_files_only=True, attn_implementation=attention.ATTENTION
    )
    return prepare(model.to(device))


def prepare(model: Any) -> torch.nn.Module:
    """Switch a causal LM to the engine's attention. ConfigError if its architecture cannot be served."""
    attention.register()
    name = type(model).__name__
    if not model.is_backend_compatible():
        raise ConfigError(f"{name} does not use transformers' attention interface: the torch engine cannot serve it")
    strange = set(getattr(model.config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if strange:
        raise ConfigError(f"{name} has layers of type {', '.join(sorted(strange))}: the torch engine cannot serve it")
    model.set_attn_implementation(attention.ATTENTION)
    ready: torch.nn.Module = model.eval().requires_grad_(False)
    return ready


class ModelRunner:
    """Owns nothing but the way in: model and cache are shared with the engine."""

    def __init__(self, model: torch.nn.Module, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._device = next(model.parameters()).device
        self._all_rows = torch.arange(0, device=self._device)

    @torch.inference_mode()
    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Logits [B, V] after int64 [B] tokens at int64 [B] positions of the cache rows 0..B-1."""
        num_rows = len(tokens)
        length = int(positions.max()) + 1
        self._cache.reserve(num_rows, length)
        if num_rows > len(self._all_rows):
            self._all_rows = torch.arange(2 * num_rows, device=self._device)
        position_BT = self._tensor(positions[:, None])
        batch = CachedBatch(self._cache, position_BT, length, self._all_rows[:num_rows], leading=True)
        return self._forward(self._tensor(tokens[:, None]), position_BT, batch)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits [B, V] after the last token of each chunk. Tokens are right-aligned: padding is on the left."""
        num_new = max(len(chunk.tokens) for chunk in chunks)
        length = max(chunk.start + len(chunk.tokens) for chunk in chunks)
        self._cache.reserve(max(chunk.row for chunk in chunks) + 1, length)
        token_BT = np.zeros((len(chunks), num_new), np.int64)
        position_BT = np.zeros_like(token_BT)
        valid_BT = np.zeros(token_BT.shape, np.bool_)
        for index, chunk in enumerate(chunks):
            count = len(chunk.tokens)
            token_BT[index, num_new - count :] = chunk.tokens
            position_BT[index, num_new - count :] = np.arange(chunk.start, chunk.start + count)
            valid_BT[index, num_new - count :] = True
        batch_index, time_index = np.nonzero(valid_BT)
        positions = self._tensor(position_BT)
        batch = CachedBatch(
            self._cache,
            positions,
            length,
            self._tensor(np.array([chunk.row for chunk in chunks], np.int64)),
            leading=False,
            valid=(self._tensor(batch_index), self._tensor(time_index)),
        )
        return self._forward(self._tensor(token_BT), positions, batch)

    def _forward(self, token_BT: torch.Tensor, position_BT: torch.Tensor, batch: CachedBatch) -> torch.Tensor:
        output = self._model(
            input_ids=token_BT, position_ids=position_BT, use_cache=False, logits_to_keep=1, cached_batch=batch
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
