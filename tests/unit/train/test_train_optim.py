"""The learning rate, clipping, and updates that are skipped."""

import math

import pytest
import torch
from torch import nn

from psrl.config.schema import Optim
from psrl.errors import RunFailed
from psrl.train.optim import Optimizer, learning_rate
from psrl.train.ranks import Ranks


def make(max_skipped: int = 1, grad_clip: float = 1.0) -> tuple[Optimizer, nn.Parameter, nn.Parameter]:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = Optimizer(
        [("a", a), ("b", b)],
        Ranks.alone(),
        lr=0.1,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        grad_clip=grad_clip,
        max_skipped=max_skipped,
    )
    return optimizer, a, b


def test_the_first_step_trains() -> None:
    config = Optim(lr=1.0, lr_warmup_steps=4)
    assert [learning_rate(config, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    by_ratio = Optim(lr=1.0, lr_warmup_steps_ratio=0.02)
    assert [learning_rate(by_ratio, step, 100) for step in range(3)] == [0.5, 1.0, 1.0]
    assert learning_rate(Optim(lr=2.0), 0, 100) == 2.0


def test_gradients_are_clipped_by_their_common_norm() -> None:
    optimizer, a, b = make()
    a.grad, b.grad = torch.full((3,), 3.0), torch.full((2,), 3.0)
    given = [a.grad, b.grad]
    result = optimizer.step(0.1)
    assert result.grad_norm == pytest.approx(3 * math.sqrt(5))
    assert torch.cat(given).norm().item() == pytest.approx(1.0, rel=1e-4)
    assert a.grad is None


def test_a_bad_gradient_skips_the_update_and_names_the_tensor() -> None:
    optimizer, a, b = make()
    a.grad, b.grad = torch.ones(3), torch.tensor([1.0, math.nan])
    result = optimizer.step(0.1)
    assert result.skipped
    assert result.bad_tensor == "b"
    assert a.tolist() == [1.0] * 3
    a.grad, b.grad = torch.ones(3), torch.ones(2)
    assert not optimizer.step(0.1).skipped  # the count in a row starts anew
    assert a.tolist() != [1.0] * 3
    for _ in range(2):
        a.grad, b.grad = torch.ones(3) * math.inf, torch.ones(2)
        if optimizer.skipped_in_a_row == 1:
            with pytest.raises(RunFailed, match=r"2 updates in a row .* first in a"):
                optimizer.step(0.1)
        else:
            optimizer.step(0.1)
    assert optimizer.num_skipped == 3


def test_tiny_rates_reach_float32_masters() -> None:
    optimizer, a, b = make()
    for _ in range(100):
        a.grad, b.grad = torch.ones(3), torch.ones(2)
        optimizer.step(1e-6)
    assert a.tolist() == pytest.approx([1 - 1e-4] * 3, abs=2e-6)
    assert a.to(torch.bfloat16).tolist() == [1.0] * 3  # in bf16 nothing would have moved
