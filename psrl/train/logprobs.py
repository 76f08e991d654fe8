"""Log-probs and entropies from hidden states, chunk by chunk.

The [tokens, vocabulary] matrix never exists whole, in forward or backward: with more than one chunk each is
recomputed in backward. Logits are float32 and divided by the sampling temperature.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Entropy = Literal["none", "value", "gradient"]
"""Whether entropies are computed, and whether they carry a gradient."""

_CHUNK_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 25}  # logits alive at once: 512 and 128 MiB of float32


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [N, H], head weight [V, H], targets [N] -> log-probs [N] and entropies [N], both float32.

    Entropies are zeros with entropy="none".
    """
    size = chunk_tokens or max(_CHUNK_ELEMENTS.get(weight.device.type, 1 << 25) // weight.shape[0], 16)
    if hidden.shape[0] <= size:
        return _chunk(hidden, weight, bias, targets, temperature, entropy)
    parts = []
    for start in range(0, hidden.shape[0], size):
        args = (hidden[start : start + size], weight, bias, targets[start : start + size], temperature, entropy)
        parts.append(checkpoint(_chunk, *args, use_reentrant=False) if torch.is_grad_enabled() else _chunk(*args))
    return torch.cat([log_probs for log_probs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight, bias).float()
    if temperature != 1.0:
        logits = logits / temperature
    norm = torch.logsumexp(logits, -1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - norm
    if entropy == "none":
        return log_probs, torch.zeros_like(log_probs)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        entropies = norm - (torch.exp(logits - norm[:, None]) * logits).sum(-1)
    return log_probs, entropies
