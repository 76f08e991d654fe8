"""Loss aggregation and the clipped policy loss against golden vectors, padded and packed."""

import json
import os
from pathlib import Path

import pytest
import torch

from psrl.config.schema import Actor
from psrl.train.losses import AGG_MODES, Scope, Tokens, agg_loss, clipped_policy_loss, make_policy_loss

OWN = Path(__file__).parents[2] / "golden"


def cases(own_name: str, their_name: str) -> list[dict]:
    own = json.loads((OWN / own_name).read_text())["cases"]
    folder = os.environ.get("PSRL_VECTORS")
    return own + (json.loads((Path(folder) / their_name).read_text())["cases"] if folder else [])


def flat(mask_BT: torch.Tensor) -> Tokens:
    num_rows, width = mask_BT.shape
    return Tokens(mask_BT.flatten(), torch.arange(num_rows).repeat_interleave(width), num_rows)


def packed(mask_BT: torch.Tensor) -> tuple[torch.Tensor, Tokens]:
    """Only the trained tokens, and where they stood."""
    rows, _ = torch.nonzero(mask_BT, as_tuple=True)
    kept = mask_BT.flatten().bool()
    return kept, Tokens(torch.ones(len(rows)), rows, mask_BT.shape[0])


def scope_of(params: dict) -> Scope:
    return Scope(params.get("batch_num_tokens"), params.get("global_batch_size"), params.get("dp_size", 1))


@pytest.mark.parametrize("case", cases("train_agg_loss.json", "agg_loss.json"), ids=lambda case: case["id"])
def test_aggregation_agrees_with_golden(case) -> None:
    loss, mask, params = torch.tensor(case["loss_mat"]), torch.tensor(case["mask"]), case["params"]
    scale = params.get("loss_scale_factor", loss.shape[1])

    def aggregate(rows: slice) -> list[torch.Tensor]:
        kept, tokens = packed(mask[rows])
        common = {"scope": scope_of(params), "scale_factor": scale}
        return [
            agg_loss(loss[rows].flatten(), flat(mask[rows]), case["loss_agg_mode"], **common),
            agg_loss(loss[rows].flatten()[kept], tokens, case["loss_agg_mode"], **common),
        ]

    if isinstance(case["expect"], dict):
        with pytest.raises(ValueError, match="whole mini-batch"):
            aggregate(slice(None))
        return
    for result in aggregate(slice(None)):
        assert result.item() == pytest.approx(case["expect"], abs=1e-5, rel=1e-5)
    for (start, stop), expected in zip(case.get("micro_slices", []), case.get("expect_micro", [])):
        for result in aggregate(slice(start, stop)):
            assert result.item() == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mean-of-means"):
        agg_loss(torch.zeros(1), flat(torch.ones(1, 1)), "mean-of-means")


@pytest.mark.parametrize("mode", AGG_MODES)
def test_nothing_to_train_is_zero_and_differentiable(mode) -> None:
    loss = torch.zeros(3, requires_grad=True)
    result = agg_loss(loss * 2, flat(torch.zeros(1, 3)), mode, scope=Scope(5, 2), scale_factor=4)
    result.backward()
    assert result.item() == 0.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [0.0] * 3


def policy_cases() -> list[dict]:
    return [c for c in cases("train_policy_loss.json", "policy_loss.json") if c["loss_mode"] == "vanilla"]


@pytest.mark.parametrize("case", policy_cases(), ids=lambda case: case["id"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_policy_loss_agrees_with_golden(case, layout) -> None:
    params, mask = case["params"], torch.tensor(case["mask"])
    log_probs = torch.tensor(case["log_prob"], requires_grad=True)
    columns = [log_probs, torch.tensor(case["old_log_prob"]), torch.tensor(case["advantages"])]
    weights = torch.tensor(case["rollout_is_weights"]) if case["rollout_is_weights"] else torch.ones_like(mask)
    keep, tokens = packed(mask) if layout == "packed" else (slice(None), flat(mask))
    terms = clipped_policy_loss(
        *(column.flatten()[keep] for column in columns),
        clip_low=params["clip_ratio_low"],
        clip_high=params["clip_ratio_high"],
        clip_dual=params["clip_ratio_c"],
        weights=weights.flatten()[keep],
    )
    loss = agg_loss(
        terms.loss,
        tokens,
        case["loss_agg_mode"],
        scope=scope_of(params["global_batch_info"]),
        scale_factor=params["global_batch_info"].get("loss_scale_factor", mask.shape[1]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["expect"]["loss"], abs=1e-5, rel=1e-5)
    torch.testing.assert_close(log_probs.grad, torch.tensor(case["expect"]["grad_log_prob"]), atol=1e-5, rtol=1e-5)
    means = terms.means(tokens.mask)
    for name, expected in case["expect"]["metrics"].items():
        assert means[name].item() == pytest.approx(expected, abs=1e-5, rel=1e-5), name


def test_dual_clip_acts_on_the_negative_side_alone() -> None:
    log_probs = torch.tensor([5.0, 5.0], requires_grad=True)
    policy_loss = make_policy_loss(Actor(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0))
    terms = policy_loss(log_probs, torch.zeros(2), torch.tensor([-1.0, 1.0]))
    terms.loss.sum().backward()
    assert terms.loss.tolist() == pytest.approx([3.0, -1.2])
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, 0.0]
    assert terms.dual_clipped.tolist() == [1.0, 0.0]


def test_dual_clip_constant_must_exceed_one() -> None:
    with pytest.raises(ValueError, match="greater than 1"):
        make_policy_loss(Actor(clip_ratio_c=1.0))(torch.zeros(1), torch.zeros(1), torch.zeros(1))
