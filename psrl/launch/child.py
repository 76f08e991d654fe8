"""The entry of every process of a run: `python -m psrl.launch.child ROLE --name NAME --spec FILE`.

SIGTERM asks a role to end in order; the process ends as soon as the role has let go of what it holds. Logs go to
stderr, which the launcher keeps in `logs/NAME.log`.
"""

import argparse
import asyncio
import faulthandler
import gc
import importlib
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

from psrl.actor import run as run_loop
from psrl.errors import ConfigError, RemoteError, RunFailed
from psrl.launch.spec import RunSpec

ROLES = ("head", "replica", "trainer", "agent", "reward")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m psrl.launch.child", description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--name", required=True)
    parser.add_argument("--spec", required=True, type=Path)
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)  # the launcher's watchdog asks so
    # A role holds hundreds of thousands of objects that live as long as it: looking through them at every 700 new ones
    # takes a tenth of its start, and its loop's time afterwards.
    gc.set_threshold(50_000)
    spec = RunSpec.read(arguments.spec)
    role = importlib.import_module(f"psrl.launch.roles.{arguments.role}").run
    try:
        serve(role, spec, arguments.name)
    except Exception as failure:
        named = _named(failure)
        if named is None:
            raise
        logging.getLogger("psrl").error("%s", named)
        return 1
    return 0


def _named(failure: BaseException) -> str | None:
    """What to say of an error that names its cause, raised here or in an actor that was asked; None of any other."""
    if isinstance(failure, BaseExceptionGroup):
        return next((named for inner in failure.exceptions if (named := _named(inner)) is not None), None)
    if isinstance(failure, RemoteError) and failure.error in (ConfigError.__name__, RunFailed.__name__):
        return f"{failure.error}: {failure.text}"
    if isinstance(failure, ConfigError | RunFailed):
        return f"{type(failure).__name__}: {failure}"
    return None


def serve(role: Callable[..., Any], *arguments: Any) -> None:
    """Run a role, blocking or a coroutine, until it returns. After SIGTERM it unwinds, and this does not return."""
    if inspect.iscoroutinefunction(role):
        run_loop(_until_told(role(*arguments)))
        return
    ended = False

    def exit_in_order(signum: int, frame: object) -> None:
        if not ended:  # else the interpreter is ending as it is; an exception would tear through its tidying up
            raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, exit_in_order)
    try:
        role(*arguments)
        ended = True
    except SystemExit as told:
        _leave(int(str(told.code)))
    except BaseException:
        ended = True
        raise


async def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """Run a role until it returns or SIGTERM asks it to end."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    told = False

    def tell() -> None:
        nonlocal told
        told = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, tell)
    try:
        await task
    except asyncio.CancelledError:
        if not told:
            raise
        _leave(0)


def _leave(status: int) -> NoReturn:
    """End now: the role has let go of everything. Threads that still load a model or compute, and the tearing down of
    torch and of the interpreter, would take seconds, for nothing.
    """
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
