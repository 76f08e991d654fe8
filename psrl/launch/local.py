"""Processes of this machine: started, watched, restarted, their output kept, and none left behind.

    launcher -- guard            (one; kills what is left if the launcher itself is killed)
       |------ child             own session and process group; dies with the launcher (PR_SET_PDEATHSIG)
       |          `- grandchild  killed with the group when the child ends, or by the guard

Ends are noticed through a pidfd. The child is reaped only after its group was killed, so the group's number cannot have
been given to others. Everything runs on the event loop of the thread that spawns: that thread must live as long as the
launcher, since the kernel ties the parent-death signal to it. A grandchild that makes a session of its own escapes the
group; nothing of PSRL does.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

import msgspec

from psrl import clock
from psrl.errors import RunFailed
from psrl.launch.logs import ConsoleView, LogPump
from psrl.launch.supervise import RestartPolicy, Restarts, reason

_HERE = Path(__file__).parent
_PYTHON = (sys.executable, "-I", "-S")
_KILL_WAIT_S = 30.0  # a killed process that is not gone by then is stuck in the kernel; large memory takes seconds

_log = logging.getLogger(__name__)


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to run. `env` is added to the launcher's environment."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: dict[str, str] = {}
    restart: RestartPolicy = RestartPolicy()


class Exit(msgspec.Struct, frozen=True):
    """How one life of a process ended."""

    name: str
    pid: int
    returncode: int  # negative: the signal that killed it
    reason: str
    uptime_s: float
    expected: bool  # asked to stop, or ended with status 0
    restart_in_s: float | None  # None: it is not started again
    log: Path

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}): {self.reason} after {self.uptime_s:.1f} s"


class _Process:
    """One named process over all its lives."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.restarts = Restarts(spec.restart)
        self.popen: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.pump: LogPump | None = None
        self.started_s = 0.0
        self.stopping = False
        self.timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()


