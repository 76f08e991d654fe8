import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from psrl.errors import RunFailed
from psrl.metrics import JsonlReader, JsonlSink, MetricLogger


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_a_line_at_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricLogger([JsonlSink(path)]) as metrics:
        metrics.log(1, {"actor/lr": np.float32(0.5), "training/flag": True})
        assert records(path) == [{"step": 1, "actor/lr": 0.5, "training/flag": 1.0, "metrics/num_left_out": 0.0}]
        metrics.log(1, {"actor/entropy": 2.0})  # the step is still open
        metrics.log(2, {"actor/lr": 0.25})
    assert [record["step"] for record in records(path)] == [1, 1, 2]


@pytest.mark.parametrize("values", [{"actor/lr": 2.0}, {"other": 1.0, "actor/lr": 1.0}])
def test_key_twice_in_a_step_raises_and_writes_nothing(tmp_path: Path, values: Mapping):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricLogger([JsonlSink(path)])
    metrics.log(3, {"actor/lr": 1.0})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"actor/lr: logged twice for step 3"):
        metrics.log(3, values)
    assert path.read_bytes() == before
    metrics.log(3, {"other": 1.0})
    metrics.close()


def test_closed_step_raises(tmp_path: Path):
    metrics = MetricLogger([JsonlSink(tmp_path / "metrics.jsonl")])
    metrics.log(3, {"a": 1.0})
    with pytest.raises(ValueError, match="step 2 of training is closed, the newest is 3"):
        metrics.log(2, {"b": 1.0})
    with pytest.raises(ValueError, match="step -1"):
        metrics.log(-1, {"b": 1.0})
    metrics.close()


def test_late_validation_keeps_its_own_step(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricLogger([JsonlSink(path)])
    metrics.log(12, {"actor/lr": 1.0})
    metrics.log(10, {"val-core/words/acc/mean@1": 0.5, "val-aux/words/reward/mean@1": 0.5})
    with pytest.raises(ValueError, match="step 9 of validation is closed"):
        metrics.log(9, {"val-core/words/acc/mean@1": 0.5})
    metrics.close()
    assert [record["step"] for record in records(path)] == [12, 10]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_left_out_counted_and_named(tmp_path: Path, caplog, bad: float):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricLogger([JsonlSink(path)])
    with caplog.at_level(logging.WARNING):
        metrics.log(1, {"critic/score/mean": bad, "actor/lr": 1.0})
    metrics.log(2, {"actor/lr": 1.0})
    metrics.log(2, {"val-core/words/acc/mean@1": bad})
    metrics.log(3, {"actor/lr": 1.0})
    metrics.close()
    assert "critic/score/mean" in caplog.text
    assert records(path)[0] == {"step": 1, "actor/lr": 1.0, "metrics/num_left_out": 1.0}
    assert records(path)[-1]["metrics/num_left_out"] == 2.0
    assert "nan" not in path.read_text().lower()
    assert "inf" not in path.read_text().lower()


def test_resume_appends_and_closes_a_torn_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    with MetricLogger([JsonlSink(path)]) as metrics:
        metrics.log(2, {"a": 5.0})
    reader = JsonlReader(path)
    assert [record["step"] for record in reader.poll()] == [1, 2]
    assert reader.num_damaged == 1


def test_reader_follows_whole_lines_only(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    reader = JsonlReader(path)
    assert reader.poll() == []
    path.write_text('{"step": 1}\n{"st')
    assert reader.poll() == [{"step": 1}]
    assert reader.poll() == []
    with open(path, "a") as file:
        file.write('ep": 2}\n[3]\n')
    assert reader.poll() == [{"step": 2}]
    assert reader.num_damaged == 1


def test_full_disk_ends_the_run_by_name():
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(RunFailed, match="cannot write /dev/full"):
        sink.write("training", 1, {"a": 1.0})
    sink.close()
    with pytest.raises(RunFailed, match="cannot open"):
        JsonlSink(Path("/nowhere/metrics.jsonl"))


def test_metrics_that_are_taken_away_end_the_run_by_name(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write("training", 1, {"a": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RunFailed, match=r"metrics\.jsonl: it was removed or replaced"):
        sink.write("training", 2, {"a": 1.0})
    sink.close()


def test_all_sinks_are_closed_and_the_first_error_is_raised(tmp_path: Path):
    closed = []

    class Broken:
        def write(self, axis: str, step: int, values: Mapping[str, float]) -> None: ...

        def close(self) -> None:
            closed.append(self)
            raise OSError("broken pipe")

    metrics = MetricLogger([Broken(), Broken(), JsonlSink(tmp_path / "metrics.jsonl")])
    with pytest.raises(OSError, match="broken pipe"):
        metrics.close()
    assert len(closed) == 2
