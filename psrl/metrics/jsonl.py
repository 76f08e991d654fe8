"""Metrics as lines of JSON: `{"step": 3, "actor/lr": 1e-06, ...}`, one object per call of `MetricLogger.log` and axis.

Each line is handed to the system at once and whole. A line that a kill tore is closed with a newline when the file is
opened again. A resumed run goes on in the same file: for a step and key that come twice, the later line counts.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from psrl.errors import RunFailed


class AppendFile:
    """Appends to the file at `path`, each call at once. Raises RunFailed, naming the file, when that cannot be done, or
    would not be seen because the file was removed or replaced: a run without its record is not worth going on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (closed by close)
            self.size = self._file.seek(0, os.SEEK_END)
            if self.size:
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self.append(b"\n")
        except OSError as error:
            raise RunFailed(f"cannot open {path}: {error}") from error

    def append(self, data: bytes) -> None:
        try:
            if not self._is_in_place():
                raise RunFailed(f"cannot write {self._path}: it was removed or replaced while this run was writing it")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
        except (OSError, ValueError) as error:  # ValueError: written after close
            raise RunFailed(f"cannot write {self._path}: {error}") from error
        self.size += len(data)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise RunFailed(f"cannot close {self._path}: {error}") from error

    def _is_in_place(self) -> bool:
        mine = os.fstat(self._file.fileno())
        try:
            return os.path.samestat(os.stat(self._path), mine)
        except FileNotFoundError:
            return False


class JsonlSink:
    """Appends metrics to `path`."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        self._file.append(json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class JsonlReader:
    """Follows a file of JSON lines while another process writes it. `num_damaged` counts lines that are none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.num_damaged = 0

    def poll(self) -> list[dict[str, object]]:
        """The whole lines that came since the last call; none if the file is not there yet."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [found for line in whole.splitlines() if line.strip() for found in self._parsed(line)]

    def _parsed(self, line: bytes) -> list[dict[str, object]]:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return [value]
        self.num_damaged += 1
        return []
