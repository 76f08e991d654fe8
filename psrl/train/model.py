"""A Hugging Face causal LM that takes packed batches and gives log-probs.

Weights are float32 masters whatever the file holds; compute precision is the sharding's business (`psrl.train.fsdp`).
Parameter names are those of Hugging Face, with tied weights once.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from psrl.errors import ConfigError
from psrl.train import attention
from psrl.train.hf_config import load_config, named_errors
from psrl.train.logprobs import Entropy, token_log_probs
from psrl.train.packed import PackedBatch, pack


class PackedLM(nn.Module):
    """The causal LM `lm`, called with a PackedBatch. One forward covers the model and its head, so that a sharded root
    has its own weights whole while log-probs are computed."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: PackedBatch, temperature: float = 1.0, entropy: Entropy = "none") -> tuple[Tensor, Tensor]:
        """Log-probs [N] of the targets and entropies [N] (float32) at `temperature`."""
        output = self.lm.base_model(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, packed=batch.layout
        )
        hidden = output.last_hidden_state[0].index_select(0, batch.sources)
        head = self.lm.get_output_embeddings()
        return token_log_probs(
            hidden, head.weight, getattr(head, "bias", None), batch.targets, temperature=temperature, entropy=entropy
        )

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, each storage once."""
        return cast("Iterator[tuple[str, nn.Parameter]]", self.lm.named_parameters())

    def layers(self) -> list[nn.Module]:
        """The repeated blocks, the units of sharding and of activation checkpointing."""
        names = set(self.lm._no_split_modules or ())
        return [module for module in self.lm.modules() if type(module).__name__ in names]


def load(path: str | Path, *, override_config: dict[str, Any] | None = None, checkpointing: bool = False) -> PackedLM:
    """The model of a Hugging Face directory, float32, on the CPU, in training mode without dropout.

    Raises ConfigError for a directory that is none, an unknown config key, weights that are not finite, or an
    architecture whose packed log-probs differ from its own logits.
    """
    attention.register()
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"train_actor_rollout_ref.model.path={path} is not a Hugging Face directory: no config.json")
    config = load_config(path, override_config or {})
    with named_errors(path):
        lm = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation=attention.NAME, local_files_only=True
        )
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _refuse_nonfinite(lm, path)
    _warn_if_untied(path, config)
    model = PackedLM(lm)
    model.train()
    _check(model, path)
    if checkpointing:
        # transformers renamed it within version 5
        enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _refuse_nonfinite(lm: Any, path: Path) -> None:
    broken = [name for name, weight in lm.named_parameters() if not torch.isfinite(weight).all()]
    if broken:
        raise ConfigError(
            f"train_actor_rollout_ref.model.path={path}: the weights hold NaN or infinity, in {len(broken)} tensors, "
            f"the first: {broken[0]}"
        )


def _warn_if_untied(path: Path, config: Any) -> None:
    """Tied in the config, but the file holds a head that differs from the embedding: the head is ignored."""
    file = path / "model.safetensors"
    if not getattr(config, "tie_word_embeddings", False) or not file.is_file():
        return
    with safe_open(file, "pt") as tensors:
        names = set(tensors.keys())
        if {"lm_head.weight", "model.embed_tokens.weight"} <= names and not torch.equal(
            tensors.get_tensor("lm_head.weight"), tensors.get_tensor("model.embed_tokens.weight")
        ):
            warnings.warn(f"{file}: tie_word_embeddings is set, but lm_head differs from embed_tokens", stacklevel=3)


def _check(model: PackedLM, path: Path) -> None:
    """Packed log-probs must be those of the model's own logits (soft caps, logit scales and the like break this)."""
    vocabulary = model.lm.config.vocab_size
    ids = [[(7 * i + 3 * s) % vocabulary for i in range(4 + s)] for s in range(2)]
    with torch.no_grad():
        ours, _ = model(pack([row[:2] for row in ids], [row[2:] for row in ids]))
        expected = []
        for row in ids:
            batch = pack([row[:1]], [row[1:]])
            logits = model.lm(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids[None],
                use_cache=False,
                packed=batch.layout,
            ).logits[0]
            expected.append(torch.log_softmax(logits.float(), -1).gather(-1, batch.targets[:, None])[1:, 0])
    if not torch.allclose(ours, torch.cat(expected), atol=1e-3, rtol=1e-3):
        raise ConfigError(
            f"{path}: {type(model.lm).__name__} is not supported: packed log-probs differ from its own logits"
        )
