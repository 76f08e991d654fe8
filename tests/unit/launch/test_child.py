"""SIGTERM ends the process of a role as soon as the role has let go, whatever its threads still do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import psrl

DEADLINE_S = 60.0

COROUTINE = """
import asyncio, time
from psrl.launch.child import serve
async def role():
    try:
        print("runs", flush=True)
        await asyncio.to_thread(time.sleep, 600)  # loads a model, say
    finally:
        print("let go", flush=True)
serve(role)
"""
BLOCKING = """
import asyncio, threading, time
from psrl.actor import BlockingRuntime
from psrl.launch.child import serve
def role():
    threading.Thread(target=time.sleep, args=(600,)).start()
    with BlockingRuntime("trainer-0") as runtime:
        try:
            print("runs", flush=True)
            runtime.call(asyncio.sleep(600), 600)
        finally:
            print("let go", flush=True)
serve(role)
"""


@pytest.mark.parametrize(("code", "status"), [(COROUTINE, 0), (BLOCKING, 128 + signal.SIGTERM)])
def test_a_role_told_to_end_does_not_wait_for_threads(code: str, status: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "runs\n"
            child.terminate()
            assert child.wait(DEADLINE_S) == status
            assert child.stdout.read() == "let go\n"
        finally:
            child.kill()


LEAVING = """
import atexit, time
from psrl.launch.child import serve
def tidy_up():
    print("tidies up", flush=True)
    time.sleep(0.5)
    print("tidied up", flush=True)
atexit.register(tidy_up)
serve(lambda: None)
"""


def test_a_process_that_ends_by_itself_is_not_torn_out_of_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", LEAVING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            assert child.stdout.readline() == "tidies up\n"
            child.terminate()
            assert child.wait(DEADLINE_S) == 0
            assert child.stdout.read() == "tidied up\n"
            assert child.stderr.read() == ""
        finally:
            child.kill()
