"""AdamW in float32, a warm-up that starts above zero, and updates that are skipped rather than poisoned."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from psrl.config.schema import Optim
from psrl.errors import RunFailed
from psrl.train.fsdp import local, whole
from psrl.train.ranks import Ranks


def learning_rate(config: Optim, step: int, total_steps: int) -> float:
    """The rate of training step `step` (from 0): linear warm-up, then constant.

    The first step trains with lr / warmup, not with 0: a step that changes nothing still costs a step.
    """
    warmup = config.lr_warmup_steps
    if warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    return config.lr * min(1.0, (step + 1) / warmup) if warmup > 0 else config.lr


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer update. `bad_tensor` names the first weight with a non-finite gradient if it was skipped."""

    grad_norm: float  # before clipping; not finite when skipped
    bad_tensor: str = ""

    @property
    def skipped(self) -> bool:
        return bool(self.bad_tensor)


class Optimizer:
    """Clip, check and apply gradients of named weights. Collective: all ranks step together.

    A non-finite gradient skips the update; more than `max_skipped` in a row raise RunFailed with the tensor's name.
    """

    def __init__(
        self,
        weights: Sequence[tuple[str, nn.Parameter]],
        ranks: Ranks,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        grad_clip: float,
        max_skipped: int,
    ) -> None:
        self.names = [name for name, _ in weights]
        self.weights = [weight for _, weight in weights]
        self._ranks, self._grad_clip, self._max_skipped = ranks, grad_clip, max_skipped
        self._adam = torch.optim.AdamW(self.weights, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self.num_skipped = 0
        self.skipped_in_a_row = 0

    def step(self, lr: float) -> StepResult:
        """Apply the gradients with rate `lr` and drop them. Raises RunFailed after too many skips in a row."""
        grads = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = whole(nn.utils.get_total_norm(grads))
        if torch.isfinite(norm):
            if norm > self._grad_clip:
                scale = self._grad_clip / (norm + 1e-6)
                for grad in grads:
                    local(grad).mul_(scale.to(grad.device))
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.skipped_in_a_row = 0
            result = StepResult(norm.item())
        else:
            result = StepResult(norm.item(), self._first_bad())
            self.num_skipped += 1
            self.skipped_in_a_row += 1
        self._adam.zero_grad(set_to_none=True)
        if self.skipped_in_a_row > self._max_skipped:
            raise RunFailed(
                f"{self.skipped_in_a_row} updates in a row had non-finite gradients; the first in {result.bad_tensor}"
            )
        return result

    def _first_bad(self) -> str:
        grads = [weight.grad for weight in self.weights]
        bad = [grad is not None and not bool(torch.isfinite(local(grad)).all()) for grad in grads]
        flags = self._ranks.max_tensor(torch.tensor(bad, dtype=torch.int32))
        at = flags.nonzero()
        return self.names[int(at[0])] if len(at) else "the global norm (it overflowed)"

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by `kind/weight name`, sharded as the weights are. Empty before the first step."""
        return {
            f"{kind}/{name}": value
            for name, weight in zip(self.names, self.weights)
            for kind, value in self._adam.state.get(weight, {}).items()
        }

    def make_state(self) -> None:
        """Give every weight zero moments, so that `state` names all tensors that a checkpoint may fill."""
        for weight in self.weights:
            if not self._adam.state.get(weight):
                self._adam.state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                    "exp_avg": torch.zeros_like(weight.detach()),
                    "exp_avg_sq": torch.zeros_like(weight.detach()),
                }
