"""The modes that a run can be set to, each in a short run of real processes on an untaught tiny model."""

import math
import os
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from psrl.metrics.report import Report, report

pytestmark = pytest.mark.timeout(900)

CUSTOM = "reward.custom_reward_function"
VARIED = """
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert data_source == "psrl/arithmetic" and ground_truth and extra_info["split"] == "train"
        return {"score": 0.5 + sum(map(ord, solution_str)) % 7, "num_letters": len(solution_str)}
"""
OVERLONG = "reward.managers.dapo.reward_kwargs.overlong_buffer_cfg"


@pytest.fixture
def reward_file(tmp_path: Path) -> Any:
    def write(source: str) -> list[str]:
        path = tmp_path / "reward_file.py"
        path.write_text(dedent(source))
        return [f"+{CUSTOM}.path={path}", "data.val_files=${data.train_files}"]

    return write


def ended_well(live: Any) -> Report:
    """The run has ended with status 0, and its own record keeps its promises."""
    assert live.end() == 0, f"{live.output()}\n{live.logs()}"
    found = report(live.run_dir, with_curves=False)
    assert found.ok, found.text()
    return found


def steps(live: Any) -> list[dict[str, float]]:
    return [line for line in live.metrics() if "training/global_step" in line]


def trained(live: Any) -> list[dict[str, Any]]:
    return [line for line in live.trajectories() if line["outcome"] == "trained"]


def counters(live: Any) -> dict[str, int]:
    found: dict[str, int] = live.attempts()[-1]["counters"]
    return found


def test_one_rank_and_two_take_the_same_synchronous_step(start_run: Any, reward_file: Any) -> None:
    """Besides: recomputed log-probs agree with the engine's, the penalty stands apart from the score, W&B is local."""
    overrides = [
        *reward_file(VARIED),
        "psrl.staleness=0",
        "trainer.total_training_steps=2",
        "algorithm.rollout_correction.bypass_mode=false",
        f"{OVERLONG}.enable=true",
        f"{OVERLONG}.len=8",
        f"{OVERLONG}.penalty_factor=0.5",
    ]
    one = start_run("one", *overrides, "trainer.logger=[console,wandb]", env={"WANDB_MODE": "offline"})
    found = ended_well(one)
    assert found.summary.overlap == 0
    assert found.summary.max_staleness == 0
    two = start_run("two", *overrides, "psrl.deployment.train_ngpus_per_node=2")
    assert ended_well(two).summary.overlap == 0

    first, second = steps(one)[0], steps(two)[0]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean", "response_length/mean"):
        assert first[name] == pytest.approx(second[name], rel=1e-4, abs=1e-6), name
    assert first["actor/grad_norm"] > 0
    for step in [*steps(one), *steps(two)]:
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert 0 <= step["training/rollout_probs_diff_mean"] <= step["training/rollout_probs_diff_max"]
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert step["staleness/max"] == step["staleness/mixed_ratio"] == 0
        assert step["staleness/hist/0"] == 16

    lines = trained(one)
    for line in lines:
        excess = max(0, line["num_response_tokens"] - 20)
        assert line["shaped_reward"] == pytest.approx(line["raw_score"] - excess / 8 * 0.5, abs=1e-6)
        assert line["metrics"]["num_letters"] > 0
    assert any(line["shaped_reward"] < line["raw_score"] for line in lines)
    of_first = [line for line in lines if line["trained_at"] == 0]
    for name, field in (("critic/score/mean", "raw_score"), ("critic/rewards/mean", "shaped_reward")):
        assert first[name] == pytest.approx(sum(line[field] for line in of_first) / len(of_first), rel=1e-5)

    (kept,) = one.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert kept.stat().st_size > 0


def test_staleness_3_overlaps_generation_and_training(start_run: Any, reward_file: Any) -> None:
    """Over round robin, with an async reward function."""
    live = start_run(
        "run",
        *reward_file("import asyncio\n" + dedent(VARIED).replace("def ", "async def ").replace(
            "    return", "    await asyncio.sleep(0)\n    return"
        )),
        "psrl.staleness=3",
        "data.max_response_length=128",
        "trainer.total_training_steps=8",
        "psrl.rollout_coordination.routing_strategy.method=round_robin",
        "psrl.rollout_coordination.routing_strategy.max_concurrent_seqs_per_instance=8",
    )  # fmt: skip
    trainer = live.pid("trainer-0")
    os.kill(trainer, signal.SIGSTOP)  # no weights, so no work, before both replicas are there to share it
    live.wait_for(lambda: len(list(live.temp_dir.glob("psrl-*/replica-*.sock"))) == 2, "two replicas")
    os.kill(trainer, signal.SIGCONT)
    found = ended_well(live)
    assert found.summary.overlap is not None
    assert found.summary.overlap > 0
    assert found.summary.max_staleness is not None
    assert 1 <= found.summary.max_staleness <= 3
    records = steps(live)
    assert [int(step["step"]) for step in records] == list(range(1, 9))
    for step in records:
        assert sum(step[f"staleness/hist/{k}"] for k in range(4)) == 16
        assert {f"staleness/{name}" for name in ("mean", "max", "min", "mixed_ratio")} <= step.keys()
    rates = {"rollout/tokens_per_s", "rollout/busy_share", "sync/pause_share"}
    assert all(rates <= step.keys() for step in records[1:])
    assert all(step["rollout/tokens_per_s"] >= 0 for step in records[1:])
    assert {line["spans"][0]["replica"] for line in trained(live)} == {"replica-0", "replica-1"}


def test_without_partial_rollout_no_trajectory_changes_its_version(start_run: Any, reward_file: Any) -> None:
    live = start_run(
        "run",
        *reward_file(VARIED),
        "psrl.staleness=2",
        "data.max_response_length=128",
        "trainer.total_training_steps=6",
        "psrl.rollout_coordination.partial_rollout.enable=false",
        "psrl.rollout_coordination.routing_strategy.method=request_num_balance",
    )
    ended_well(live)
    spans = [{span["version"] for span in line["spans"]} for line in live.trajectories() if line["spans"]]
    assert all(len(versions) == 1 for versions in spans)
    assert len(set.union(*spans)) > 1, "replicas must have synced"
    assert all(step["staleness/mixed_ratio"] == 0 for step in steps(live))


def test_a_run_whose_groups_are_all_alike_skips_its_updates_and_ends(
    start_run: Any, reward_file: Any, house: Any
) -> None:
    live = start_run(
        "run",
        *reward_file("def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.25"),
        "psrl.staleness=1",
        "psrl.group_post_process.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
    )
    ended_well(live)
    assert [line["version"] for line in live.attempts() if line["kind"] == "publish"] == [1, 2, 3]
    assert counters(live)["trained"] == 0
    assert counters(live)["filtered"] == 3 * 2 * 4, "three steps, two batches each"
    assert [step["actor/updates"] for step in steps(live)] == [0, 0, 0]
    assert [step["batch/groups_used"] for step in steps(live)] == [0, 0, 0]
    loaded = load_file(house.model / "model.safetensors")
    saved = load_file(live.run_dir / "checkpoints/global_step_3/huggingface/model.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in loaded)


def test_dynamic_sampling_trains_on_the_groups_that_differ(start_run: Any, reward_file: Any) -> None:
    """Prompts of even index are alike and dropped. One answer hangs, once: its group fails, and no other."""
    live = start_run(
        "run",
        *reward_file(
            """
            import pathlib, time

            HANGS = pathlib.Path(__file__).with_name("hangs")

            def compute_score(data_source, solution_str, ground_truth, extra_info):
                if extra_info["index"] == 3 and not HANGS.exists():
                    HANGS.touch()
                    time.sleep(600)
                return extra_info["index"] % 2 * (1 + sum(map(ord, solution_str)) % 7)
            """
        ),
        "psrl.staleness=0",
        "psrl.group_post_process.enable=true",
        "trainer.total_training_steps=2",
        "reward.reward_loop_worker.timeout_s=15",
        "reward.reward_loop_worker.retry_limit=0",
        "gen_actor_rollout_ref.rollout.agent.retry_limit=0",
    )
    ended_well(live)
    assert counters(live)["trained"] == 8
    assert counters(live)["failed"] == 1
    assert counters(live)["filtered"] >= 8
    assert {line["group"] % 2 for line in trained(live)} == {1}
    assert all(step["batch/groups_used"] == 4 and step["batch/groups_filtered"] > 0 for step in steps(live))
    (reason,) = {line["reason"] for line in live.trajectories() if line["outcome"] == "failed"}
    assert "gave no score within reward.reward_loop_worker.timeout_s=15 s" in reason


def test_a_reward_that_always_raises_ends_the_run_by_name(start_run: Any, reward_file: Any) -> None:
    live = start_run(
        "run",
        *reward_file(
            "def compute_score(data_source, solution_str, ground_truth, extra_info): return {}['no such entry']"
        ),
        "trainer.total_training_steps=2",
    )
    assert live.end() == 1, live.output()
    said = live.output()
    last = said[said.rindex("psrl-launch:") :]
    assert "groups failed in a row; the last one: not scored: reward.custom_reward_function: reward function" in last
    assert "raised KeyError: 'no such entry' (" in last
    assert "reward_file.py, line 1)" in last
    assert "Traceback" not in last
    assert last.count("exit status 1") == 1
    assert said.count("KeyError") < 10, "an error that all samples share is not repeated for each"
    assert live.step() == 0


def test_validation_only(start_run: Any) -> None:
    live = start_run(
        "run",
        "trainer.val_only=true",
        "trainer.val_before_train=true",
        "train_actor_rollout_ref.rollout.val_kwargs.n=2",
    )
    ended_well(live)
    (record,) = live.metrics()
    assert record["step"] == 0
    assert record["val-aux/num_prompts"] == 16
    (score,) = [value for name, value in record.items() if name.startswith("val-core/") and "/mean@2" in name]
    assert math.isfinite(score)
    lines = live.trajectories()
    assert {line["outcome"] for line in lines} == {"validated"}
    assert len(lines) == 32
    assert [line["kind"] for line in live.attempts()] == ["start", "end"]
