"""The trajectory log: what became of every trajectory, appended to `trajectories.jsonl` and `attempts.jsonl`.

Lines of a group are written in one call when it ends, and handed to the system at once: a killed process loses none
that it counted. Opening the files again begins the next attempt; a last line that a kill tore is closed with a newline,
so that every other line stays readable. A write error ends the run by name.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from psrl.control.messages import Counters
from psrl.control.records import AttemptLine, Outcome, TrajectoryLine
from psrl.errors import RunFailed
from psrl.metrics.jsonl import AppendFile
from psrl.types import GroupId, Purpose

TRAJECTORIES, ATTEMPTS = "trajectories.jsonl", "attempts.jsonl"


class TrajectoryLog:
    """Opens the files of `directory` for one more attempt, whose number is `attempt` (from 0)."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / TRAJECTORIES
        attempts = directory / ATTEMPTS
        self._encoder = msgspec.json.Encoder()
        self._trajectories = AppendFile(self._path)
        self._attempts = AppendFile(attempts)
        self.attempt = sum(kind == "start" for kind in (_kind(line) for line in _lines(attempts)))

    @staticmethod
    def ended(directory: Path) -> bool:
        """Whether the last attempt there ended in good order."""
        kinds = [kind for line in _lines(directory / ATTEMPTS) if (kind := _kind(line))]
        return bool(kinds) and kinds[-1] == "end"

    @property
    def num_bytes(self) -> int:
        """Size of trajectories.jsonl."""
        return self._trajectories.size

    def write(self, lines: Sequence[TrajectoryLine]) -> None:
        if lines:
            self._trajectories.append(b"".join(self._encoder.encode(line) + b"\n" for line in lines))

    def write_attempt(self, line: AttemptLine) -> None:
        self._attempts.append(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        self._trajectories.close()
        self._attempts.close()

    def left_behind(self, since: int, version: int) -> Counters:
        """What the lines from byte `since` on add to the counters of an attempt that starts at `version`.

        They belong to a history that is not continued: what it trained from `version` on is rolled back, other ends
        stay what they were. Groups in flight are not counted: the new attempt offers them itself.
        """
        if since >= self.num_bytes:
            return Counters()
        ends: dict[tuple[int, GroupId], Outcome] = {}
        decoder = msgspec.json.Decoder(TrajectoryLine)
        for raw in _lines(self._path, since):
            try:
                line = decoder.decode(raw)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue  # torn by a kill; its group was not counted either
            if line.purpose is not Purpose.TRAIN or line.outcome is Outcome.IN_FLIGHT:
                continue
            rolled_back = line.outcome is Outcome.TRAINED and (line.trained_at or 0) >= version
            ends[line.attempt, line.group] = Outcome.ROLLED_BACK if rolled_back else line.outcome
        counts = Counter(str(outcome) for outcome in ends.values())
        return msgspec.convert({**counts, "offered": len(ends), "type": "Counters"}, Counters)


def _lines(path: Path, since: int = 0) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(since)
            return file.read().splitlines()
    except OSError as error:
        raise RunFailed(f"cannot read {path}: {error}") from error


def _kind(line: bytes) -> str:
    try:
        return str(json.loads(line)["kind"])
    except (ValueError, KeyError, TypeError):
        return ""
