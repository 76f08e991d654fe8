"""Checkpoints of a real learner: killed in the middle, on a full disk, of another model."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_rank_work import advance, make_checkpointer, make_config
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from psrl.errors import CheckpointError
from psrl.train.checkpoint import Checkpointer, load, row_range
from psrl.train.checkpoint_dir import CheckpointDir
from psrl.train.learner import Learner
from psrl.train.model import load as load_model
from psrl.train.ranks import Ranks


@pytest.fixture
def directory(tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path


def make_learner(directory: Path) -> Learner:
    return Learner(load_model(directory / "model"), make_config(directory), Ranks.alone())


def test_a_checkpoint_holds_what_training_needs(directory) -> None:
    learner = make_learner(directory)
    advance(learner, 2)
    path = make_checkpointer(learner, directory).save(2, b"control")
    drawn = torch.rand(3)
    advance(learner, 1, first=2)

    again = make_learner(directory)
    checkpoint = CheckpointDir(directory / "checkpoints").newest()
    assert checkpoint is not None
    load(checkpoint, again)
    assert torch.equal(torch.rand(3), drawn)
    advance(again, 1, first=2)
    for (name, ours), (_, theirs) in zip(again.model.weights(), learner.model.weights()):
        assert torch.equal(ours, theirs), name
    moments = again.optimizer.state()
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
    assert moments["step/model.norm.weight"].item() == 3.0
    exported = AutoModelForCausalLM.from_pretrained(path / "huggingface")
    assert exported.config.tie_word_embeddings
    assert (path / "huggingface" / "tokenizer.json").read_text() == "{}"


def test_an_early_checkpoint_without_moments_loads(directory) -> None:
    learner = make_learner(directory)
    make_checkpointer(learner, directory).save(0, b"")
    checkpoint = CheckpointDir(directory / "checkpoints").newest()
    assert checkpoint is not None
    load(checkpoint, make_learner(directory))


def test_another_model_is_named(directory) -> None:
    make_checkpointer(make_learner(directory), directory).save(0, b"")
    checkpoint = CheckpointDir(directory / "checkpoints").newest()
    assert checkpoint is not None
    config = Qwen2Config.from_pretrained(directory / "model", intermediate_size=64)
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    with pytest.raises(CheckpointError, match=r"another model: model/model\.layers\.0\.mlp"):
        load(checkpoint, make_learner(directory))


def test_keeping_none_is_refused(directory) -> None:
    with pytest.raises(CheckpointError, match="max_actor_ckpt_to_keep=0"):
        Checkpointer(directory, make_learner(directory), base_model="", run_id="", num_kept=0, dtype=torch.float32)


@pytest.mark.timeout(300)
def test_kill_9_in_mid_save_leaves_the_last_good_one(directory) -> None:
    """A process that saves without end is killed at different moments."""
    script = (
        "import sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from train_rank_work import *\n"
        "d = Path(sys.argv[1]); learner = Learner(load(d / 'model'), make_config(d), Ranks.alone())\n"
        "advance(learner, 1); saver = make_checkpointer(learner, d)\n"
        "for step in range(1, 10000): saver.save(step, b'x' * 1000); print(step, flush=True)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3])])
    for delay_s in (0.0, 0.011):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(directory)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "1\n"
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            written = [1, *(int(line) for line in process.stdout.read().split())]
        newest = CheckpointDir(directory / "checkpoints").newest()
        assert newest is not None
        assert newest.step >= max(written)
        load(newest, make_learner(directory))
    make_checkpointer(make_learner(directory), directory).save(1, b"")
    assert not list((directory / "checkpoints").glob(".tmp-*"))


def save_until_full(saver: Checkpointer) -> None:
    for step in range(2, 50):
        saver.save(step, b"x" * 100_000)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_fails_the_save_by_name_and_keeps_the_last_good_one(directory) -> None:
    small = directory / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        (small / "model").symlink_to(directory / "model")
        learner = make_learner(directory)
        advance(learner, 1)
        saver = make_checkpointer(learner, small)
        saver.save(1, b"")
        with pytest.raises(CheckpointError, match=r"could not prepare the checkpoint of step \d+: .* MiB free"):
            save_until_full(saver)
        saver._dir.begin = lambda step, nbytes: CheckpointDir.begin(saver._dir, step, 0)  # nobody looked before
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_until_full(saver)
        newest = CheckpointDir(small / "checkpoints").newest()
        assert newest is not None
        load(newest, make_learner(directory))
        assert not list((small / "checkpoints").glob(".tmp-*"))
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_rows_are_divided_as_fsdp_does() -> None:
    assert [row_range(5, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    for num_rows in range(1, 9):
        chunks = torch.arange(num_rows).chunk(3)
        for rank, chunk in enumerate(chunks):
            assert list(range(*row_range(num_rows, rank, 3))) == chunk.tolist()
