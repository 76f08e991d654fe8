"""The local launcher with real processes: ends, restarts, logs, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import psrl
from psrl.errors import RunFailed
from psrl.launch.local import Exit, LocalLauncher, ProcessSpec
from psrl.launch.logs import ConsoleView
from psrl.launch.supervise import RestartPolicy

DEADLINE_S = 60.0

IGNORE = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(99)"
)
FAMILY = """
import os, subprocess, sys, time
deaf = "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(99)
"""


def spec(tmp_path: Path, name: str, code: str, **more: object) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", code), log=tmp_path / f"{name}.log", **more)  # type: ignore[arg-type]


def quiet() -> ConsoleView:
    return ConsoleView(emit=lambda _: None)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


async def logged(path: Path, word: str) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while word not in (text := path.read_text() if path.exists() else ""):
            await asyncio.sleep(0.02)
    return text


async def test_output_goes_to_the_file_and_the_exit_is_told(tmp_path: Path) -> None:
    seen: list[Exit] = []
    async with LocalLauncher(quiet()) as launcher:
        launcher.on_exit(seen.append)
        pid = launcher.spawn(spec(tmp_path, "a", "import sys; print('out'); print('err', file=sys.stderr)"))
        async with asyncio.timeout(DEADLINE_S):
            ended = await launcher.wait("a")
        await asyncio.sleep(0)
    assert (ended.pid, ended.returncode, ended.reason, ended.expected) == (pid, 0, "ended normally", True)
    assert seen == [ended]
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert {"out", "err"} <= set(lines)
    assert lines[0] == f"--- a starts, pid {pid}, restarts 0 ---"
    assert lines[-1].startswith(f"--- a (pid {pid}): ended normally after")
    assert launcher.failure_report() is None


async def test_environment_is_added(tmp_path: Path) -> None:
    async with LocalLauncher(quiet()) as launcher:
        launcher.spawn(
            spec(tmp_path, "e", "import os; print(os.environ['WORD'], 'PATH' in os.environ)", env={"WORD": "w"})
        )
        await asyncio.wait_for(launcher.wait("e"), DEADLINE_S)
    assert "w True" in (tmp_path / "e.log").read_text()


async def test_a_killed_process_is_restarted_with_a_new_pid_until_the_limit(tmp_path: Path) -> None:
    exits: list[Exit] = []
    policy = RestartPolicy(max_restarts=2, backoff_s=0.01)
    async with LocalLauncher(quiet()) as launcher:
        launcher.on_exit(exits.append)
        launcher.spawn(spec(tmp_path, "r", "import os; os.kill(os.getpid(), 9)", restart=policy))
        last = await asyncio.wait_for(launcher.wait("r"), DEADLINE_S)
        await asyncio.sleep(0)
    assert [exit_.restart_in_s for exit_ in exits] == [0.01, 0.02, None]
    assert len({exit_.pid for exit_ in exits}) == 3
    assert last.reason == "killed by signal 9 (SIGKILL)"
    assert (launcher.failure_report() or "").startswith(f"First failure: {last}\n")
    assert launcher.running == ()


async def test_the_first_failure_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    async with LocalLauncher(quiet()) as launcher:
        launcher.spawn(spec(tmp_path, "first", "print('before'); raise ValueError('the cause')"))
        await asyncio.wait_for(launcher.wait("first"), DEADLINE_S)
        launcher.spawn(spec(tmp_path, "second", "raise SystemExit(3)"))
        await asyncio.wait_for(launcher.wait("second"), DEADLINE_S)
    report = launcher.failure_report() or ""
    assert report.startswith("First failure: first (pid")
    assert "ValueError: the cause" in report
    assert "before" not in report  # the traceback alone says it
    assert f"Whole log: {tmp_path / 'first.log'}" in report
    assert report.endswith("Ended after it: second (exit status 3)")


async def test_a_program_that_is_not_there_is_a_failure_that_says_so(tmp_path: Path) -> None:
    async with LocalLauncher(quiet()) as launcher:
        launcher.spawn(ProcessSpec(name="x", argv=("/no/such/program",), log=tmp_path / "x.log"))
        ended = await asyncio.wait_for(launcher.wait("x"), DEADLINE_S)
    assert not ended.expected
    assert "cannot run /no/such/program: No such file or directory" in (launcher.failure_report() or "")


async def test_stop_is_orderly_and_kills_who_ignores_it(tmp_path: Path) -> None:
    polite = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(99)"
    )
    async with LocalLauncher(quiet()) as launcher:
        launcher.spawn(spec(tmp_path, "polite", polite))
        launcher.spawn(spec(tmp_path, "deaf", IGNORE))
        both = [psutil.Process(launcher.pid(name)) for name in ("polite", "deaf")]
        await logged(tmp_path / "polite.log", "ready")
        await logged(tmp_path / "deaf.log", "ready")
        await launcher.stop("polite", grace_s=DEADLINE_S)
        assert (await launcher.wait("polite")).returncode == 0
        await launcher.stop_all(grace_s=0.5)
        assert (await launcher.wait("deaf")).returncode == -signal.SIGKILL
    assert "bye" in (tmp_path / "polite.log").read_text()
    assert not any(map(alive, both))
    assert launcher.failure_report() is None  # asked for


async def test_grandchildren_end_with_their_parent(tmp_path: Path) -> None:
    async with LocalLauncher(quiet()) as launcher:
        launcher.spawn(spec(tmp_path, "family", FAMILY))
        pids = (await logged(tmp_path / "family.log", "pids")).split("pids ")[1].split()[:2]
        parent, child = (psutil.Process(int(pid)) for pid in pids)
        parent.kill()
        await asyncio.wait_for(launcher.wait("family"), DEADLINE_S)
        await asyncio.to_thread(wait_until, lambda: not alive(child))


async def test_stop_cancels_a_restart_that_waits(tmp_path: Path) -> None:
    async with LocalLauncher(quiet()) as launcher:
        waiting = RestartPolicy(max_restarts=5, backoff_s=60, max_backoff_s=60)
        launcher.spawn(spec(tmp_path, "w", "raise SystemExit(1)", restart=waiting))
        async with asyncio.timeout(DEADLINE_S):
            while launcher.pid("w") is not None:
                await asyncio.sleep(0.02)
        assert launcher.running == ("w",)
        await launcher.stop_all(grace_s=5)
        assert launcher.running == ()
        with_name_free = launcher.spawn(spec(tmp_path, "w", "pass"))
        assert with_name_free > 0
        with pytest.raises(RunFailed, match="w runs already"):
            launcher.spawn(spec(tmp_path, "w", "pass"))


async def test_long_lines_progress_bars_and_binary_reach_the_file_whole(tmp_path: Path) -> None:
    code = """
