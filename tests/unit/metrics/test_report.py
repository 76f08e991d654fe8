"""Each check passes on a run that keeps its promises and fails, by name, on one that does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psrl.control.log import TrajectoryLog
from psrl.control.messages import Counters
from psrl.control.records import EndLine, Outcome, PublishLine, StartLine, TrajectoryLine
from psrl.errors import DataError
from psrl.metrics.checks import CHECKS
from psrl.metrics.curves import figure
from psrl.metrics.report import main, report
from psrl.metrics.run_files import read_run
from psrl.types import Epoch, FinishReason, GroupId, Purpose, Version, VersionSpan


def failed(run: Any, directory: Path) -> set[str]:
    found = report(run.write(directory), with_curves=False)
    assert found.ok == (not found.violations)
    for violation in found.violations:
        assert f"VIOLATION {violation.check}: " in found.text()
    return {violation.check for violation in found.violations}


def trained(run: Any, step: int, attempt: int = 0) -> list[dict[str, Any]]:
    return [line for line in run.trajectories if line["trained_at"] == step and line["attempt"] == attempt]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_good_run_passes_all_checks(make_run: Callable, tmp_path: Path, staleness: int, resumed: bool):
    assert failed(make_run(staleness, resumed=resumed), tmp_path) == set()


def test_summary_and_curves(make_run: Callable, tmp_path: Path):
    found = report(make_run(3).write(tmp_path))
    (accuracy,) = found.summary.accuracies
    assert (accuracy.name, accuracy.before, accuracy.after) == ("words/acc/mean@1", 0.25, 0.875)
    assert (accuracy.first_step, accuracy.last_step) == (0, 4)
    assert (found.summary.num_steps, found.summary.num_groups, found.summary.num_attempts) == (4, 12, 1)
    assert (found.summary.max_staleness, found.summary.bound) == (3, 3)
    assert found.summary.mean_staleness == pytest.approx((0 + 1 + 2 + 3) / 4)
    assert found.summary.tokens_per_s == pytest.approx(10.0)
    # generation from 0 to 34; training 5-9, 15-19, 25-29, 35-39: three of four steps beside generation
    assert found.summary.overlap == pytest.approx(12 / 38)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for text in ("0.250 at step 0, 0.875 at step 4 (+0.625)", "overlapped 32%", "3 max, bound 3", "checks passed"):
        assert text in found.text()


def test_curves_share_their_steps_and_count_nothing_below_zero(make_run: Callable, tmp_path: Path):
    accuracy, reward, length, staleness, overlap = figure(read_run(make_run(3).write(tmp_path))).axes
    steps = [1, 2, 3, 4]
    assert list(reward.lines[0].get_xdata()) == list(length.lines[0].get_xdata()) == steps
    assert sorted({bar.get_x() + bar.get_width() / 2 for bar in staleness.patches}) == steps
    assert list(accuracy.lines[0].get_xdata()) == [0, 4]
    assert min(overlap.get_yticks()) == 0
    assert overlap.get_legend().get_bbox_to_anchor().y0 >= overlap.bbox.y1  # above the panel, not over the curve


def test_exit_status_says_whether_checks_failed(make_run: Callable, tmp_path: Path, capsys):
    run = make_run(3)
    assert main(run.write(tmp_path)) == 0
    spoil_bound(run)
    assert main(str(run.write(tmp_path))) == 1
    assert (
        "VIOLATION bound: trajectory 9_0 of attempt 0 was trained at 3 with tokens of version 0, the bound is 2"
        in capsys.readouterr().out
    )


def test_synchronous_run_does_not_overlap(make_run: Callable, tmp_path: Path):
    assert report(make_run(0).write(tmp_path), with_curves=False).summary.overlap == 0.0


def spoil_bound(run: Any) -> None:
    run.attempts[0]["staleness"] = 2


def spoil_future(run: Any) -> None:
    trained(run, 2)[0]["spans"][-1]["version"] = 3


def spoil_spans(run: Any) -> None:
    trained(run, 1)[0]["num_response_tokens"] += 1


def spoil_no_spans(run: Any) -> None:
    trained(run, 1)[0]["spans"] = []


def spoil_times(run: Any) -> None:
    trained(run, 1)[0]["started_s"] = None


def spoil_sibling_missing(run: Any) -> None:
    run.trajectories.remove(trained(run, 1)[0])


def spoil_sibling_twice(run: Any) -> None:
    trained(run, 1)[0]["index"] = 1


def spoil_sibling_of_another_offer(run: Any) -> None:
    trained(run, 1)[0]["offer"] = 1


def spoil_sibling_ends(run: Any) -> None:
    next(line for line in run.trajectories if line["outcome"] == "failed")["outcome"] = "redundant"


def spoil_once(run: Any) -> None:
    for line in trained(run, 2)[:2]:
        run.trajectories.append({**line, "trained_at": 3})


def spoil_conservation(run: Any) -> None:
    run.trajectories = [line for line in run.trajectories if line["group"] != 90]


def spoil_sum(run: Any) -> None:
    run.attempts[-1]["counters"]["offered"] += 1


def spoil_unknown_outcome(run: Any) -> None:
    run.line(0, 95, 0, "lost")
    run.line(0, 95, 1, "lost")


def spoil_versions(run: Any) -> None:
    run.attempts = [entry for entry in run.attempts if entry.get("version") != 2]


def spoil_attempt(run: Any) -> None:
    run.trajectories[-1]["attempt"] = 7


def spoil_start(run: Any) -> None:
    del run.attempts[0]


def spoil_validation(run: Any) -> None:
    line = next(line for line in run.trajectories if line["purpose"] == "val")
    line["spans"] = [{"version": 0, "num_tokens": 1}, {"version": 1, "num_tokens": 2}]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_bound, {"bound"}),
        (spoil_future, {"bound"}),
        (spoil_spans, {"spans"}),
        (spoil_no_spans, {"spans"}),
        (spoil_times, {"spans"}),
        (spoil_sibling_missing, {"siblings"}),
        (spoil_sibling_twice, {"siblings"}),
        (spoil_sibling_of_another_offer, {"siblings"}),
        (spoil_sibling_ends, {"siblings"}),
        (spoil_once, {"once", "siblings"}),
        (spoil_conservation, {"conservation"}),
        (spoil_sum, {"conservation"}),
        (spoil_unknown_outcome, {"conservation"}),
        (spoil_versions, {"versions"}),
        (spoil_attempt, {"attempts"}),
        (spoil_start, {"attempts"}),
        (spoil_validation, {"validation"}),
    ],
)
def test_each_broken_promise_is_named(make_run: Callable, tmp_path: Path, spoil: Callable, expected: set):
    run = make_run(3)
    spoil(run)
    assert failed(run, tmp_path) == expected


def spoil_older_token(run: Any) -> None:
    trained(run, 2)[0]["spans"][0]["version"] = 1


def spoil_early_start(run: Any) -> None:
    trained(run, 2)[0]["started_s"] = 19.49  # version 2 is out at 19.5


def spoil_publication(run: Any) -> None:
    run.attempts = [entry for entry in run.attempts if entry.get("version") != 3]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_older_token, {"bound", "synchronous"}),
        (spoil_early_start, {"synchronous"}),
        (spoil_publication, {"synchronous", "versions"}),
    ],
)
def test_synchronous_promises(make_run: Callable, tmp_path: Path, spoil: Callable, expected: set):
    run = make_run(0)
    for line in run.trajectories:
        if line["trained_at"]:
            line["started_s"] = 10.0 * line["trained_at"] - 0.4
    assert failed(run, tmp_path) == set()
    spoil(run)
    assert failed(run, tmp_path) == expected


def test_each_check_was_made_to_fail():
    # `damage` in test_torn_lines below; the rest in the two tables above
    assert set(CHECKS) == {
        *("attempts", "damage", "spans", "bound", "siblings", "once", "versions", "conservation", "synchronous"),
        "validation",
    }


def test_group_trained_before_and_after_a_resume_is_told(make_run: Callable, tmp_path: Path):
    run = make_run(3, resumed=True)
    for line in trained(run, 2, attempt=1)[:2]:
        line["group"] = 0  # which attempt 0 trained at step 0, before the checkpoint
    assert failed(run, tmp_path) == {"once"}


def test_resume_that_is_not_recorded_is_told(make_run: Callable, tmp_path: Path):
    run = make_run(3, resumed=True)
    next(entry for entry in run.attempts if entry.get("resumed_from"))["resumed_from"] = 4
    assert failed(run, tmp_path) == {"once", "versions", "conservation"}


def test_torn_lines(make_run: Callable, tmp_path: Path):
    run = make_run(3, resumed=True)
    run.write(tmp_path)
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines(keepends=True)
    torn = '{"key":"90_9","gro'
    (tmp_path / "trajectories.jsonl").write_text("".join([*lines[:-4], torn + "\n", *lines[-4:], torn]))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "critic/sco')
    found = report(tmp_path)
    assert found.ok
    assert "trajectories.jsonl: 2 damaged lines were left out" in found.text()
    assert "metrics.jsonl: 1 damaged line was left out" in found.text()
    with open(tmp_path / "trajectories.jsonl", "a") as file:
        file.write("\nnonsense")
    found = report(tmp_path, with_curves=False)
    assert [violation.check for violation in found.violations] == ["damage"]


@pytest.mark.parametrize("torn", ["", '{"key":"8_1","gro\n'])
def test_write_that_was_cut_short_breaks_no_promise(make_run: Callable, tmp_path: Path, torn: str):
    """A full disk lets an attempt write half a group; the next one goes on behind it and does the step again."""
    run = make_run(3, resumed=True)
    second = [line for line in run.trajectories if line["attempt"] == 1]
    run.trajectories = [line for line in run.trajectories if line["attempt"] == 0 and line["outcome"] == "trained"][:-1]
    num_before = len(run.trajectories)
    run.trajectories += second
    run.attempts[-1]["counters"] |= {"offered": 19, "filtered": 0, "failed": 0}
    run.write(tmp_path)
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "trajectories.jsonl").write_text("".join([*lines[:num_before], torn, *lines[num_before:]]))
    found = report(tmp_path, with_curves=False)
    assert found.ok, found.text()
    run.trajectories.pop(0)  # no cut explains this one
    assert failed(run, tmp_path) == {"siblings"}


def test_killed_run_is_reported_with_a_warning(make_run: Callable, tmp_path: Path):
    run = make_run(3)
    run.attempts.pop()
    found = report(run.write(tmp_path), with_curves=False)
    assert found.ok
    assert "attempt 0 did not end in good order, its counters are not known" in found.warnings


def test_skipped_updates_are_told(make_run: Callable, tmp_path: Path):
    run = make_run(3)
    for record in run.metrics:
        record |= {"actor/skipped_updates": float(record["step"] in (2, 3)), "actor/updates": 1.0}
    found = report(run.write(tmp_path), with_curves=False)
    assert "updates skipped for gradients that were not finite: 2, at step 2, 3" in found.warnings


def test_checks_that_do_not_apply_are_not_called_passed(make_run: Callable, tmp_path: Path):
    assert "not checked: synchronous (there is no trajectory trained under psrl.staleness=0)" in (
        report(make_run(3).write(tmp_path), with_curves=False).text()
    )
    assert report(make_run(0).write(tmp_path), with_curves=False).checked.passed == tuple(CHECKS)


def test_one_validation_is_said_once(make_run: Callable, tmp_path: Path):
    run = make_run(3)
    run.metrics = [record for record in run.metrics if "val-core/words/acc/mean@1" not in record or record["step"] == 0]
    text = report(run.write(tmp_path), with_curves=False).text()
    assert text.splitlines()[0] == "words/acc/mean@1: 0.250 at step 0"


def test_run_that_trained_nothing_is_drawn(make_run: Callable, tmp_path: Path):
    run = make_run(3)
    run.trajectories.clear()
    run.metrics.clear()
    del run.attempts[1:]
    found = report(run.write(tmp_path))
    assert found.ok
    assert "nothing was trained" in found.warnings
    assert set(found.checked.passed) == {"attempts", "damage"}
    assert set(found.checked.idle) == set(CHECKS) - {"attempts", "damage"}
    assert "not checked: bound, once (there is no trained trajectory)" in found.text()
    assert (tmp_path / "curves.png").exists()
    (tmp_path / "metrics.jsonl").unlink()
    assert report(tmp_path, with_curves=False).warnings


def test_other_directories_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"trajectories\.jsonl is not there"):
        report(tmp_path)


def test_values_of_steps_done_again_replace_the_first(make_run: Callable, tmp_path: Path):
    run = make_run(3, resumed=True)
    run.metrics[-2]["perf/total_num_tokens"] = 500.0  # step 4 of the second attempt
    found = report(run.write(tmp_path), with_curves=False)
    assert found.summary.tokens_per_s == pytest.approx((3 * 100 + 500) / 40)


def test_files_of_the_control_side_are_read(tmp_path: Path):
    log = TrajectoryLog(tmp_path)
    log.write_attempt(StartLine(attempt=0, epoch=Epoch(0), resumed_from=None, staleness=1, rollout_n=2))
    log.write(
        [
            TrajectoryLine(
                key=f"5_{index}",
                group=GroupId(5),
                index=index,
                offer=0,
                attempt=0,
                purpose=Purpose.TRAIN,
                replicas=("replica-0",),
                spans=(VersionSpan(Version(0), 7, "replica-0"),),
                started_s=1.0,
                ended_s=2.0,
                finish_reason=FinishReason.STOP,
                num_response_tokens=7,
                raw_score=1.0,
                shaped_reward=1.0,
                metrics={"acc": 1.0},
                outcome=Outcome.TRAINED,
                trained_at=index // 2,
            )
            for index in range(2)
        ]
    )
    log.write_attempt(PublishLine(0, Version(1), 3.0))
    log.write_attempt(EndLine(0, Counters(offered=1, trained=1), "done"))
    log.close()
    found = report(tmp_path, with_curves=False)
    assert found.ok, found.text()
    assert not any("damaged" in warning for warning in found.warnings)
    assert found.summary.num_groups == 1


def test_report_does_not_change_the_record(make_run: Callable, tmp_path: Path):
    make_run(3).write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert json.loads((tmp_path / "attempts.jsonl").read_text().splitlines()[0])["kind"] == "start"
