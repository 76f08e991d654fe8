"""The worker's side of one scoring process: start it, give it a sample, kill it.

At most one sample is with a process. Whatever ends a sample other than an answer (time limit, cancellation, a broken
frame) ends the process too, because nobody knows what it is doing; the next sample starts a new one. Nothing here
uses signals' handlers or the main thread: death is seen as end of file and waited for through a pidfd.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from psrl.errors import ConfigError, PsrlError, WireError
from psrl.reward.plan import RewardPlan
from psrl.reward.wire import (
    Done,
    FromProcess,
    Job,
    LoadFailed,
    Raised,
    Setup,
    frame,
    from_process,
    length_of,
    read_blocking,
)

START_TIMEOUT_S = 60.0  # interpreter, and whatever the user's file imports
END_TIMEOUT_S = 10.0  # of a killed process to be gone
_MAX_ROUNDS = 16  # of looking for what a child has started: while it is killed it may start more
_EXIT_TIMEOUT_S = 10.0  # of a process that closed its socket to end: only then can be said how


class ScoreTimeout(PsrlError):
    """The function did not answer within its time limit; its process was killed."""


class ProcessDied(PsrlError):
    """The scoring process ended while it judged a sample, or could not be started."""


class ScoringProcess:
    """A child process that judges samples for this plan, started when first needed. Not for concurrent use."""

    def __init__(self, plan: RewardPlan) -> None:
        self._plan = plan
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Of the running child; None when there is none."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child and load the functions. Raises ConfigError if one cannot be loaded, ProcessDied."""
        assert self._child is None
        self._child, connection = _spawn()
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await self._ask(Setup(self._plan, os.getpid()))
        except TimeoutError:
            await self.kill()
            raise ProcessDied(f"{self._plan}: not loaded after {START_TIMEOUT_S:g} s") from None
        except BaseException:  # also when cancelled: half started, it is of no use
            await self.kill()
            raise
        if isinstance(answer, LoadFailed):
            await self.kill()
            raise ConfigError(answer.problem)

    async def judge(self, job: Job, timeout_s: float) -> Done | Raised:
        """The verdict on one sample. Raises ScoreTimeout or ProcessDied; the process is gone then."""
        if self._child is None:
            await self.start()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(job)
        except TimeoutError:
            await self.kill()
            raise ScoreTimeout(
                f"{self._plan} gave no score within reward.reward_loop_worker.timeout_s={timeout_s:g} s"
            ) from None
        except BaseException:  # also when cancelled: its late answer would be taken for the next sample's
            await self.kill()
            raise
        assert isinstance(answer, Done | Raised)
        return answer

    async def kill(self) -> None:
        """End the child and what it started; returns when it is gone. Fine to call when there is none."""
        child, writer = self._child, self._writer
        self._child = self._reader = self._writer = None
        if writer is not None:
            writer.transport.abort()
        if child is not None:
            _end_group(child)
            if not await _gone(child, END_TIMEOUT_S):
                raise ProcessDied(f"scoring process {child.pid} cannot be ended: it is stuck in the kernel")

    async def _ask(self, message: Setup | Job) -> FromProcess:
        assert self._reader is not None
        assert self._writer is not None
        assert self._child is not None
        try:
            self._writer.write(frame(message))
            await self._writer.drain()
            head = await self._reader.readexactly(4)
            return from_process.decode(await self._reader.readexactly(length_of(head)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await _gone(self._child, _EXIT_TIMEOUT_S)
            raise ProcessDied(f"{self._plan}: its process ended ({_ending(self._child.returncode)})") from error
        except ValueError as error:  # msgspec: not one of our messages
            raise WireError(f"{self._plan}: its process sent something that is no answer: {error}") from error


def verify(plan: RewardPlan) -> None:
    """Load the plan's functions once, in a process of their own, and end it. Blocking; raises ConfigError."""
    child, connection = _spawn()
    with connection:
        connection.settimeout(START_TIMEOUT_S)
        try:
            connection.sendall(frame(Setup(plan, os.getpid())))
            body = read_blocking(connection)
        except TimeoutError:
            raise ConfigError(f"{plan}: not loaded after {START_TIMEOUT_S:g} s") from None
        except ConnectionError:
            body = None
        finally:
            _end_group(child)
            child.wait(END_TIMEOUT_S)
    if body is None:
        raise ConfigError(f"{plan}: loading it ended its process ({_ending(child.returncode)})")
    answer = from_process.decode(body)
    if isinstance(answer, LoadFailed):
        raise ConfigError(answer.problem)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A child and our end of its socket. The child has its own process group, so that Ctrl-C is ours to handle."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "psrl.reward.child", str(theirs.fileno())]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0, close_fds=True
        )
    ours.setblocking(False)
    return child, ours


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all below it. Its id is still ours: it is not waited for before.

    Below it may be other process groups and sessions. The child is stopped while they are looked for, so that it
    neither starts more nor gives ids back.
    """
    if child.returncode is not None:
        return
    os.kill(child.pid, signal.SIGSTOP)
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        found = _below(child.pid) - killed
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    os.killpg(child.pid, signal.SIGKILL)


def _below(pid: int) -> set[int]:
    """Ids of the children of a process, and of theirs. Empty where the kernel does not tell, or it has ended."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                new = set(map(int, children.read_text().split())) - found
                found |= new
                waiting += new
    return found


async def _gone(child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait until a child has ended, end what it started, and reap it. False if it has not ended in time."""
    if child.returncode is not None:
        return True
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(child.pid)
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    _end_group(child)
    child.wait()
    return True


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
