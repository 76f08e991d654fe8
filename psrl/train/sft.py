"""Supervised fine-tuning: a small, deterministic warm start from (prompt, answer) examples.

The loss is the mean negative log-prob of the answer's tokens, end token included, over the batch. It runs on one
process with the same packed model as reinforcement learning does. Steps are counted, not seconds, so the same seed
gives the same weights on a busy machine.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from psrl.data.prepare.arithmetic import Tokenizer, sft_examples
from psrl.errors import RunFailed
from psrl.train.export import export_model
from psrl.train.model import load
from psrl.train.optim import Optimizer
from psrl.train.packed import pack
from psrl.train.ranks import Ranks

NUM_STEPS = 700

Example = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its answer."""


def word_problems(
    tokenizer: Tokenizer, *, seed: int, num_steps: int, batch: int = 32
) -> Callable[[int], list[Example]]:
    """Examples by step for the embedded default: worked answers alone for 40 % of the steps, then 30 % worked.

    So the model knows how to work a problem out, but usually answers directly: what RL then has to elicit.
    """

    def examples(step: int) -> list[Example]:
        worked_share = 1.0 if step < int(0.4 * num_steps) else 0.3
        return list(sft_examples(batch, worked_share, seed * num_steps + step, tokenizer))

    return examples


def schedule(step: int, num_steps: int, *, warmup: int, decay_share: float = 0.3, final: float = 0.05) -> float:
    """Factor of the learning rate: linear warm-up, constant, linear decay over the last share down to `final`."""
    rate = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    decay = int(num_steps * decay_share)
    left = num_steps - step
    return rate * (final + (1 - final) * left / decay) if decay and left < decay else rate


def warm_start(
    model_dir: str | Path,
    out_dir: str | Path,
    examples: Callable[[int], Sequence[Example]],
    *,
    num_steps: int = NUM_STEPS,
    lr: float = 5e-3,
    warmup: int = 50,
    betas: tuple[float, float] = (0.9, 0.98),
    weight_decay: float = 0.01,
    progress: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train the model of `model_dir` on `examples(step)` for each step and write it to `out_dir`; return the losses.

    Gradients are not clipped: with clipping the direct answers get too good too early for anything to be elicited.
    `out_dir` becomes a complete Hugging Face directory (config, tokenizer files, float32 weights); it may be
    `model_dir` itself. `progress(step, loss)` is called after each step. Raises RunFailed for a non-finite gradient.
    """
    model = load(model_dir)
    optimizer = Optimizer(
        list(model.weights()),
        Ranks.alone(),
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
        grad_clip=math.inf,
        max_skipped=0,
    )
    losses = []
    for step in range(num_steps):
        prompts, answers = zip(*examples(step), strict=True)
        batch = pack(prompts, answers)
        log_probs, _ = model(batch)
        loss = -log_probs.mean()
        loss.backward()
        optimizer.step(lr * schedule(step, num_steps, warmup=warmup))
        losses.append(loss.item())
        if progress:
            progress(step, losses[-1])
    if not all(torch.isfinite(weight).all() for _, weight in model.weights()):
        raise RunFailed("warm start ended with non-finite weights")
    export_model(model_dir, out_dir, {name: weight.detach() for name, weight in model.weights()})
    return losses
