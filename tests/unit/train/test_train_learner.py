"""What a learner's settings mean: the sampling temperature, the sign of the entropy bonus, several passes."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from train_rank_work import make_config, make_rows
from transformers import AutoModelForCausalLM

from psrl.config.schema import GenActorRolloutRef, GenRollout
from psrl.train.learner import Learner
from psrl.train.model import load
from psrl.train.packing import plan
from psrl.train.ranks import Ranks


@pytest.fixture
def directory(tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path


def make_learner(directory: Path, *, temperature: float = 1.0, **actor: object) -> Learner:
    rollout = GenActorRolloutRef(rollout=GenRollout(temperature=temperature))
    config = msgspec.structs.replace(make_config(directory, **actor), gen_actor_rollout_ref=rollout)
    return Learner(load(directory / "model"), config, Ranks.alone())


def test_log_probs_and_ratio_are_of_the_distribution_that_was_sampled(directory) -> None:
    rows = make_rows()
    cut = plan(range(len(rows)), [row.num_tokens for row in rows], 1, 200)
    learner = make_learner(directory, temperature=0.7)
    found, _ = learner.log_probs(rows, [cut])
    lm = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    for number, row in enumerate(rows):
        ids = torch.from_numpy(np.concatenate([row.prompts, row.responses]).astype(np.int64))
        with torch.no_grad():
            logits = lm(ids[None]).logits[0, len(row.prompts) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(-1, ids[len(row.prompts) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(found[number]), expected, atol=1e-4, rtol=1e-4)
    sums = learner.backward(rows, cut, found, dict.fromkeys(range(len(rows)), 1.0))
    assert sums["ppo_kl"] == pytest.approx(0.0, abs=1e-3)


def test_the_entropy_bonus_raises_the_entropy(directory) -> None:
    rows = make_rows()
    cut = plan(range(len(rows)), [row.num_tokens for row in rows], 1, 200)
    learner = make_learner(directory, entropy_coeff=0.5)
    old, before = learner.log_probs(rows, [cut])
    learner.update(rows, cut, old, dict.fromkeys(range(len(rows)), 0.0), 1e-3)
    assert learner.log_probs(rows, [cut])[1] > before + 1e-3
