"""Metrics as lines of JSON: `{"step": 3, "actor/lr": 1e-06, ...}`, one object per call of `MetricLogger.log` and axis.

Each line is handed to the system at once and whole. A line that a kill tore is closed with a newline when the file is
opened again. A resumed run goes on in the same file: for a step and key that come twice, the later line counts.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from psrl.errors import RunFailed


class JsonlSink:
    """Appends to `path`. Raises RunFailed when that cannot be done: a run without its record is not worth going on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (closed by close)
            if self._file.seek(0, os.SEEK_END) > 0:
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._append(b"\n")
        except OSError as error:
            raise RunFailed(f"cannot open {path}: {error}") from error

    def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        self._append(json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def _append(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError as error:
            raise RunFailed(f"cannot write {self._path}: {error}") from error


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