import sys
sys.stdout.buffer.write(b"x" * 200_000 + b"\\n")
sys.stdout.buffer.write(b"\\xff\\xfe bytes\\n")
sys.stdout.buffer.write(b"1%\\r2%\\r3%\\nno newline at the end")
"""
    shown: list[str] = []
    async with LocalLauncher(ConsoleView(shown.append, lambda name: True)) as launcher:
        launcher.spawn(spec(tmp_path, "l", code))
        await asyncio.wait_for(launcher.wait("l"), DEADLINE_S)
    data = (tmp_path / "l.log").read_bytes()
    assert data.count(b"x") >= 200_000
    assert b"\xff\xfe bytes\n" in data
    assert b"no newline at the end\n" in data
    assert "[l] 3%" in shown
    assert "[l] \\xff\\xfe bytes" in shown


async def test_many_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    code = "import sys\nfor k in range(500): print(sys.argv[1] * 300, file=(sys.stderr, sys.stdout)[k % 2], flush=True)"
    shown: list[str] = []
    async with LocalLauncher(ConsoleView(shown.append, lambda name: True)) as launcher:
        for name in "abc":
            argv = (sys.executable, "-c", code, name)
            launcher.spawn(ProcessSpec(name=name, argv=argv, log=tmp_path / f"{name}.log"))
        for name in "abc":
            await asyncio.wait_for(launcher.wait(name), DEADLINE_S)
    assert sorted(shown) == [f"[{name}] {name * 300}" for name in "abc" for _ in range(500)]
    for name in "abc":
        assert (tmp_path / f"{name}.log").read_text().splitlines()[1:-1] == [name * 300] * 500


_LAUNCHER = """
import asyncio, sys, uvloop
from pathlib import Path
from psrl.launch.interrupt import Interrupted, until_interrupted
from psrl.launch.local import LocalLauncher, ProcessSpec
from psrl.launch.logs import ConsoleView

