"""A run that was killed whole goes on from its newest good checkpoint: the same prompts, none lost or doubled."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psrl.control import ControlState
from psrl.data.prepare.arithmetic import arithmetic
from psrl.metrics.report import report
from psrl.train.checkpoint_dir import Checkpoint, CheckpointDir

pytestmark = pytest.mark.timeout(900)

BATCH, N = 4, 4
FURTHER = 8
"""Steps from the checkpoint on."""

COIN = '''
import zlib

def score(data_source, solution_str, ground_truth, extra_info):
    """0 or 1, as the text's checksum has it: some groups score alike and are filtered."""
    return float(zlib.crc32(solution_str.encode()) % 2)
'''


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Dynamic sampling that filters some groups, a checkpoint every other step, the order shuffled."""
    (tmp_path / "coin.py").write_text(COIN)
    return [
        f"reward.custom_reward_function.path={tmp_path}/coin.py",
        "reward.custom_reward_function.name=score",
        "psrl.group_post_process.enable=true",
        "algorithm.filter_groups.metric=score",
        "data.max_response_length=100",
        "data.shuffle=true",
        "trainer.save_freq=2",
        "trainer.max_actor_ckpt_to_keep=3",
    ]


def checkpoints(run_dir: Path) -> list[int]:
    """Steps of the complete ones, newest first."""
    return [checkpoint.step for checkpoint in CheckpointDir(run_dir / "checkpoints").complete()]


def kill_after(live: Any, step: int) -> None:
    """SIGKILL to the launcher of an endless run, once `step` or a later one is saved and at least one more is done."""
    live.wait_for(lambda: max(checkpoints(live.run_dir), default=0) >= step, f"a checkpoint of step {step}")
    saved = max(checkpoints(live.run_dir))
    live.wait_for(lambda: live.step() > saved, f"a step after {saved}")
    live.processes()
    live.popen.kill()
    live.end()
    assert live.leftovers() == []


def until(num_steps: int) -> str:
    return f"trainer.total_training_steps={num_steps}"


def check_continued(live: Any, state: ControlState, num_old_metrics: int) -> None:
    """The second start went on from `state` for `FURTHER` steps."""
    run_dir, resumed_from = live.run_dir, state.version
    num_steps = resumed_from + FURTHER
    found = report(run_dir, with_curves=False)
    assert found.ok, found.text()
    assert found.summary.num_steps == num_steps
    starts = [line for line in live.attempts() if line["kind"] == "start"]
    assert [start["resumed_from"] for start in starts] == [None, resumed_from]

    new = [line["training/global_step"] for line in live.metrics()[num_old_metrics:] if "training/global_step" in line]
    assert new == list(range(resumed_from + 1, num_steps + 1))

    # The history that counts: what was written up to the snapshot, then the second attempt.
    raw = (run_dir / "trajectories.jsonl").read_bytes()
    before = [json.loads(line) for line in raw[: state.log_bytes].splitlines()]
    after = [line for line in live.trajectories() if line["attempt"] == 1]
    ends: dict[int, set[tuple[str, int | None]]] = {}
    siblings: Counter[int] = Counter()
    for line in [*before, *after]:
        if line["purpose"] == "train":
            ends.setdefault(line["group"], set()).add((line["outcome"], line["trained_at"]))
            siblings[line["group"]] += 1
    assert all(len(end) == 1 for end in ends.values()), ends  # none doubled
    assert set(siblings.values()) == {N}
    assert sorted(ends) == list(range(len(ends)))  # none lost: group g is draw g, whatever happened in between

    # The second attempt drew what the snapshot had not finished, and went on where it had stopped drawing.
    unfinished = {group.prompt.group for group in state.unfinished}
    second = {line["group"] for line in after}
    assert second == unfinished | set(range(state.num_drawn, len(ends)))

    outcomes = Counter(outcome for end in ends.values() for outcome, _ in end)
    assert outcomes["trained"] == num_steps * BATCH, outcomes
    assert set(outcomes) <= {"trained", "filtered", "in_flight"}
    steps = Counter(step for end in ends.values() for outcome, step in end if outcome == "trained")
    assert steps == dict.fromkeys(range(num_steps), BATCH)


@pytest.mark.slow
@pytest.mark.deep
def test_a_killed_synchronous_run_goes_on(start_run: Callable[..., Any], settings: list[str]) -> None:
    live = start_run("run", *settings, "psrl.staleness=0", until(100_000))
    kill_after(live, 4)
    newest = checkpoints(live.run_dir)[0]
    state = ControlState.decode(Checkpoint.open(live.run_dir / f"checkpoints/global_step_{newest}").control_state())
    num_old = len(live.metrics())

    live = start_run("run", *settings, "psrl.staleness=0", until(newest + FURTHER))
    assert live.end() == 0, live.output()
    check_continued(live, state, num_old)


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_killed_run_goes_on_whatever_happens_to_its_directory(
    start_run: Callable[..., Any], settings: list[str], tmp_path: Path, anew: bool
) -> None:
    settings = [*settings, "psrl.staleness=3"]
    live = start_run("run", *settings, until(100_000))
    kill_after(live, 4)
    run_dir: Path = live.run_dir
    newest, older = checkpoints(run_dir)[:2]
    num_steps = older + FURTHER
    settings = [*settings, until(num_steps)]
    num_old = len(live.metrics())
    state = ControlState.decode(Checkpoint.open(run_dir / f"checkpoints/global_step_{older}").control_state())

    # Other data than the checkpoint's is refused before anything starts.
    arithmetic(tmp_path / "other", seed=5, num_train=256, num_validation=16, num_test=16)
    live = start_run("run", *settings, f"data.train_files={tmp_path}/other/train.parquet")
    assert live.end() == 2
    assert "the data is not what the checkpoint was made with (fingerprint was" in live.output()

    # The newest checkpoint is torn: the one before it serves.
    torn = next((run_dir / f"checkpoints/global_step_{newest}").glob("shard_*"))
    torn.write_bytes(torn.read_bytes()[:-100])
    live = start_run("run", *settings)
    assert live.end() == 0, live.output()
    assert f"checkpoint global_step_{newest} is passed over: {torn} should have" in live.output()
    assert f"going on from {run_dir}/checkpoints/global_step_{older}, version {older}" in live.output()
    check_continued(live, state, num_old)
    for checkpoint in CheckpointDir(run_dir / "checkpoints").complete()[:3]:
        checkpoint.verify()
    assert checkpoints(run_dir)[:3] == [num_steps, num_steps - 2, num_steps - 4]

    # All is done: another start does nothing.
    record = (run_dir / "attempts.jsonl").read_bytes()
    live = start_run("run", *settings)
    assert live.end() == 0
    assert f"all {num_steps} steps of {run_dir} are done; nothing was started" in live.output()
    assert (run_dir / "attempts.jsonl").read_bytes() == record

    if anew:
        check_new_starts(start_run, settings, run_dir, num_steps)


def check_new_starts(start_run: Callable[..., Any], settings: list[str], run_dir: Path, num_steps: int) -> None:
    """Two starts that do not go on in `run_dir`, where `num_steps` steps were done in two attempts."""
    # Starting anew leaves the old run whole, beside the new one.
    live = start_run("run", *settings, "trainer.resume_mode=disable", until(2))
    assert live.end() == 0, live.output()
    assert f"the run starts anew: what was in {run_dir} is in {run_dir}/previous-1 now" in live.output()
    new, old = report(run_dir, with_curves=False), report(run_dir / "previous-1", with_curves=False)
    assert new.ok, new.text()
    assert old.ok, old.text()
    assert (new.summary.num_steps, new.summary.num_attempts) == (2, 1)
    assert (old.summary.num_steps, old.summary.num_attempts) == (num_steps, 2)

    # So does going on from a checkpoint of another directory; the new record is of what was done here.
    other = run_dir / f"previous-1/checkpoints/global_step_{num_steps - 2}"
    live = start_run("run", *settings, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={other}")
    assert live.end() == 0, live.output()
    found = report(run_dir, with_curves=False)
    assert found.ok, found.text()
    assert (found.summary.num_steps, found.summary.num_attempts) == (2, 1)
    assert report(run_dir / "previous-2", with_curves=False).summary.num_steps == 2
    assert live.leftovers() == []
