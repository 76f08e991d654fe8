"""Policy loss and its aggregation over packed tokens. Pure.

A batch is flat: N tokens, the sequence of each (`sequences` [N], ids 0..num_sequences-1), and a mask [N] that is
1 for trained tokens. A padded [B, T] batch is the same thing flattened, with row numbers for ids.

Every micro-batch divides by the counts of the whole mini-batch over all ranks (`Scope`), gradients are summed
over micro-batches and averaged over ranks. So neither the cut into micro-batches nor the number of ranks changes
the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from psrl.config.schema import Actor
from psrl.train.masked import masked_mean

_EPS = 1e-8
_MAX_LOG_RATIO = 20.0

AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@dataclass(frozen=True, slots=True)
class Scope:
    """What a loss is divided by: counts over the mini-batch on all ranks. None: counted in the batch (one rank)."""

    num_tokens: int | None = None  # trained tokens
    num_sequences: int | None = None
    world_size: int = 1  # undoes the averaging of gradients over ranks


@dataclass(frozen=True, slots=True)
class Tokens:
    """Packed per-token columns of one micro-batch."""

    mask: Tensor  # [N] bool or 0/1
    sequences: Tensor  # [N] int64
    num_sequences: int


def _per_sequence(values: Tensor, tokens: Tokens) -> Tensor:
    """Sums of [N] values under the mask, by sequence: [num_sequences]."""
    kept = torch.where(tokens.mask.bool(), values, torch.zeros_like(values))
    return torch.zeros(tokens.num_sequences, dtype=values.dtype, device=values.device).index_add(
        0, tokens.sequences, kept
    )


def agg_loss(
    loss: Tensor, tokens: Tokens, mode: str, *, scope: Scope = Scope(), scale_factor: float | None = None
) -> Tensor:
    """One number from the token losses [N].

    A count that `scope` leaves out is taken from this batch: its trained tokens, or its sequences with any of them.
    `scale_factor` is the constant of seq-mean-token-sum-norm. Raises ValueError for an unknown mode, when that
    constant is missing, and when there are several ranks but no global count.
    """
    if mode not in AGG_MODES:
        raise ValueError(f"loss_agg_mode={mode!r} is not known; choose one of {', '.join(AGG_MODES)}")
    sums = _per_sequence(loss, tokens)
    lengths = _per_sequence(torch.ones_like(loss), tokens)
    count = scope.num_tokens if mode == "token-mean" else scope.num_sequences
    if count is None and scope.world_size > 1:
        raise ValueError(f"{mode} on {scope.world_size} ranks needs the counts of the whole mini-batch")
    if mode == "token-mean":
        divisor = lengths.sum().clamp(min=1) if count is None else count
        total = sums.sum()
    else:
        divisor = (lengths > 0).sum().clamp(min=1) if count is None else count
        total = (sums / (lengths + _EPS)).sum() if mode == "seq-mean-token-mean" else sums.sum()
        if mode == "seq-mean-token-sum-norm":
            if scale_factor is None:
                raise ValueError("loss_agg_mode='seq-mean-token-sum-norm' needs loss_scale_factor")
            total = total / scale_factor
    return total / divisor * scope.world_size


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Per token [N]: the loss (with gradient), and what is counted about it (without)."""

    loss: Tensor
    clipped: Tensor  # the upper or lower ratio bound decided
    dual_clipped: Tensor  # the dual clip decided (negative advantage)
    neg_log_ratio: Tensor  # estimate of KL(old || new)

    def means(self, mask: Tensor) -> dict[str, Tensor]:
        """The metrics of one batch, by name."""
        return {
            "actor/pg_clipfrac": masked_mean(self.clipped, mask),
            "actor/ppo_kl": masked_mean(self.neg_log_ratio, mask),
            "actor/pg_clipfrac_lower": masked_mean(self.dual_clipped, mask),
        }


PolicyLoss = Callable[[Tensor, Tensor, Tensor], PolicyTerms]
"""(log_probs [N], old_log_probs [N], advantages [N]) -> PolicyTerms."""


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
    weights: Tensor | None = None,
) -> PolicyTerms:
    """PPO's clipped loss with its own bound on each side, and the dual clip for negative advantages.

    `weights` [N], if given, multiply the token losses (importance weights of a rollout correction).
    Raises ValueError if clip_dual <= 1.
    """
    if clip_dual <= 1.0:
        raise ValueError(f"clip_ratio_c must be greater than 1, got {clip_dual}")
    log_ratio = (log_probs - old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    upper = torch.maximum(plain, bounded)
    dual = -advantages * clip_dual
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(upper, dual), upper)
    with torch.no_grad():
        clipped = (bounded > plain).to(loss.dtype)
        dual_clipped = ((upper > dual) & negative).to(loss.dtype)
    return PolicyTerms(loss if weights is None else loss * weights, clipped, dual_clipped, -log_ratio.detach())


def make_policy_loss(actor: Actor) -> PolicyLoss:
    """The loss that the configuration asks for (DAPO: clip_ratio_high above clip_ratio_low)."""

    def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyTerms:
        return clipped_policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            clip_low=actor.clip_ratio_low,
            clip_high=actor.clip_ratio_high,
            clip_dual=actor.clip_ratio_c,
        )

    return policy_loss