FOLDER = Path(sys.argv[1])

async def main():
    launcher = LocalLauncher(ConsoleView(emit=lambda _: None), grace_s=float(sys.argv[2]))
    async def work():
        async with launcher:
            launcher.remove_at_end(FOLDER / "sockets")
            for name, code in (("family", {family!r}), ("deaf", {ignore!r})):
                launcher.spawn(ProcessSpec(name=name, argv=(sys.executable, "-c", code), log=FOLDER / f"{{name}}.log"))
            await asyncio.sleep(99)
        return 0
    try:
        return await until_interrupted(work(), launcher.kill_all)
    except Interrupted as interrupted:
        return 128 + interrupted.signal

sys.exit(uvloop.run(main()))
"""


def start_launcher(tmp_path: Path, grace_s: float) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A launcher in a process of its own, and all that belongs to it."""
    (tmp_path / "sockets").mkdir()
    (script := tmp_path / "launcher.py").write_text(textwrap.dedent(_LAUNCHER.format(family=FAMILY, ignore=IGNORE)))
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(grace_s)],
        env={**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])},
    )
    logs = [tmp_path / "family.log", tmp_path / "deaf.log"]
    wait_until(
        lambda: all(log.exists() for log in logs) and "pids" in logs[0].read_text() and "ready" in logs[1].read_text()
    )
    return launcher, psutil.Process(launcher.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_ends_everything_in_order(tmp_path: Path, number: signal.Signals) -> None:
    launcher, family = start_launcher(tmp_path, grace_s=0.5)
    launcher.send_signal(number)
    assert launcher.wait(DEADLINE_S) == 128 + number
    assert len(family) == 4  # guard, family and its child, deaf
    wait_until(lambda: not any(map(alive, family)))
    assert not (tmp_path / "sockets").exists()
    assert "did not end within 0.5 s of SIGTERM and is killed" in (tmp_path / "deaf.log").read_text()


def test_a_second_ctrl_c_does_not_wait_for_the_deaf(tmp_path: Path) -> None:
    launcher, family = start_launcher(tmp_path, grace_s=500)
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: sum(map(alive, family)) == 2)  # guard and deaf: the signal was heard
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130
    wait_until(lambda: not any(map(alive, family)))


def test_kill_9_of_the_launcher_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    launcher, family = start_launcher(tmp_path, grace_s=1)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    wait_until(lambda: not any(map(alive, family)))
    wait_until(lambda: not (tmp_path / "sockets").exists())


def test_kill_9_of_guard_and_launcher_leaves_no_child(tmp_path: Path) -> None:
    launcher, family = start_launcher(tmp_path, grace_s=1)
    guard = next(child for child in family if "guard.py" in " ".join(child.cmdline()))
    guard.kill()
    children = [child for child in psutil.Process(launcher.pid).children() if child != guard]
    grandchildren = [grandchild for child in children for grandchild in child.children()]
    launcher.kill()
    launcher.wait(DEADLINE_S)
    wait_until(lambda: not any(map(alive, children)))  # by the parent-death signal alone
    for grandchild in grandchildren:
        grandchild.kill()
