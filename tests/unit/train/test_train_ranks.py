"""Real trainer processes over gloo: gradients don't depend on ranks or micro-batches."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

WORKER = Path(__file__).with_name("train_rank_work.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(what: str, world_size: int, directory: Path, timeout_s: float = 100) -> list[int]:
    """Run a function of train_rank_work.py on each rank; exit codes by rank."""
    port = str(free_port())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), what, str(rank), str(world_size), port, str(directory)], env=environment
        )
        for rank in range(world_size)
    ]
    try:
        return [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def directory(tmp_path):
    torch.manual_seed(0)
    config = Qwen2Config(
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
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path


def test_gradients_agree_on_one_and_two_ranks_packed_and_one_by_one(directory) -> None:
    assert run_ranks("gradients", 1, directory) == [0]
    assert run_ranks("gradients", 2, directory) == [0, 0]
    one, two = (load_file(directory / f"gradients_{n}.safetensors") for n in (1, 2))
    reference = {name: tensor for name, tensor in one.items() if "/packed/" in name}
    assert len(reference) > 100
    for name, expected in reference.items():
        scale = expected.abs().max().item()
        assert scale > 0, name
        for found in (one[name.replace("packed", "single")], two[name], two[name.replace("packed", "single")]):
            assert (found - expected).abs().max().item() <= 1e-5 * scale, name
