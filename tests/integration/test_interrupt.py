"""Signals to the launcher at every stage of a run: it ends soon, leaves nothing, its directory can be used again."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from psrl.metrics.report import report
from psrl.train.checkpoint_dir import CheckpointDir

pytestmark = pytest.mark.timeout(900)

STEPS = 3
SLOW = (
    "data.max_response_length=400",  # the untrained model seldom ends by itself
    "psrl.staleness=0",  # generation and training take turns, so that either can be told from outside
    "trainer.total_training_steps=100000",  # a stage that was missed comes again
    "trainer.val_before_train=true",
    "trainer.test_freq=1",
    "trainer.save_freq=1",
)
PROCESSES = ("head", "reward-0", "trainer-0", "replica-0", "replica-1", "agent-0")
TRAINING_LONG = "train_actor_rollout_ref.actor.ppo_epochs=300"


def in_start_up(live: Any) -> None:
    live.wait_for(lambda: all(live.starts(name) for name in PROCESSES), "six processes")


def in_validation(live: Any) -> None:
    live.wait_for(lambda: sum(load.num_pinned for load in live.rollout().replicas) >= 4, "trajectories of a validation")


def in_generation(live: Any) -> None:
    live.wait_for(lambda: live.counters().offered > 0, "groups offered")
    live.wait_generating(4)


def in_training(live: Any) -> None:
    """A batch was generated, nothing is being generated, and no step is logged yet."""
    live.wait_for(lambda: live.rollout().num_finished >= 16, "sixteen trajectories")
    live.wait_for(lambda: not any(load.num_running for load in live.rollout().replicas), "an end of generation")


def interrupt(live: Any, *signals: int) -> int:
    """As a terminal does it: to the launcher's process group."""
    live.processes()
    for number in signals:
        os.killpg(live.popen.pid, number)
        time.sleep(0.1)  # two at once may become one
    status: int = live.end()
    assert live.leftovers() == [], live.output()
    assert "Traceback" not in live.output()
    return status


@pytest.mark.slow
@pytest.mark.parametrize("every_stage", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_run_directory_outlives_signals(start_run: Callable[..., Any], every_stage: bool) -> None:
    shared_before = set(os.listdir("/dev/shm"))

    live = start_run("run", *SLOW)
    in_generation(live)
    assert interrupt(live, signal.SIGINT) == 130
    assert "interrupted by SIGINT" in live.output()

    live = start_run("run", *SLOW, TRAINING_LONG, "trainer.val_before_train=false")
    in_training(live)
    assert interrupt(live, signal.SIGINT, signal.SIGINT) == 130

    if every_stage:
        live = start_run("run", *SLOW)
        in_start_up(live)
        assert interrupt(live, signal.SIGINT, signal.SIGINT) == 130

        live = start_run("run", *SLOW)
        in_validation(live)
        assert interrupt(live, signal.SIGTERM) == 130
        assert "interrupted by SIGTERM" in live.output()

        live = start_run("run", *SLOW)
        in_generation(live)
        live.processes()
        live.popen.kill()
        assert live.end() == -signal.SIGKILL
        assert live.leftovers() == []

    saved = CheckpointDir(live.run_dir / "checkpoints").newest()
    num_steps = (saved.step if saved else 0) + STEPS
    live = start_run("run", *SLOW, f"trainer.total_training_steps={num_steps}")
    assert live.end() == 0, live.output()
    found = report(live.run_dir, with_curves=False)
    assert found.ok, found.text()
    # The one that ended in its start-up was perhaps over before the head could note it.
    assert found.summary.num_attempts in ((5, 6) if every_stage else (3,))
    assert found.summary.num_steps == num_steps
    assert live.leftovers() == []
    assert set(os.listdir("/dev/shm")) <= shared_before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_process_leaves_nothing(start_run: Callable[..., Any], number: int) -> None:
    """As soon as the run directory is held; checks of data and model are done, processes are about to be started."""
    live = start_run("run", *SLOW)
    live.wait_for(lambda: (live.run_dir / ".lock").exists(), "the lock of the run directory")
    assert interrupt(live, number) == 130


@pytest.mark.deep
@pytest.mark.parametrize("tenths", range(0, 100, 7))
def test_a_signal_at_any_time_leaves_nothing(start_run: Callable[..., Any], tenths: int) -> None:
    live = start_run("run", *SLOW)
    time.sleep(tenths / 10)
    if live.popen.poll() is None:
        live.processes()
        os.killpg(live.popen.pid, signal.SIGINT)
        assert live.end() in (130, -signal.SIGINT, 0)  # by the signal itself: before main was entered
        assert live.leftovers() == [], live.output()
