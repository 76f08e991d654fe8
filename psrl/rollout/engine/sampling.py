"""Draws tokens and says how probable they were.

Order: logits / temperature, then top-k, then top-p over what top-k left, then renormalise. The token is drawn by
inverting the cumulative distribution (in float64) at one uniform number per row, so a masked token can never be
drawn. The log-prob is that of the distribution that was sampled, in float32.

Temperature 0 is greedy: the first largest logit. Its log-prob is reported under the untruncated distribution at
temperature 1 (under its own, degenerate distribution it would always be 0, which says nothing).

Legend: B rows, V vocabulary.
"""

import numpy as np
import numpy.typing as npt
import torch

# Logits at a time: bounds the float64 cumulative sums to 32 MiB on the host, 512 MiB on a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}


class SamplingRows:
    """Sampling settings of B rows, as arrays on the host."""

    __slots__ = ("temperature", "top_k", "top_p", "uniform")

    def __init__(
        self,
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float32],
        uniform: npt.NDArray[np.float64],
    ) -> None:
        self.temperature, self.top_k, self.top_p, self.uniform = temperature, top_k, top_p, uniform

    def __getitem__(self, rows: slice) -> "SamplingRows":
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.uniform[rows])


def sample(logits_BV: torch.Tensor, rows: SamplingRows) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of B rows. A row whose logits are not finite (NaN, +inf, all -inf) has log-prob NaN."""
    num_rows, num_tokens = logits_BV.shape
    chunk = max(1, _CHUNK_ELEMENTS.get(logits_BV.device.type, 1 << 22) // num_tokens)
    parts = [slice(start, start + chunk) for start in range(0, num_rows, chunk)]
    drawn = [_sample(logits_BV[part], rows[part]) for part in parts]
    # One wait for the device: everything before it is only queued there.
    both = torch.cat([torch.stack([token_B.double(), log_prob_B.double()]) for token_B, log_prob_B in drawn], dim=1)
    tokens, log_probs = both.tolist()
    return [int(token) for token in tokens], log_probs


def _sample(logits_BV: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    device = logits_BV.device
    scores_BV = logits_BV.float()
    greedy = rows.temperature <= 0
    if (rows.temperature != 1).any():
        divisor = torch.from_numpy(np.where(greedy, np.float32(1), rows.temperature)).to(device)
        scores_BV = scores_BV / divisor[:, None]
    truncated = np.flatnonzero(((rows.top_k > 0) | (rows.top_p < 1)) & ~greedy)
    if len(truncated):
        scores_BV = _truncate(scores_BV, truncated, rows)

    log_total_B = torch.logsumexp(scores_BV, dim=-1)
    if greedy.all():
        token_B = scores_BV.argmax(dim=-1)
    else:
        token_B = _invert(scores_BV, log_total_B, torch.from_numpy(rows.uniform).to(device))
        if greedy.any():
            token_B = torch.where(torch.from_numpy(greedy).to(device), scores_BV.argmax(dim=-1), token_B)
    log_prob_B = scores_BV.gather(1, token_B[:, None])[:, 0] - log_total_B
    # A NaN anywhere in a row makes log_total NaN; +inf makes it inf, and inf - inf is NaN, but a drawn finite score
    # must not pass.
    return token_B, torch.where(torch.isfinite(log_total_B), log_prob_B, torch.nan)


def _invert(scores_BV: torch.Tensor, log_total_B: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number: never one of probability 0."""
    probs_BV = torch.exp(scores_BV - log_total_B[:, None])
    cumulative_BV = torch.cumsum(probs_BV, dim=-1, dtype=torch.float64)
    total_B = cumulative_BV[:, -1]
    # u < 1, but u * total may round up to total.
    target_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    token_B = torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]
    return token_B.clamp_(max=scores_BV.shape[1] - 1)  # rows of NaN


def _truncate(scores_BV: torch.Tensor, truncated: npt.NDArray[np.intp], rows: SamplingRows) -> torch.Tensor:
    """-inf outside top-k and top-p in the rows `truncated`. Ties go to the smaller id; at least one token is kept."""
    device = scores_BV.device
    index = torch.from_numpy(truncated).to(device)
    num_tokens = scores_BV.shape[1]
    top_k = torch.from_numpy(np.where(rows.top_k[truncated] > 0, rows.top_k[truncated], num_tokens)).to(device)
    top_p = torch.from_numpy(rows.top_p[truncated].astype(np.float64)).to(device)
    sorted_, order = torch.sort(scores_BV[index], dim=-1, descending=True, stable=True)
    keep = torch.arange(num_tokens, device=device) < top_k[:, None]
    probs = torch.softmax(sorted_.masked_fill(~keep, -torch.inf), dim=-1)
    before = torch.cumsum(probs, dim=-1, dtype=torch.float64) - probs  # mass of all more probable tokens
    keep &= (before < top_p[:, None]) | (torch.arange(num_tokens, device=device) == 0)
    kept = torch.empty_like(sorted_).scatter_(1, order, sorted_.masked_fill(~keep, -torch.inf))
    return scores_BV.index_copy(0, index, kept)
