"""examples/embed/train_and_consume.py as its README says, and with either process killed."""

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import psrl

PROGRAM = Path(psrl.__file__).parents[1] / "examples/embed/train_and_consume.py"


class Run:
    """The program and its consumer, which write to one pipe."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.said = process, list[str]()
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def until(self, pattern: str, timeout_s: float = 200) -> "re.Match[str]":
        """The first line that matches. "" is the end: of both processes."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{pattern} was not said; this was: {self.said}") from None
            self.said.append(line)
            found = re.search(pattern, line)
            if found or not line:
                assert found, f"both ended; they said {self.said}"
                return found


@contextmanager
def running(folder: str, *arguments: str) -> Iterator[Run]:
    # A session of their own, so that all of it can be ended.
    environment = {
        **os.environ,
        "TMPDIR": f"{folder}/tmp",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",  # torch makes it when it is imported
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield Run(process)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="e") as made:  # short enough for sockets
        os.mkdir(f"{made}/tmp")
        yield made


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_it_learns_with_what_crossed_between_the_processes(nodes: str, folder: str) -> None:
    with running(folder, "--nodes", nodes, "--steps", "30") as run:
        first = float(run.until(r"trainer: step 10, mean reward (\S+), rows up to [01] versions old").group(1))
        last = float(run.until(r"consumer: version 30, mean reward (\S+)$").group(1))
        assert first < 0.6 < last
        run.until(r"^$")
        assert run.process.wait(timeout=60) == 0
    assert os.listdir(f"{folder}/tmp") == []


@pytest.mark.parametrize("nodes", [pytest.param("1", marks=pytest.mark.deep), "2"])
def test_a_killed_trainer_is_told_by_the_consumer_which_ends(nodes: str, folder: str) -> None:
    with running(folder, "--nodes", nodes, "--steps", "1000000") as run:
        trainer = int(run.until(r"trainer: process (\d+)").group(1))
        run.until("trainer: step 10")
        os.kill(trainer, signal.SIGKILL)
        assert "the queue is gone with it" in run.until("consumer: the trainer is gone: .*", 30).group(0)
        assert (
            int(run.until(r"consumer: the last version here is (\d+), whole").group(1)) >= 9
        )  # of 10, it may not have all
        run.until("^$")  # the consumer has ended too
    if nodes == "1":
        assert os.listdir(f"{folder}/tmp") == []


@pytest.mark.parametrize("nodes", [pytest.param("1", marks=pytest.mark.deep), "2"])
def test_a_killed_consumer_is_told_by_the_trainer_which_ends(nodes: str, folder: str) -> None:
    with running(folder, "--nodes", nodes, "--steps", "1000000") as run:
        consumer = int(run.until(r"consumer: process (\d+)").group(1))
        run.until("trainer: step 10")
        os.kill(consumer, signal.SIGKILL)
        lost = run.until(r"trainer: the consumer is gone: .*; the last version is (\d+)", 30)
        assert int(lost.group(1)) >= 10
        run.until(r"trainer: \d+ of its rows are here" if nodes == "1" else r"trainer: its node had \d+ rows")
        run.until("^$")
        assert run.process.wait(timeout=60) == 1
