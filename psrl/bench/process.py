"""A process that is told what to do, and answers, in lines of JSON over its standard streams. It ends with its input.

Any shell carries them, ssh's too; what else a login prints is passed over. Whoever started it may be killed: the input
ends, and so does the process.
"""

import contextlib
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from psrl.errors import BenchError

HEAR_S = 600.0
_END_S = 20.0


class Process:
    """`name` is for messages. A context manager; made is started."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise BenchError(f"{name}: {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def say(self, value: object) -> None:
        """Whoever has ended says so when it is heard."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(msgspec.json.encode(value) + b"\n")
            self._input.flush()

    def hear(self, kind: Any = Any, timeout_s: float = HEAR_S) -> Any:
        """The next line that is a `kind`. Raises BenchError if the process ends, or says nothing in that time."""
        late = threading.Timer(timeout_s, self._process.kill)
        late.start()
        try:
            while line := self._output.readline():
                with contextlib.suppress(msgspec.DecodeError):
                    return msgspec.json.decode(line, type=kind)
            what = "ended early; what it said is above" if late.is_alive() else f"said nothing in {timeout_s:g} s"
            raise BenchError(f"{self._name}: its process {what}")
        finally:
            late.cancel()

    def ask(self, value: object) -> Any:
        self.say(value)
        return self.hear()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
