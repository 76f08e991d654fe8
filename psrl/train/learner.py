"""One rank's share of the work on a batch: log-probs under the current weights, and the update.

All ranks call the same methods with the same arguments (they see the same rows); each computes its own rows and takes
part in the collectives of the sharded model. Sums are over all ranks, so what is returned is the same everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psrl.config.schema import Config
from psrl.train.fsdp import shard
from psrl.train.logprobs import Entropy
from psrl.train.losses import Scope, Tokens, agg_loss, make_policy_loss
from psrl.train.model import PackedLM
from psrl.train.optim import Optimizer, StepResult
from psrl.train.packed import PackedBatch, pack
from psrl.train.packing import Plan
from psrl.train.ranks import Ranks
from psrl.train.rows import Row

RowValues = dict[int, NDArray[np.float32]]
"""Per-token values [T] by row number."""


@dataclass(slots=True)
class Sums:
    """Weighted means over ranks, micro-batches and updates, gathered as sums."""

    totals: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float | Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + float(value)

    def over(self, ranks: Ranks) -> dict[str, float]:
        """Totals over all ranks. Collective; every rank must have added the same names."""
        names = sorted(self.totals)
        return dict(zip(names, ranks.sum([self.totals[name] for name in names])))


class Learner:
    """The policy being trained, its optimizer and its loss."""

    def __init__(self, model: PackedLM, config: Config, ranks: Ranks) -> None:
        actor = config.train_actor_rollout_ref.actor
        shard(model, ranks, actor.fsdp_config)
        self.model, self.ranks = model, ranks
        self.optimizer = Optimizer(
            list(model.weights()),
            ranks,
            lr=actor.optim.lr,
            betas=actor.optim.betas,
            weight_decay=actor.optim.weight_decay,
            grad_clip=actor.grad_clip,
            max_skipped=actor.max_skipped_updates,
        )
        self._actor = actor
        self._policy_loss = make_policy_loss(actor)
        self._temperature = config.gen_actor_rollout_ref.rollout.temperature
        self._scale_factor = actor.loss_scale_factor or config.data.max_response_length
        self.max_tokens = actor.ppo_max_token_len_per_gpu
        self.mini_batch_groups = actor.ppo_mini_batch_size

    def log_probs(self, rows: Sequence[Row], plans: Sequence[Plan]) -> tuple[RowValues, float]:
        """Log-probs of this rank's rows under the current weights, and the entropy of the whole batch."""
        mine: RowValues = {}
        entropy = 0.0
        scope = _scope(rows, range(len(rows)), self.ranks.world_size)
        with torch.no_grad():
            for plan in plans:
                for numbers in plan.micro[self.ranks.rank]:
                    batch = self._pack(rows, numbers)
                    log_probs, entropies = self.model(batch, self._temperature, "value")
                    entropy += self._aggregate(entropies, batch, scope).item()
                    parts = log_probs.cpu().split(batch.target_lengths)
                    mine.update(zip(numbers, (part.numpy() for part in parts)))
        return mine, self.ranks.sum([entropy])[0] / self.ranks.world_size

    def update(
        self,
        rows: Sequence[Row],
        plan: Plan,
        old_log_probs: RowValues,
        advantages: Mapping[int, float],
        lr: float,
    ) -> tuple[StepResult, dict[str, float]]:
        """One optimizer update on the mini-batch of `plan`. `advantages` are per sequence, by row number."""
        totals = self.backward(rows, plan, old_log_probs, advantages)
        result = self.optimizer.step(lr)
        num_tokens = totals.pop("num_tokens")
        metrics = {"actor/pg_loss": totals.pop("pg_loss"), "actor/entropy": totals.pop("entropy")}
        if self._actor.entropy_coeff != 0:
            metrics["actor/entropy_loss"] = metrics["actor/entropy"]
        if num_tokens:
            metrics |= {f"actor/{name}": total / num_tokens for name, total in totals.items()}
        return result, metrics

    def backward(
        self, rows: Sequence[Row], plan: Plan, old_log_probs: RowValues, advantages: Mapping[int, float]
    ) -> dict[str, float]:
        """Accumulate the gradient of the mini-batch of `plan`; its loss and what is counted, as sums over ranks."""
        numbers = [number for rank in range(self.ranks.world_size) for number in plan.rows(rank)]
        scope = _scope(rows, numbers, self.ranks.world_size)
        entropy: Entropy = "gradient" if self._actor.entropy_coeff != 0 else "value"
        sums = Sums()
        for mine in plan.micro[self.ranks.rank]:
            batch = self._pack(rows, mine)
            log_probs, entropies = self.model(batch, self._temperature, entropy)
            old = self._column([old_log_probs[number] for number in mine], batch)
            terms = self._policy_loss(log_probs, old, self._spread(advantages, mine, batch))
            loss = self._aggregate(terms.loss, batch, scope)
            mean_entropy = self._aggregate(entropies, batch, scope)
            torch.autograd.backward(loss - self._actor.entropy_coeff * mean_entropy)
            sums.add("pg_loss", loss.item() / self.ranks.world_size)
            sums.add("entropy", mean_entropy.item() / self.ranks.world_size)
            sums.add("num_tokens", batch.mask.sum())
            sums.add("pg_clipfrac", (terms.clipped * batch.mask).sum())
            sums.add("pg_clipfrac_lower", (terms.dual_clipped * batch.mask).sum())
            sums.add("ppo_kl", (terms.neg_log_ratio * batch.mask).sum())
        return sums.over(self.ranks)

    def _aggregate(self, values: Tensor, batch: PackedBatch, scope: Scope) -> Tensor:
        tokens = Tokens(batch.mask, batch.sequences, batch.num_sequences)
        return agg_loss(values, tokens, self._actor.loss_agg_mode, scope=scope, scale_factor=self._scale_factor)

    def _pack(self, rows: Sequence[Row], numbers: Sequence[int]) -> PackedBatch:
        return pack(
            [rows[number].prompts for number in numbers],
            [rows[number].responses for number in numbers],
            [rows[number].response_mask for number in numbers],
            self.ranks.device,
        )

    def _column(self, parts: Sequence[NDArray[np.float32]], batch: PackedBatch) -> Tensor:
        """Per-token values of a micro-batch's rows: [N]; zeros for an empty one."""
        joined = torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(batch.targets.shape[0])
        return joined.to(self.ranks.device)

    def _spread(self, advantages: Mapping[int, float], numbers: Sequence[int], batch: PackedBatch) -> Tensor:
        per_row = torch.tensor([advantages[number] for number in numbers] or [0.0], device=self.ranks.device)
        return per_row.index_select(0, batch.sequences)


def _scope(rows: Sequence[Row], numbers: Sequence[int], world_size: int) -> Scope:
    """Counts of a mini-batch over all ranks; at least 1 each, so that nothing trained gives 0 and not 0/0."""
    trained = [rows[number].num_trained for number in numbers]
    return Scope(max(sum(trained), 1), max(sum(count > 0 for count in trained), 1), world_size)
