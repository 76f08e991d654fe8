"""Real trainer processes over gloo: gradients don't depend on ranks or micro-batches."""

import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(600)

WORKER = Path(__file__).with_name("train_rank_work.py")


def free_port() -> int:
    """One that is free now, and below those that the kernel gives away, so that it still is when the ranks start."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def run_ranks(what: str, world_size: int, directory: Path, timeout_s: float = 180) -> list[int]:
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
def directory(tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "model")
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


def test_a_checkpoint_of_two_ranks_resumes_on_two_and_on_one(directory) -> None:
    assert run_ranks("save", 2, directory) == [0, 0]
    assert run_ranks("resume", 2, directory) == [0, 0]
    assert run_ranks("resume", 1, directory) == [0]
    whole, two, one = (load_file(directory / f"{n}.safetensors") for n in ("whole", "resumed_2", "resumed_1"))
    for name, expected in whole.items():
        assert torch.equal(two[name], expected), name
        torch.testing.assert_close(one[name], expected, atol=1e-6, rtol=1e-5)
    exported = load_file(directory / "checkpoints" / "global_step_2" / "huggingface" / "model.safetensors")
    assert exported.keys() == whole.keys()


def test_a_rank_that_cannot_write_fails_the_save_for_all_and_nobody_hangs(directory) -> None:
    assert run_ranks("save_fails", 2, directory) == [0, 0]
    assert list((directory / "checkpoints").iterdir()) == []


def test_the_other_rank_ends_when_one_dies(directory) -> None:
    codes = run_ranks("one_dies", 2, directory)
    assert all(code != 0 for code in codes)
