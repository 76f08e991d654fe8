"""Whole runs of `psrl-launch quickstart` as processes: started, watched, hurt and read from outside.

    live = start_run("run", "trainer.total_training_steps=4")
    live.wait_for(lambda: live.step() >= 1, "step 1")
    os.kill(live.pid("replica-0"), signal.SIGKILL)
    assert live.end() == 0, live.output()
    assert report(live.run_dir).ok

Time limits here are safety nets for a hang; nothing is asserted about speed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from psrl.actor import BlockingRuntime, UnixAddress
from psrl.control import PSManager
from psrl.control.messages import Counters, GetStatus, Status
from psrl.data.models.tiny import tiny
from psrl.data.prepare.arithmetic import arithmetic
from psrl.rollout.gateway import RolloutGateway
from psrl.rollout.messages import GetRolloutView, RolloutView

DEADLINE_S = 300.0

Record = dict[str, Any]


@dataclass(frozen=True)
class House:
    """What a run reads: the embedded data set, small, and a tiny model that has learned nothing yet."""

    data: Path
    model: Path

    def overrides(self) -> list[str]:
        """A run of a few seconds a step or less."""
        return [
            f"data.train_files={self.data}/train.parquet",
            f"data.val_files=[{self.data}/val.parquet]",
            "data.val_max_samples=16",
            "data.train_batch_size=4",
            f"train_actor_rollout_ref.model.path={self.model}",
            "train_actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "psrl.rollout_n=4",
            "psrl.group_post_process.enable=false",  # this model is right about nothing: all groups would go
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
        ]


class LiveRun:
    """One start of a run. `temp_dir` is its private folder for temporary files."""

    def __init__(self, run_dir: Path, overrides: list[str], temp_dir: Path, env: dict[str, str]) -> None:
        self.run_dir, self.temp_dir = run_dir, temp_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._output = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 (closed by close)
        self.popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "psrl.launch.cli",
                "quickstart",
                f"trainer.default_local_dir={run_dir}",
                *overrides,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**_environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(temp_dir), **env},
            start_new_session=True,
        )
        self._seen: dict[int, psutil.Process] = {}
        self._runtime: BlockingRuntime | None = None

    # -- watching

    def wait_for(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        """What `condition` returns once it is true. The run must not end before."""
        until = time.monotonic() + deadline_s
        while True:
            ended = self.popen.poll() is not None
            found = condition()
            if found:
                return found
            if ended:
                pytest.fail(f"the run ended ({self.popen.returncode}) before {what}:\n{self.output()}")
            if time.monotonic() > until:
                pytest.fail(f"no {what} within {deadline_s:g} s:\n{self.output()}\n{self.logs()}")
            time.sleep(0.02)

    def metrics(self) -> list[Record]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def trajectories(self) -> list[Record]:
        return read_lines(self.run_dir / "trajectories.jsonl")

    def attempts(self) -> list[Record]:
        return read_lines(self.run_dir / "attempts.jsonl")

    def step(self) -> int:
        """The last training step in metrics.jsonl; 0 before the first."""
        return max((int(line.get("training/global_step", 0)) for line in self.metrics()), default=0)

    def wait_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step, f"step {step}")

    def log(self, name: str) -> str:
        try:
            return (self.run_dir / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def output(self) -> str:
        """What the launcher has printed so far."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode("utf-8", "replace")

    # -- asking the head

    def rollout(self) -> RolloutView:
        """How busy the replicas are now."""
        view: RolloutView = self._ask(
            RolloutGateway, "gateway", lambda gateway: gateway.get_rollout_view(GetRolloutView())
        )
        return view

    def counters(self) -> Counters:
        """What became of the groups so far."""
        status: Status = self._ask(PSManager, "psmanager", lambda manager: manager.get_status(GetStatus()))
        return status.counters

    def wait_generating(self, num_running: int = 1, *, replica: str = "") -> None:
        """Until so many trajectories are being generated (by one replica, if it is named), each with a few tokens."""

        def running() -> int:
            loads = [load for load in self.rollout().replicas if not replica or load.name == replica]
            return sum(load.num_running for load in loads)

        def wait_tokens(num_tokens: int) -> None:
            enough = self.rollout().num_generated_tokens + num_tokens
            self.wait_for(lambda: self.rollout().num_generated_tokens >= enough, f"{num_tokens} tokens")

        while True:
            self.wait_for(lambda: running() >= num_running, f"{num_running} trajectories running {replica}")
            wait_tokens(4 * num_running)
            if running() >= num_running:
                return

    def _ask(self, actor: Any, name: str, question: Callable[[Any], Any]) -> Any:
        if self._runtime is None:
            self._runtime = BlockingRuntime("test")
            self._runtime.__enter__()
        sockets = self.wait_for(lambda: list(self.temp_dir.glob("psrl-*/head.sock")), "the head's socket")
        connecting = self._runtime.runtime.connect(actor, name, UnixAddress(str(sockets[0])), timeout_s=60)
        return self._runtime.call(question(self._runtime.call(connecting, 70)), 60)

    # -- processes

    def starts(self, name: str) -> list[int]:
        """The pids that a named process has had in this run directory, the latest last; none of them may live."""
        return [int(pid) for pid in re.findall(r"^--- \S+ starts, pid (\d+)", self.log(name), re.MULTILINE)]

    def pid(self, name: str) -> int:
        """The pid of a named process of this start, which lives; waits for it."""

        def living() -> int | None:
            pids, ours = self.starts(name), {process.pid for process in self.processes()}
            return pids[-1] if pids and pids[-1] in ours else None

        pid: int = self.wait_for(living, f"process {name}")
        return pid

    def processes(self) -> list[psutil.Process]:
        """The launcher and all below it that live, with those seen earlier that have not ended."""
        try:
            top = psutil.Process(self.popen.pid)
            self._seen |= {process.pid: process for process in [top, *top.children(recursive=True)]}
        except psutil.NoSuchProcess:
            pass
        self._seen = {pid: process for pid, process in self._seen.items() if _lives(process)}
        return list(self._seen.values())

    def kill(self, name: str) -> int:
        """SIGKILL to a named process, once it lives; its pid."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_amid_generation(self, name: str) -> None:
        """SIGKILL to a named process while trajectories are on their way. It is stopped for the last look at them, or
        they might end between the look and the kill.
        """
        while True:
            self.wait_generating(6)
            pid = self.pid(name)
            os.kill(pid, signal.SIGSTOP)
            if any(load.num_running for load in self.rollout().replicas):
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGCONT)

    # -- the end

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the launcher's end; its exit status."""
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {deadline_s:g} s:\n{self.output()}\n{self.logs()}")

    def leftovers(self, deadline_s: float = 60.0) -> list[str]:
        """What of the run is still there `deadline_s` after the call: processes, temporary files. Call `processes`
        before the end that is looked at, so that orphans are known.
        """
        until = time.monotonic() + deadline_s
        while True:
            alive = [f"pid {process.pid}: {_command(process)}" for process in self.processes()]
            alive += [f"pid {process.pid}: {_command(process)}" for process in self._strangers()]
            found = alive + [str(path) for path in self.temp_dir.iterdir()]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.05)

    def _strangers(self) -> list[psutil.Process]:
        """Processes that name this run's temporary folder in their command line, whoever their parent is now."""
        return [process for process in psutil.process_iter() if str(self.temp_dir) in _command(process)]

    def close(self) -> None:
        """End all that is left, by force."""
        for process in [*self.processes(), *self._strangers()]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.popen.wait(DEADLINE_S)
        if self._runtime is not None:
            self._runtime.close()
        self._output.close()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def read_lines(path: Path) -> list[Record]:
    """The whole JSON lines of a file that may be in the middle of being written."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in raw.split(b"\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # torn by a kill
    return found


def _environment() -> dict[str, str]:
    """Ours, without what making the model's files left in it: torch notes there where its caches are."""
    return {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    directory = tmp_path_factory.mktemp("house")
    arithmetic(directory / "data", num_train=256, num_validation=16, num_test=16)
    return House(directory / "data", tiny(directory / "model"))


StartRun = Callable[..., LiveRun]


@pytest.fixture
def start_run(house: House, tmp_path: Path) -> Iterator[StartRun]:
    """`start_run(run_dir, *overrides, env=...)`: a run directory's name below the test's own, or a path. What still
    runs at the test's end is killed.
    """
    started: list[LiveRun] = []

    def start(run_dir: str | Path, *overrides: str, env: dict[str, str] | None = None) -> LiveRun:
        temp_dir = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: socket paths are limited
        live = LiveRun(tmp_path / run_dir, [*house.overrides(), *overrides], temp_dir, env or {})
        started.append(live)
        return live

    yield start
    for live in started:
        live.close()
