"""Run by the tests in real trainer processes: `python train_rank_work.py WHAT RANK WORLD PORT DIRECTORY`.

Each function stands for one rank; what it finds it writes to DIRECTORY as safetensors for the test to compare.
"""

import resource
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from psrl.config.schema import Actor, Config, Data, Model, Optim, TrainActorRolloutRef
from psrl.errors import CheckpointError
from psrl.train.checkpoint import Checkpointer
from psrl.train.checkpoint import load as load_checkpoint
from psrl.train.checkpoint_dir import CheckpointDir
from psrl.train.fsdp import whole, whole_weights
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
                mixed_cache=np.zeros(length, np.uint8),
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


def advance(learner: Learner, num_updates: int, first: int = 0) -> None:
    """The same updates on any number of ranks."""
    rows = make_rows()
    lengths = [row.num_tokens for row in rows]
    cut = plan(range(len(rows)), lengths, learner.ranks.world_size, 200)
    for update in range(first, first + num_updates):
        old, _ = learner.log_probs(rows, [cut])
        advantages = {number: float((number + update) % 3 - 1) for number in range(len(rows))}
        learner.update(rows, cut, old, advantages, 1e-3)


def make_checkpointer(learner: Learner, directory: Path) -> Checkpointer:
    return Checkpointer(
        directory / "checkpoints",
        learner,
        base_model=directory / "model",
        run_id="r",
        num_kept=None,
        dtype=torch.float32,
    )


def write_weights(learner: Learner, path: Path) -> None:
    weights = dict(whole_weights(learner.model, torch.float32))
    if learner.ranks.first:
        save_file(weights, path)


def save(ranks: Ranks, directory: Path) -> None:
    """Two updates, a checkpoint, two more updates."""
    learner = Learner(load(directory / "model"), make_config(directory), ranks)
    advance(learner, 2)
    make_checkpointer(learner, directory).save(2, b"state")
    advance(learner, 2, first=2)
    write_weights(learner, directory / "whole.safetensors")


def resume(ranks: Ranks, directory: Path) -> None:
    """The second half, from the checkpoint, on however many ranks there are."""
    learner = Learner(load(directory / "model"), make_config(directory), ranks)
    checkpoint = CheckpointDir(directory / "checkpoints").newest()
    assert checkpoint is not None
    load_checkpoint(checkpoint, learner)
    advance(learner, 2, first=2)
    write_weights(learner, directory / f"resumed_{ranks.world_size}.safetensors")


def save_fails(ranks: Ranks, directory: Path) -> None:
    """Rank 1 cannot write its shard: both ranks say so, nothing is left, and both go on."""
    learner = Learner(load(directory / "model"), make_config(directory), ranks)
    advance(learner, 1)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(CheckpointError, match="rank 1"):
        make_checkpointer(learner, directory).save(1, b"")
    advance(learner, 1)
    assert ranks.sum([1.0]) == [2.0]


def one_dies(ranks: Ranks, directory: Path) -> None:
    """Rank 1 ends by an error in its second update, while rank 0 waits for its gradients."""
    learner = Learner(load(directory / "model"), make_config(directory), ranks)
    advance(learner, 1)
    if ranks.rank == 1:
        raise MemoryError("no memory on rank 1")
    advance(learner, 1)


WORK = {function.__name__: function for function in (gradients, save, resume, save_fails, one_dies)}


def main() -> None:
    what, rank, world_size, port, directory = sys.argv[1:]
    torch.set_num_threads(1)
    # Longer than the test waits: nothing that it wants to see may come from this limit.
    ranks = Ranks.join(
        int(rank), int(world_size), device_type="cpu", master_addr="127.0.0.1", master_port=int(port), timeout_s=900
    )
    WORK[what](ranks, Path(directory))
    ranks.leave()


if __name__ == "__main__":
    main()
