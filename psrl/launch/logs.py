"""Output of child processes: whole lines to one file each, chosen lines to the console, the last ones remembered.

A child writes to one pipe (stdout and stderr together, so their order is kept). `LogPump` reads it on the launcher's
event loop without blocking, cuts it into lines, and appends them to `logs/<name>.log`. A line longer than
MAX_LINE_BYTES is cut into pieces of that length. A file above `max_file_bytes` is moved to `<name>.log.1` and begun
anew. When the disk is full the run goes on: dropped lines are counted, and the count is written when there is room.
"""

import asyncio
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_STAMPED = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S* ([A-Z]+) ")
_ALARMING = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called|\S*Error: |Killed|OOM")
_LOUD = frozenset({"WARNING", "ERROR", "CRITICAL"})
_TAIL_LINES = 60

_log = logging.getLogger(__name__)


def print_line(line: str) -> None:
    """The default console: one line on stderr, characters that it cannot show escaped."""
    encoding = sys.stderr.encoding or "utf-8"
    sys.stderr.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stderr.flush()


class LineHandler(logging.Handler):
    """The launcher's own log on whatever stderr is by then: a progress bar puts itself there while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(self.format(record))


def last_state(line: str) -> str:
    """Of a bar that redraws itself in one line, what it showed last."""
    return line.rstrip("\r").rpartition("\r")[2]


class ConsoleView:
    """Chooses what of all processes' lines the console shows, prefixed with `[name]`.

    Shown: lines logged at WARNING and above, tracebacks, whatever follows such a line without a time stamp of its own,
    and everything from processes that `everything_of` names. `emit` gets whole lines and owns the terminal, so a
    progress bar can put them above itself.
    """

    def __init__(
        self, emit: Callable[[str], None] = print_line, everything_of: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.emit = emit
        self._everything_of = everything_of
        self._showing: dict[str, bool] = {}

    def line(self, name: str, text: str) -> None:
        text = last_state(text)
        if self.wants(name, text):
            self.emit(f"[{name}] {text}")

    def wants(self, name: str, text: str) -> bool:
        if self._everything_of(name):
            return True
        if stamp := _STAMPED.match(text):
            self._showing[name] = stamp.group(1) in _LOUD
        elif _ALARMING.match(text):
            self._showing[name] = True
        return self._showing.get(name, False)


class LineCutter:
    """Bytes in, whole lines out. `rest()` gives what never got its newline."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._pending += data
        *lines, rest = bytes(self._pending).split(b"\n")
        pieces = [piece for line in lines for piece in self._pieces(line)]
        while len(rest) >= self._max:
            pieces.append(rest[: self._max])
            rest = rest[self._max :]
        self._pending = bytearray(rest)
        return pieces

    def rest(self) -> list[bytes]:
        rest = bytes(self._pending)
        self._pending.clear()
        return self._pieces(rest) if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        return [line[at : at + self._max] for at in range(0, len(line), self._max)] or [b""]


class LogFile:
    """Appends lines to one file, never raises for want of room."""

    def __init__(self, path: Path, max_file_bytes: int) -> None:
        self.path = path
        self._max = max_file_bytes
        self._dropped = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        note = [b"--- %d lines could not be written ---" % self._dropped] if self._dropped else []
        data = b"".join(line + b"\n" for line in [*note, *lines])
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            self._dropped = 0
            if os.fstat(self._fd).st_size > self._max:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                os.close(self._fd)
                self._fd = self._open()
        except OSError as error:
            if not self._dropped:
                _log.warning("%s cannot be written: %s", self.path, error.strerror)
            self._dropped += len(lines)

    def close(self) -> None:
        os.close(self._fd)


class LogPump:
    """Moves one child's output from its pipe. Owns `read_fd` and the file until `close`."""

    def __init__(self, name: str, read_fd: int, path: Path, view: ConsoleView, max_file_bytes: int) -> None:
        self.name = name
        self.path = path
        self._fd = read_fd
        self._view = view
        self._file = LogFile(path, max_file_bytes)
        self._cutter = LineCutter()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._open = True
        os.set_blocking(read_fd, False)
        asyncio.get_running_loop().add_reader(read_fd, self._read_once)

    def note(self, text: str) -> None:
        """Write a line of the launcher's own into the file."""
        self._file.write([f"--- {text} ---".encode()])

    def close(self, last_note: str) -> None:
        """Take what is still in the pipe, write a last line of the launcher's own, and let go of pipe and file."""
        while self._open and self._read_once():
            pass
        self._end_of_pipe()
        self.note(last_note)
        self._file.close()

    def tail(self, num_lines: int = 20) -> list[str]:
        """The last lines; from the start of the last traceback, if there is one among them."""
        lines = list(self._tail)
        starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        return lines[starts[-1] :] if starts else lines[-num_lines:]

    def _read_once(self) -> bool:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end_of_pipe()
            return False
        self._take(self._cutter.feed(data))
        return True

    def _take(self, lines: list[bytes]) -> None:
        self._file.write(lines)
        for line in lines:
            text = line.decode("utf-8", "backslashreplace")
            self._tail.append(last_state(text)[:2000])
            self._view.line(self.name, text)

    def _end_of_pipe(self) -> None:
        if not self._open:
            return
        self._open = False
        asyncio.get_running_loop().remove_reader(self._fd)
        self._take(self._cutter.rest())
        os.close(self._fd)