class LocalLauncher:
    """Use as `async with`; leaving it stops what still runs.

    `on_exit` callbacks get every Exit, restarted or not, on the event loop.
    """

    def __init__(self, view: ConsoleView | None = None, *, max_log_bytes: int = 1 << 28, grace_s: float = 8.0) -> None:
        self._view = view or ConsoleView()
        self._max_log_bytes = max_log_bytes
        self._grace_s = grace_s
        self._processes: dict[str, _Process] = {}
        self._callbacks: list[Callable[[Exit], None]] = []
        self._failures: list[tuple[Exit, list[str]]] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._to_guard: IO[bytes] | None = None

    async def __aenter__(self) -> Self:
        self._start_guard()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_all(self._grace_s)
        if self._guard is not None and self._to_guard is not None:
            self._to_guard.close()
            await asyncio.to_thread(self._guard.wait, 10)
            self._guard = self._to_guard = None

    # -- starting

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [*_PYTHON, str(_HERE / "guard.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self._to_guard = self._guard.stdin

    def remove_at_end(self, folder: Path) -> None:
        """Have `folder` (sockets, say) removed when the launcher ends, however it ends."""
        self._tell_guard(f"rm {folder}")

    def spawn(self, spec: ProcessSpec) -> int:
        """Start a process under a new name; return its pid. A program that is not there ends at once, and says so."""
        if spec.name in self._processes and not self._processes[spec.name].ended.done():
            raise RunFailed(f"a process named {spec.name} runs already")
        process = self._processes[spec.name] = _Process(spec)
        return self._start(process)

    def _start(self, process: _Process) -> int:
        spec, loop = process.spec, asyncio.get_running_loop()
        process.timer = None
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            popen = subprocess.Popen(
                [*_PYTHON, str(_HERE / "boot.py"), str(os.getpid()), *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        except BaseException:  # also when interrupted: no pump owns the pipe yet
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._tell_guard(f"+{popen.pid}")
        process.popen = popen
        process.pidfd = os.pidfd_open(popen.pid)
        process.started_s = clock.now()
        process.pump = LogPump(spec.name, read_fd, spec.log, self._view, self._max_log_bytes)
        process.pump.note(f"{spec.name} starts, pid {popen.pid}, restarts {process.restarts.num}")
        loop.add_reader(process.pidfd, self._ended, process)
        return popen.pid

    def _start_again(self, process: _Process) -> None:
        try:
            self._start(process)
        except OSError as error:
            why = f"cannot be started again: {error.strerror}"
            failure = Exit(process.spec.name, 0, 1, why, 0.0, False, None, process.spec.log)
            self._failures.append((failure, []))
            process.ended.set_result(failure)
            self._call_back(failure)

    # -- watching

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        self._callbacks.append(callback)

    def pid(self, name: str) -> int | None:
        """The pid of the process now, or None between two lives and after the last."""
        process = self._processes.get(name)
        return process.popen.pid if process and process.popen else None

    @property
    def running(self) -> tuple[str, ...]:
        """Names of processes that live or are about to be started again."""
        return tuple(name for name, process in self._processes.items() if not process.ended.done())

    async def wait(self, name: str) -> Exit:
        """Wait for the last life's end. Give it a time limit of your own."""
        return await asyncio.shield(self._processes[name].ended)

    def _ended(self, process: _Process) -> None:
        popen, pump = process.popen, process.pump
        assert popen is not None
        assert pump is not None
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
        _kill_group(popen.pid)  # what the child left behind; as it is not reaped yet, the number is still its own
        returncode = popen.wait()
        process.popen = None
        self._tell_guard(f"-{popen.pid}")
        uptime_s = clock.now() - process.started_s
        expected = process.stopping or returncode == 0
        delay = None if expected else process.restarts.after(uptime_s)
        name, log = process.spec.name, process.spec.log
        ended = Exit(name, popen.pid, returncode, reason(returncode), uptime_s, expected, delay, log)
        pump.close(f"{ended}" + (f"; starts again in {delay:g} s" if delay is not None else ""))
        if not expected and delay is None:
            self._failures.append((ended, pump.tail()))
        if delay is None:
            process.ended.set_result(ended)
        else:
            process.timer = asyncio.get_running_loop().call_later(delay, self._start_again, process)
        self._call_back(ended)

    def _call_back(self, ended: Exit) -> None:
        for callback in self._callbacks:
            asyncio.get_running_loop().call_soon(callback, ended)

    # -- stopping

    async def stop(self, name: str, grace_s: float) -> None:
        """SIGTERM, up to `grace_s` for an orderly end, then SIGKILL for the whole group."""
        await self._stop([self._processes[name]], grace_s)

    async def stop_all(self, grace_s: float) -> None:
        """The same for all processes at once. Raises RunFailed if one cannot be ended."""
        await self._stop(list(self._processes.values()), grace_s)

    def kill_all(self) -> None:
        """SIGKILL every group now. Ends are noticed by the event loop afterwards."""
        for process in self._processes.values():
            self._no_more(process)
            if process.popen is not None:
                _kill_group(process.popen.pid)

    async def _stop(self, processes: list[_Process], grace_s: float) -> None:
        for process in processes:
            self._no_more(process)
            if process.popen is not None:
                process.popen.terminate()
        if await _wait(processes, grace_s):
            return
        for process in processes:
            if process.popen is not None:
                if process.pump is not None:  # no signal interrupts a long computation: nothing to warn of
                    process.pump.note(f"{process.spec.name} did not end within {grace_s:g} s of SIGTERM and is killed")
                _kill_group(process.popen.pid)
        if not await _wait(processes, _KILL_WAIT_S):
            stuck = [process.spec.name for process in processes if not process.ended.done()]
            raise RunFailed(f"killed, but still there after {_KILL_WAIT_S:g} s: {', '.join(stuck)}")

    def _no_more(self, process: _Process) -> None:
        """From here on no end of it is a failure, and none is followed by a start."""
        process.stopping = True
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None
            spec = process.spec
            process.ended.set_result(Exit(spec.name, 0, 0, "stopped between two lives", 0.0, True, None, spec.log))

    # -- telling

    def failure_report(self) -> str | None:
        """The first failure with its last lines and where the rest is; to be shown last. Later ones by name only."""
        if not self._failures:
            return None
        (first, lines), *later = self._failures
        parts = [f"First failure: {first}", *(f"    {line}" for line in lines), f"Whole log: {first.log}"]
        if later:
            parts.append("Ended after it: " + ", ".join(f"{other.name} ({other.reason})" for other, _ in later))
        return "\n".join(parts)

    def _tell_guard(self, line: str) -> None:
        if self._to_guard is None:
            return
        try:
            self._to_guard.write(f"{line}\n".encode())
            self._to_guard.flush()
        except BrokenPipeError:
            _log.warning("the guard process is gone; if the launcher is killed, grandchildren may outlive it")
            self._to_guard = None


async def _wait(processes: list[_Process], timeout_s: float) -> bool:
    pending = [process.ended for process in processes if not process.ended.done()]
    if pending:
        await asyncio.wait(pending, timeout=timeout_s)
    return all(process.ended.done() for process in processes)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        os.kill(group, signal.SIGKILL)  # a group in which one member changed its user
