"""On a GPU: bf16 compute over float32 masters, packed by variable-length attention, through FSDP2 on NCCL."""

import numpy as np
import pytest
import torch
from test_train_ranks import free_port
from train_rank_work import advance, make_config, make_rows
from transformers import Qwen2Config, Qwen2ForCausalLM

from psrl.train.learner import Learner
from psrl.train.model import load
from psrl.train.packed import pack
from psrl.train.packing import plan
from psrl.train.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def directory(tmp_path):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=61,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path


def test_bf16_on_nccl_agrees_with_float32_on_the_cpu(directory) -> None:
    rows = make_rows()
    cut = plan(range(len(rows)), [row.num_tokens for row in rows], 1, 200)
    ranks = Ranks.join(0, 1, device_type="cuda", master_addr="127.0.0.1", master_port=free_port(), timeout_s=60)
    try:
        gpu = Learner(load(directory / "model", checkpointing=True), make_config(directory), ranks)
        cpu = Learner(load(directory / "model"), make_config(directory), Ranks.alone())
        ours, entropy = gpu.log_probs(rows, [cut])
        theirs, expected_entropy = cpu.log_probs(rows, [cut])
        for number in range(len(rows)):
            np.testing.assert_allclose(ours[number], theirs[number], atol=0.05)
        assert entropy == pytest.approx(expected_entropy, rel=0.01)
        for learner in (gpu, cpu):
            advance(learner, 3)
        assert {w.dtype for _, w in gpu.model.weights()} == {torch.float32}
        assert {s.dtype for s in gpu.optimizer.state().values()} == {torch.float32}
        again, _ = gpu.log_probs(rows, [cut])
        assert max(abs(again[n] - ours[n]).max() for n in again) > 0.01
    finally:
        ranks.leave()


def test_memory_grows_with_the_chunk_not_with_tokens_times_vocabulary() -> None:
    from psrl.train.logprobs import token_log_probs

    num_tokens, vocabulary, width = 16_000, 152_000, 64
    hidden = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    log_probs, _ = token_log_probs(hidden, weight, None, targets)
    log_probs.sum().backward()
    assert torch.cuda.max_memory_allocated() < 4 << 30  # the whole matrix in float32 has 9 GiB
    assert hidden.grad is not None


def test_grouped_heads_and_short_sequences_by_variable_length_attention(directory) -> None:
    """One batch, bf16 varlen attention on the GPU against float32 SDPA."""
    model = load(directory / "model")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n) for n in (1, 30, 3)]
    responses = [rng.integers(0, 61, n) for n in (1, 60, 9)]
    expected, _ = model(pack(prompts, responses))
    model.cuda().bfloat16()
    ours, _ = model(pack(prompts, responses, device=torch.device("cuda")))
    torch.testing.assert_close(ours.cpu(), expected, atol=0.05, rtol=0.05)
