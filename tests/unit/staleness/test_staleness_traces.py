"""Operation by operation agreement with recorded buffer states, positions included."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from psrl.staleness import Denied, Ledger, Occupied, Place
from psrl.types import GroupId, Version


def _cases() -> list[dict[str, Any]]:
    folder = os.environ.get("PSRL_VECTORS")
    path = Path(folder) / "staleness_traces.json" if folder else None
    return json.loads(path.read_text())["cases"] if path is not None and path.exists() else []


def view(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """The ledger in the vectors' notation; consumed buffers are gone there."""
    state = {}
    for b, buffer in ledger.buffers.items():
        if not buffer.consumed:
            entries = [f"O:{e.group}" for e in buffer.occupied] + ["E"] * buffer.empty
            entries += [f"R:{e.group}" for e in reversed(buffer.reserved)]
            state[str(b)] = {"status": str(buffer.status), "entries": entries}
    return state


def replay(case: dict[str, Any]) -> None:
    ledger = Ledger(case["entries_per_buffer"], case["staleness"])
    versions: dict[int, int] = {}
    for number, step in enumerate(case["steps"]):
        op, where = step["op"], f"{case['id']} step {number}: {step['op']}"
        match op[0]:
            case "reserve":
                _, prompt, version, expected = op
                while ledger.version < version:  # consumed before; the trace shows the push by the next version
                    ledger.publish(Version(ledger.version + 1))
                place = ledger.reserve(GroupId(prompt), 0, Version(version))
                if expected is None:
                    assert isinstance(place, Denied), where
                else:
                    assert isinstance(place, Place), where
                    assert [place.buffer, place.entry] == expected, where
                    versions[prompt] = version
            case "occupy":
                _, prompt, expected = op
                got = ledger.occupy(GroupId(prompt), Version(versions[prompt]))
                assert isinstance(got, Occupied)
                assert [got.buffer, got.entry, got.count] == expected, where
            case "abort":
                ledger.release(GroupId(op[1]))
            case "consume":
                while ledger.version < op[1]:
                    ledger.publish(Version(ledger.version + 1))
                ledger.consume(op[1])
            case other:
                pytest.fail(f"unknown operation {other}")
        ledger.check()
        assert view(ledger) == step["state"], where


@pytest.mark.skipif(not _cases(), reason="PSRL_VECTORS does not name a folder with staleness_traces.json")
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case["id"])
def test_trace_replays_exactly(case: dict[str, Any]) -> None:
    replay(case)
