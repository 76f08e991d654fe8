"""Does the quick start learn, and is it the reward that teaches? On a split that no setting was chosen on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.data.prepare import arithmetic
from psrl.metrics.report import Report, report

COIN = """
import random

from psrl.reward import rules

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["split"] != "train":
        return rules.score(data_source, solution_str, ground_truth, extra_info)
    return float(random.random() < 0.4)
"""
"""Trains on a coin; validation is still judged by the rule, or nothing could be seen."""


def run(*command: str, timeout_s: float) -> str:
    """A command of ours, to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    arithmetic(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Warm-started models by seed, made when first asked for."""
    folder = tmp_path_factory.mktemp("models")

    class Made(dict[int, Path]):
        def __missing__(self, seed: int) -> Path:
            run("psrl.cli", "model", "tiny", "--seed", str(seed), "--out", str(folder / str(seed)), timeout_s=600)
            self[seed] = folder / str(seed)
            return self[seed]

    return Made()


def train(data: Path, model: Path, run_dir: Path, *overrides: str) -> Report:
    run(
        "psrl.launch.cli",
        "quickstart",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files=[{data / 'val.parquet'},{data / 'test.parquet'}]",
        f"train_actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={run_dir}",
        *overrides,
        timeout_s=900,
    )
    return report(run_dir)


def gain(found: Report) -> float:
    """Accuracy on the test split after the run minus before."""
    (accuracy,) = [entry for entry in found.summary.accuracies if entry.name.startswith("psrl/arithmetic_test/acc/")]
    return accuracy.after - accuracy.before


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quick_start_learns(data: Path, models: dict[int, Path], tmp_path: Path) -> None:
    found = train(data, models[0], tmp_path / "run")
    assert found.ok, found.text()
    assert gain(found) >= 0.4
    assert found.summary.max_staleness is not None
    assert 1 <= found.summary.max_staleness <= 3
    assert found.summary.overlap is not None
    assert found.summary.overlap > 0
    assert found.curves is not None
    assert found.curves.stat().st_size > 10_000


@pytest.mark.deep
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_seed_learns(data: Path, models: dict[int, Path], tmp_path: Path, seed: int, staleness: int) -> None:
    found = train(data, models[seed], tmp_path / "run", f"trainer.seed={seed}", f"psrl.staleness={staleness}")
    assert found.ok, found.text()
    assert gain(found) >= 0.4
    assert found.summary.max_staleness is not None
    assert min(staleness, 1) <= found.summary.max_staleness <= staleness


@pytest.mark.deep
@pytest.mark.timeout(1500)
def test_random_rewards_teach_nothing(data: Path, models: dict[int, Path], tmp_path: Path) -> None:
    (tmp_path / "coin.py").write_text(COIN)
    found = train(data, models[0], tmp_path / "run", f"+reward.custom_reward_function={{path: {tmp_path / 'coin.py'}}}")
    assert found.ok, found.text()
    assert found.summary.num_steps == 40
    assert gain(found) < 0.1
