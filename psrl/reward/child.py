"""A scoring process: judges one sample at a time until its worker is gone. Started by `psrl.reward.process`, killed
at will.

User code may do anything here: loop, crash, print, change signals, fork. So nothing else lives in this process, and it
ends with its parent (parent-death signal, and end of file on its socket). A fork has no socket, and ends where the
user's code does. What it started stays below it in the tree of processes (it is a subreaper), so that the worker finds
and ends that too; only what has a session of its own, when this process ends by itself, lives on.
"""

import asyncio
import ctypes
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from psrl.errors import ConfigError
from psrl.reward import custom, rules
from psrl.reward.manager import Judged, judged, shape
from psrl.reward.plan import RewardPlan
from psrl.reward.wire import Done, Job, LoadFailed, Raised, Ready, Setup, frame, read_blocking, to_process

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_TEXT = 20_000
_OUR_FOLDERS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))


class Scorer:
    """The functions of a plan, loaded. Raises ConfigError if one cannot be."""

    def __init__(self, plan: RewardPlan, runner: asyncio.Runner) -> None:
        self._plan = plan
        self._runner = runner
        self._functions = [
            partial(_builtin, method=s.gsm8k_method) if s.function is None else custom.load(s.function)
            for s in plan.sources
        ]

    def answer(self, job: Job) -> Done | Raised:
        """The verdict, or what went wrong, as text. Never raises."""
        sources, answers = self._plan.sources, []
        for index, function in enumerate(self._functions):
            try:
                answers.append(self._judge(index, function, job))
            except BaseException as error:  # also SystemExit: the user's function must not decide how long we live
                return _raised(error, str(sources[index]))
        penalties, coefs = [s.overlong for s in sources], [s.coef for s in sources]
        return Done(shape(answers, penalties, coefs, job.num_response_tokens))

    def _judge(self, index: int, function: Callable[..., Any], job: Job) -> Judged:
        stated = self._plan.sources[index].function
        answer = function(
            data_source=job.data_source,
            solution_str=job.solution,
            ground_truth=job.ground_truth,
            extra_info=dict(job.extra_info),
            **(stated.kwargs if stated is not None else {}),
        )
        if inspect.isawaitable(answer):
            answer = self._runner.run(_await(answer))
        return judged(answer)


def _raised(error: BaseException, judge: str) -> Raised:
    """Who raised, what happened and where in the user's code, as text that can travel whatever it holds."""
    theirs = _outside_of_psrl(error.__traceback__)
    frames = traceback.extract_tb(theirs)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    parts = (
        f"{judge} raised {type(error).__name__}: {error}{where}",
        "".join(traceback.format_exception(type(error), error, theirs)),
    )
    return Raised(*(part.encode("utf-8", "backslashreplace").decode()[-_MAX_TEXT:] for part in parts))


def _outside_of_psrl(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the first frame on that is neither ours nor asyncio's; None if there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FOLDERS):
        trace = trace.tb_next
    return trace


def _builtin(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], method: str) -> float:
    return rules.score(data_source, solution_str, ground_truth, extra_info, method)


async def _await(answer: Any) -> Any:
    return await answer


def serve(connection: socket.socket) -> None:
    """Answer until the worker closes its end."""
    body = read_blocking(connection)
    if body is None:
        return
    setup = to_process.decode(body)
    assert isinstance(setup, Setup)
    with asyncio.Runner() as runner:
        _tie_processes(setup.parent)
        own_pid = os.getpid()
        os.register_at_fork(after_in_child=connection.close)
        try:
            scorer = Scorer(setup.plan, runner)
        except ConfigError as error:
            _end_fork(own_pid)
            connection.sendall(frame(LoadFailed(str(error))))
            return
        _end_fork(own_pid)
        connection.sendall(frame(Ready()))
        while (body := read_blocking(connection)) is not None:
            job = to_process.decode(body)
            assert isinstance(job, Job)
            answer = scorer.answer(job)
            _end_fork(own_pid)
            connection.sendall(frame(answer))


def _tie_processes(parent: int) -> None:
    """Be killed when the worker's thread that started us ends, also if that has already happened; keep below us what
    we start."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _end_fork(own_pid: int) -> None:
    """Where the user's code returns in a process that it forked: there is one answer, and it is not this one's."""
    if os.getpid() != own_pid:
        os._exit(0)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.set_inheritable(False)
        serve(connection)


if __name__ == "__main__":
    main()
