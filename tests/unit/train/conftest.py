"""A tiny random model directory for the tests of training."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # helpers of these tests: train_scripted, train_rank_work


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors, and a machine that may be shared: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=61,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                initializer_range=0.2,
                tie_word_embeddings=True,
            )
        ).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory
