"""Processes of a running quick start are killed: workers are replaced and nothing is lost; head and trainer end it."""

import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from psrl.metrics.report import report

pytestmark = pytest.mark.timeout(600)

LONG = "data.max_response_length=400"  # the untrained model seldom ends by itself
NUM_STEPS = 20


def scoring_child(live: Any) -> psutil.Process:
    return live.wait_for(lambda: psutil.Process(live.pid("reward-0")).children(), "a scoring process")[0]


def moved(live: Any) -> list[dict[str, Any]]:
    """Ended trajectories that were begun on one replica and ended on another."""
    return [line for line in live.trajectories() if len(line["replicas"]) > 1]


def wait_trained(live: Any) -> None:
    """Until one more batch is trained."""
    before = live.counters().trained
    live.wait_for(lambda: live.counters().trained > before, "one more batch to be trained")


def check_whole(live: Any, num_groups: int) -> None:
    """The run ended well, its record keeps its promises, and each group was trained once, in one offer."""
    assert live.end() == 0, live.output()
    found = report(live.run_dir, with_curves=False)
    assert found.ok, found.text()
    trained = defaultdict(list)
    for line in live.trajectories():
        if line["purpose"] == "train" and line["outcome"] == "trained":
            trained[line["group"]].append((line["index"], line["offer"]))
    assert len(trained) == num_groups, sorted(trained)
    for siblings in trained.values():
        assert sorted(index for index, _ in siblings) == [0, 1, 2, 3], siblings
    counters = live.attempts()[-1]["counters"]
    assert counters["trained"] == num_groups, counters
    assert counters["offered"] == sum(counters[name] for name in ("trained", "failed", "filtered", "in_flight"))


@pytest.mark.slow
def test_workers_are_replaced_and_their_work_goes_on(start_run: Callable[..., Any]) -> None:
    # Staleness 0: no sync interrupts a trajectory, so whatever moved was lost with a replica; and what is on its way
    # is of the batch that is trained next.
    live = start_run(
        "run",
        LONG,
        "psrl.staleness=0",
        f"trainer.total_training_steps={NUM_STEPS}",
        "psrl.deployment.max_restarts=10",
    )
    num_killed = 0
    while not moved(live):  # once more, if none of a replica's tokens had arrived yet, or all had
        live.wait_generating(3, replica="replica-0")
        live.kill("replica-0")
        num_killed += 1
        wait_trained(live)  # before their worker dies too, and they begin anew

    live.kill_amid_generation("agent-0")
    live.wait_for(lambda: live.counters().retries > 0, "groups offered again")

    live.wait_generating(6)
    scoring_child(live).kill()

    live.kill_amid_generation("reward-0")
    names = ("replica-0", "agent-0", "reward-0")
    live.wait_for(lambda: all(len(live.starts(name)) > 1 for name in names), "all three to be started again")

    check_whole(live, NUM_STEPS * 4)
    last = live.metrics()[-1]
    assert last["processes/lost_replica"] == num_killed
    assert last["processes/lost_agent"] == last["processes/lost_reward"] == 1
    assert last["rollout/num_redispatched"] > 0
    assert live.attempts()[-1]["counters"]["retries"] >= 1
    assert live.attempts()[-1]["counters"]["failed"] == 0
    # What was streamed before the kill was kept: trajectories begun on the dead replica ended on the other.
    assert all(line["outcome"] in ("trained", "in_flight") for line in moved(live))
    assert live.leftovers() == []


@pytest.mark.slow
def test_a_quick_start_survives_the_loss_of_its_only_reward_worker(start_run: Callable[..., Any]) -> None:
    """Answers come faster than the worker is back: they wait for it instead of failing their groups."""
    live = start_run("run", "trainer.total_training_steps=30", "psrl.deployment.max_restarts=10")
    for step in (2, 10):
        live.wait_step(step)
        live.kill("reward-0")
    check_whole(live, 30 * 4)
    assert live.attempts()[-1]["counters"]["failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "trainer-0"])
def test_the_run_ends_by_name_when_it_cannot_go_on(start_run: Callable[..., Any], name: str) -> None:
    live = start_run("run", LONG, "trainer.total_training_steps=500")
    live.wait_step(1)
    live.processes()
    live.kill(name)
    assert live.end() == 1
    lines = [line for line in live.output().splitlines() if line.strip()]
    text = live.output()
    assert f"First failure: {name} (pid" in text
    assert "killed by signal 9 (SIGKILL)" in text
    whole = [at for at, line in enumerate(lines) if line.startswith("Whole log:")]
    assert lines[whole[-1]] == f"Whole log: {live.run_dir}/logs/{name}.log"
    assert whole[-1] >= len(lines) - 2, text  # nothing but "Ended after it: ..." may follow
    assert live.leftovers() == []


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_points(start_run: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    live = start_run(
        "run",
        f"data.max_response_length={rng.choice([28, 100])}",
        f"psrl.staleness={rng.choice([0, 1, 3])}",
        "trainer.total_training_steps=30",
        "trainer.test_freq=10",
        "trainer.save_freq=10",
        f"gen_actor_rollout_ref.rollout.agent.num_workers={rng.choice([1, 2])}",
        "psrl.deployment.max_restarts=20",
    )
    names = sorted(name for name in ["replica-0", "replica-1", "agent-0", "reward-0"])
    live.wait_for(lambda: live.rollout().num_generated_tokens > 0, "the first token")
    for _ in range(rng.randint(2, 5)):
        time.sleep(rng.uniform(0.0, 2.0))
        if live.popen.poll() is not None or live.step() >= 30:
            break
        name = rng.choice([*names, "child"])
        if name == "child":
            for child in psutil.Process(live.pid("reward-0")).children():
                child.kill()
        else:
            live.kill(name)
    check_whole(live, 30 * 4)
    assert live.leftovers() == []
