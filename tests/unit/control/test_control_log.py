"""The trajectory log: what it writes, what it finds after a kill, and what a write error does."""

import json
from pathlib import Path

import pytest

from psrl.control.log import ATTEMPTS, TRAJECTORIES, TrajectoryLog
from psrl.control.messages import Counters
from psrl.control.records import EndLine, Outcome, PublishLine, StartLine, TrajectoryLine
from psrl.errors import RunFailed
from psrl.types import Epoch, FinishReason, GroupId, Purpose, Version, VersionSpan


def line(group: int, outcome: Outcome, *, index: int = 0, trained_at: int | None = None, **more) -> TrajectoryLine:
    fields = {"offer": 0, "attempt": 0, "purpose": Purpose.TRAIN} | more
    return TrajectoryLine(
        key=f"{group}_{index}", group=GroupId(group), index=index, outcome=outcome, trained_at=trained_at, **fields
    )


def start(attempt: int, resumed_from: int | None = None) -> StartLine:
    return StartLine(attempt=attempt, epoch=Epoch(0), resumed_from=resumed_from, staleness=3, rollout_n=8)


def read(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_lines_have_the_fields_that_reports_read(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    whole = line(
        17,
        Outcome.TRAINED,
        index=3,
        trained_at=4,
        offer=1,
        replicas=("replica-0",),
        spans=(VersionSpan(Version(3), 12, "replica-0"),),
        started_s=1.5,
        ended_s=2.5,
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=7,
        num_response_tokens=12,
        raw_score=1.0,
        shaped_reward=0.5,
        metrics={"acc": 1.0},
    )
    log.write([whole])
    assert read(tmp_path / TRAJECTORIES) == [
        {
            "key": "17_3",
            "group": 17,
            "index": 3,
            "offer": 1,
            "attempt": 0,
            "purpose": "train",
            "replicas": ["replica-0"],
            "spans": [{"version": 3, "num_tokens": 12, "replica": "replica-0"}],
            "started_s": 1.5,
            "ended_s": 2.5,
            "finish_reason": "stop",
            "num_prompt_tokens": 7,
            "num_response_tokens": 12,
            "raw_score": 1.0,
            "shaped_reward": 0.5,
            "metrics": {"acc": 1.0},
            "outcome": "trained",
            "trained_at": 4,
            "reason": None,
        }
    ]
    log.close()


def test_attempts_are_counted_and_described(tmp_path: Path) -> None:
    for attempt in range(2):
        log = TrajectoryLog(tmp_path)
        assert log.attempt == attempt
        log.write_attempt(start(attempt, None if attempt == 0 else 2))
        log.write_attempt(PublishLine(attempt, Version(0), 1.0))
        log.write_attempt(EndLine(attempt, Counters(offered=1, trained=1), "done"))
        log.close()
    records = read(tmp_path / ATTEMPTS)
    assert [(record["kind"], record["attempt"]) for record in records] == [
        ("start", 0),
        ("publish", 0),
        ("end", 0),
        ("start", 1),
        ("publish", 1),
        ("end", 1),
    ]
    assert records[3] == {
        "kind": "start",
        "attempt": 1,
        "epoch": 0,
        "resumed_from": 2,
        "staleness": 3,
        "rollout_n": 8,
    }
    assert records[2]["counters"]["offered"] == 1
    assert records[2]["counters"]["in_flight"] == 0


def test_line_torn_by_a_kill_is_closed(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.write([line(0, Outcome.TRAINED, trained_at=0)])
    log.write_attempt(start(0))
    log.close()
    with open(tmp_path / TRAJECTORIES, "ab") as file:
        file.write(b'{"key":"1_0","gro')
    with open(tmp_path / ATTEMPTS, "ab") as file:
        file.write(b'{"kind":"pub')
    log = TrajectoryLog(tmp_path)
    assert log.attempt == 1
    assert log.num_bytes == (tmp_path / TRAJECTORIES).stat().st_size
    log.write([line(2, Outcome.FAILED)])
    log.close()
    texts = (tmp_path / TRAJECTORIES).read_text().splitlines()
    assert texts[1] == '{"key":"1_0","gro'
    assert json.loads(texts[2])["key"] == "2_0"


def test_history_left_behind_is_rolled_back_or_counted(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.write([line(0, Outcome.TRAINED, trained_at=0), line(0, Outcome.TRAINED, index=1, trained_at=0)])
    since = log.num_bytes
    log.write([line(1, Outcome.TRAINED, trained_at=1), line(1, Outcome.TRAINED, index=1, trained_at=1)])
    log.write([line(2, Outcome.FILTERED), line(3, Outcome.FAILED), line(4, Outcome.IN_FLIGHT)])
    log.write([line(0, Outcome.VALIDATED, purpose=Purpose.VALIDATION)])
    log.write([line(1, Outcome.TRAINED, trained_at=1, attempt=1)])
    assert log.left_behind(since, 1) == Counters(offered=4, rolled_back=2, filtered=1, failed=1)
    assert log.left_behind(log.num_bytes, 1) == Counters()
    log.close()


def test_full_disk_ends_the_run_by_name(tmp_path: Path) -> None:
    (tmp_path / TRAJECTORIES).symlink_to("/dev/full")
    log = TrajectoryLog(tmp_path)
    with pytest.raises(RunFailed, match=r"trajectories\.jsonl.*No space left"):
        log.write([line(0, Outcome.TRAINED)])
    log.close()
    with pytest.raises(RunFailed, match="closed file"):
        log.write([line(0, Outcome.TRAINED)])


def test_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="nowhere"):
        TrajectoryLog(tmp_path / "nowhere")


def test_a_record_that_is_taken_away_ends_the_run_by_name(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.write_attempt(start(0))
    (tmp_path / TRAJECTORIES).unlink()
    with pytest.raises(RunFailed, match=r"trajectories\.jsonl: it was removed or replaced"):
        log.write([line(0, Outcome.TRAINED)])
    (tmp_path / ATTEMPTS).rename(tmp_path / "moved")
    (tmp_path / ATTEMPTS).write_bytes((tmp_path / "moved").read_bytes())  # as some editors save
    with pytest.raises(RunFailed, match=r"attempts\.jsonl: it was removed or replaced"):
        log.write_attempt(EndLine(0, Counters(), "done"))
    log.close()
