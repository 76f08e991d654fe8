"""Run by the tests in real trainer processes: `python train_rank_work.py WHAT RANK WORLD PORT DIRECTORY`.

Each function stands for one rank; what it finds it writes to DIRECTORY as safetensors for the test to compare.
"""

import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from psrl.config.schema import Actor, Config, Data, Model, Optim, TrainActorRolloutRef
from psrl.train.fsdp import whole
from psrl.train.learner import Learner
from psrl.train.model import load
from psrl.train.packing import Plan, plan
from psrl.train.ranks import Ranks
from psrl.train.rows import Row

RESPONSE_LENGTHS = (3, 50, 7, 90, 12, 5)
UNTRAINED = 4  # this row has no trained token: with a small budget, a micro-batch of its own


def make_config(directory: Path, mode: str = "token-mean", **actor: object) -> Config:
    settings = Actor(loss_agg_mode=mode, clip_ratio_high=0.28, entropy_coeff=0.01, optim=Optim(lr=1e-3))
    return Config(
        data=Data(train_files="", val_files="", max_response_length=100),
        train_actor_rollout_ref=TrainActorRolloutRef(
            model=Model(path=str(directory / "model")), actor=msgspec.structs.replace(settings, **actor)
        ),
    )


def make_rows() -> list[Row]:
    rng = np.random.default_rng(3)
    rows = []
    for number, length in enumerate(RESPONSE_LENGTHS):
        mask = (rng.random(length) < 0.9).astype(np.uint8) if number != UNTRAINED else np.zeros(length, np.uint8)
        rows.append(
            Row(
                key=f"{number}",
                group=number // 2,
                staleness=0,
                prompts=rng.integers(0, 61, 2 + number).astype(np.int32),
                responses=rng.integers(0, 61, length).astype(np.int32),
                response_mask=mask,
                rollout_log_probs=-rng.random(length).astype(np.float32),
                rollout_versions=np.zeros(length, np.int32),
                raw_score=float(number % 2),
                reward=float(number % 2),
            )
        )
    return rows


def gradients(ranks: Ranks, directory: Path) -> None:
    """Gradients of each aggregation mode, packed generously and one by one."""
    rows = make_rows()
    lengths = [row.num_tokens for row in rows]
    rng = np.random.default_rng(4)
    advantages = {number: float(rng.normal()) for number in range(len(rows))}
    noise = [rng.normal(0, 0.2, length).astype(np.float32) for length in RESPONSE_LENGTHS]
    found: dict[str, torch.Tensor] = {}
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
        learner = Learner(load(directory / "model", checkpointing=True), make_config(directory, mode), ranks)
        for name, budget in (("packed", 1000), ("single", max(lengths))):
            cut = plan(range(len(rows)), lengths, ranks.world_size, budget)
            if name == "single" and ranks.world_size == 1:
                cut = Plan((tuple((number,) for number in range(len(rows))),))
            old, entropy = learner.log_probs(rows, [cut])
            old = {number: values + noise[number] for number, values in old.items()}
            sums = learner.backward(rows, cut, old, advantages)
            for weight_name, weight in learner.model.weights():
                assert weight.grad is not None, weight_name
                found[f"{mode}/{name}/{weight_name}"] = whole(weight.grad).clone()
                weight.grad = None
            found[f"{mode}/{name}/loss"] = torch.tensor([sums["pg_loss"], entropy])
    if ranks.first:
        save_file(found, directory / f"gradients_{ranks.world_size}.safetensors")


WORK = {"gradients": gradients}


def main() -> None:
    what, rank, world_size, port, directory = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Ranks.join(
        int(rank), int(world_size), device_type="cpu", master_addr="127.0.0.1", master_port=int(port), timeout_s=60
    )
    WORK[what](ranks, Path(directory))
    ranks.leave()


if __name__ == "__main__":
    main()
