"""The warm start: deterministic, learns, and leaves a complete model directory."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from psrl.data.models.tiny import tiny
from psrl.data.tokenizer import ChatTokenizer
from psrl.train.sft import schedule, warm_start, word_problems


def test_schedule_warms_up_holds_and_decays() -> None:
    rates = [schedule(step, 100, warmup=10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:70] == [1.0] * 61
    assert rates[99] == pytest.approx(0.05 + 0.95 / 30)
    assert rates[70:] == sorted(rates[70:], reverse=True)


def test_warm_start_is_deterministic_and_learns(tmp_path) -> None:
    base = tiny(tmp_path / "base")
    examples = word_problems(ChatTokenizer.load(base), seed=0, num_steps=30, batch=8)
    losses = warm_start(base, tmp_path / "warm", examples, num_steps=30, warmup=5)
    assert losses == warm_start(base, tmp_path / "again", examples, num_steps=30, warmup=5)
    assert losses[-1] < 0.6 * losses[0]
    warm, again = (load_file(tmp_path / name / "model.safetensors") for name in ("warm", "again"))
    assert all(torch.equal(warm[name], again[name]) for name in warm)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    assert model.dtype == torch.float32
    assert {f.name for f in base.iterdir()} == {f.name for f in (tmp_path / "warm").iterdir()}


def test_worked_answers_come_first(tmp_path) -> None:
    tokenizer = ChatTokenizer.load(tiny(tmp_path / "base"))
    examples = word_problems(tokenizer, seed=0, num_steps=10)
    worked = [sum(len(answer) > 6 for _, answer in examples(step)) for step in range(10)]
    assert worked[:4] == [32] * 4
    assert all(2 <= count <= 20 for count in worked[4:])
