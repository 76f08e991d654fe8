"""Standard streams that cannot hurt: a closed one is /dev/null, one that nobody takes any more loses what is written.

A run is worth more than its console: whoever reads it may end (`| head`), its disk may be full, its terminal may go.
The files of the run directory have everything.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


def open_missing() -> None:
    """Open descriptors 0 to 2 on /dev/null where they are closed, lest sockets get their numbers. Call it first."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            assert opened == descriptor
            os.set_inheritable(opened, True)
            setattr(sys, name, open(opened, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (of the process)


def let_fail() -> None:
    """From here on errors of stdout and stderr are nobody's concern."""
    sys.stdout, sys.stderr = _forgiving(sys.stdout), _forgiving(sys.stderr)


def delivered(program: str, command: Callable[[], int]) -> int:
    """The status of a command that writes to stdout; 1 if its output, or a file of its own, could not be written."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except OSError as error:
        sys.stdout = _forgiving(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # else the reader has had enough: `| head`
            print(f"{program}: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 1


class _Forgiving(io.FileIO):
    """A descriptor that takes everything, whether it arrives or not."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _forgiving(stream: TextIO) -> TextIO:
    with contextlib.suppress(OSError):
        stream.flush()
    try:
        descriptor = stream.fileno()
    except OSError:
        return stream  # in memory: somebody embeds us
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
