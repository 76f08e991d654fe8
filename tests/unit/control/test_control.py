"""Control's decisions, one rule at a time. A whole run under random faults is in test_control_machine.py."""

import pytest

from psrl.control.control import Control
from psrl.control.effects import Abort, AnnounceVersion, ClearRows, LedgerChanged
from psrl.control.memory import MemoryFeed, synthetic_prompt
from psrl.control.messages import Batch, Complete, Completed, EndOfData, Fail, GroupOffer, Refused, Reserve, Reserved
from psrl.control.records import Outcome
from psrl.control.settings import ControlSettings
from psrl.control.state import ControlState
from psrl.errors import ConfigError, RunFailed, StaleMessage
from psrl.staleness import IllegalMove, Reason
from psrl.types import Epoch, FinishReason, Purpose, TrajectoryId, Version, VersionSpan

V0 = Version(0)


def make(
    *, num_prompts: int | None = None, publish: bool = True, state: ControlState | None = None, **changes
) -> Control:
    defaults = {"total_steps": 3, "batch_size": 2, "rollout_n": 2, "staleness": 1, "max_failed_in_a_row": 3, "val_n": 2}
    settings = defaults | changes
    control = Control(
        ControlSettings(**settings), MemoryFeed(num_prompts), [synthetic_prompt(i) for i in range(3)], state
    )
    if publish:
        control.publish(Version(settings.get("initial_version", 0)), 0)
        control.take_effects()
    return control


def ids(offer: GroupOffer) -> list[TrajectoryId]:
    return [TrajectoryId(offer.prompt.group, i, offer.offer, offer.purpose) for i in range(offer.num_trajectories)]


def poll(control: Control, worker: str = "a", life: int = 0) -> GroupOffer | None:
    return control.next_group(worker, life, now=1.0)


def reserve(control: Control, trajectory: TrajectoryId, version: int = 0, epoch: int = 0) -> Reserved | Refused:
    return control.reserve(Reserve(Epoch(epoch), trajectory, Version(version), "r"))


def completion(trajectory: TrajectoryId, *versions: int, score: float | None = None, worker: str = "a") -> Complete:
    value = float(trajectory.index) if score is None else score
    return Complete(
        epoch=Epoch(0),
        trajectory=trajectory,
        worker=worker,
        spans=tuple(VersionSpan(Version(v), 3, "r") for v in (versions or (0,))),
        num_prompt_tokens=1,
        num_response_tokens=3 * len(versions or (0,)),
        finish_reason=FinishReason.STOP,
        started_s=1.0,
        ended_s=2.0,
        num_dispatches=1,
        raw_score=value,
        shaped_reward=value,
        metrics={"acc": value},
    )


def run_group(control: Control, offer: GroupOffer, version: int = 0, score: float | None = None) -> Completed:
    for trajectory in ids(offer):
        assert isinstance(reserve(control, trajectory, version), Reserved)
    return [control.complete(completion(t, version, score=score)) for t in ids(offer)][-1]


def must_poll(control: Control, worker: str = "a", life: int = 0) -> GroupOffer:
    offer = poll(control, worker, life)
    assert offer is not None
    control.check_deeply()
    return offer


def fail(control: Control, trajectory: TrajectoryId, reason: str = "boom") -> None:
    control.fail(Fail(Epoch(0), trajectory, "a", reason))
    control.check_deeply()


def step(control: Control) -> Batch:
    """Run groups until the trainer's buffer is ready; consume and publish."""
    buffer = int(control.version)
    while not isinstance(batch := control.consume(buffer), Batch):
        assert batch is None, batch
        run_group(control, must_poll(control), buffer)
    control.publish(Version(buffer + 1), 0)
    return batch


def test_nothing_is_offered_before_the_first_weights() -> None:
    control = make(publish=False)
    assert poll(control) is None
    assert "version 0" in control.waiting_for(0, 1.0)
    with pytest.raises(IllegalMove) as raised:
        control.check_publish(Version(1))
    assert raised.value.reason is Reason.VERSION_OUT_OF_ORDER
    assert control.check_publish(V0)
    control.publish(V0, 2)
    assert control.take_effects() == [AnnounceVersion(V0, 2), LedgerChanged()]
    assert poll(control) is not None


@pytest.mark.parametrize(("staleness", "expected"), [(0, 2), (1, 4), (2, 6), (3, 6)])
def test_offers_as_many_groups_as_have_a_place(staleness: int, expected: int) -> None:
    """(staleness + 1) buffers, but none beyond the last step."""
    control = make(staleness=staleness)
    offers = 0
    while poll(control) is not None:
        offers += 1
    assert offers == expected


def test_whole_run_offers_exactly_what_it_trains() -> None:
    control = make()
    batches = [step(control) for _ in range(3)]
    assert [group.group for batch in batches for group in batch.groups] == list(range(6))
    assert isinstance(end := control.consume(3), EndOfData)
    assert "3 steps" in end.reason
    assert poll(control) is None
    counters = control.counters
    assert (counters.offered, counters.trained, counters.in_flight) == (6, 6, 0)


def test_batch_is_sorted_and_the_same_when_asked_again() -> None:
    control = make()
    first, second = must_poll(control), must_poll(control)
    run_group(control, second)
    run_group(control, first)
    batch = control.consume(0)
    assert isinstance(batch, Batch)
    assert [group.group for group in batch.groups] == [0, 1]
    assert batch.groups[0].keys == ("0_0", "0_1")
    assert batch.staleness == (0, 0, 0, 0)
    assert control.consume(0) == batch


def test_version_of_a_group_is_that_of_its_oldest_token() -> None:
    control = make(batch_size=1)
    late = must_poll(control)
    assert reserve(control, ids(late)[0]) == Reserved(1)
    run_group(control, must_poll(control))
    assert isinstance(control.consume(0), Batch)
    control.publish(Version(1), 0)
    assert reserve(control, ids(late)[1], 1) == Reserved(1)
    control.complete(completion(ids(late)[0], 0, 1))
    control.complete(completion(ids(late)[1], 1))
    batch = control.consume(1)
    assert isinstance(batch, Batch)
    assert (batch.groups[0].version, batch.staleness) == (0, (1, 0))


def test_sibling_on_weights_too_old_for_the_groups_buffer_waits() -> None:
    control = make(batch_size=1)
    run_group(control, must_poll(control))
    step(control)
    offer = must_poll(control)
    assert reserve(control, ids(offer)[0], 1) == Reserved(2)
    refused = reserve(control, ids(offer)[1], 0)
    assert isinstance(refused, Refused)
    assert not refused.gone


def test_complete_is_idempotent_and_needs_a_reservation() -> None:
    control = make()
    offer = must_poll(control)
    with pytest.raises(IllegalMove) as raised:
        control.complete(completion(ids(offer)[0]))
    assert raised.value.reason is Reason.NOT_RESERVED
    assert run_group(control, offer).kept
    for trajectory in ids(offer):
        assert control.complete(completion(trajectory)) == Completed(True)
    assert control.buffers[0] == "PENDING 1/2"


def test_tokens_of_the_future_are_refused_by_name() -> None:
    control = make()
    offer = must_poll(control)
    reserve(control, ids(offer)[0])
    with pytest.raises(IllegalMove) as raised:
        control.complete(completion(ids(offer)[0], 0, 5))
    assert raised.value.reason is Reason.VERSION_UNPUBLISHED


def test_tokens_older_than_any_admissible_version_fail_their_group() -> None:
    control = make(batch_size=1)
    step(control)
    step(control)
    offer = must_poll(control)
    reserve(control, ids(offer)[0], 2)
    completed = control.complete(completion(ids(offer)[0], 0))
    assert not completed.kept
    assert control.counters.failed == 1


def test_score_that_is_no_number_fails_the_group() -> None:
    control = make()
    offer = must_poll(control)
    reserve(control, ids(offer)[0])
    completed = control.complete(completion(ids(offer)[0], score=float("nan")))
    assert (completed.kept, completed.reason) == (False, "raw_score is nan")


def test_failed_group_is_replaced_by_a_fresh_prompt_and_its_rows_go() -> None:
    control = make(staleness=0)
    first, second = must_poll(control), must_poll(control)
    assert poll(control) is None
    reserve(control, ids(first)[0])
    control.complete(completion(ids(first)[0]))
    control.take_effects()
    fail(control, ids(first)[1])
    effects = control.take_effects()
    assert Abort((ids(first)[1],), "boom") in effects
    assert ClearRows(("0_0", "0_1"), "train") in effects
    assert LedgerChanged() in effects
    lines = control.take_lines()
    assert [(line.key, line.outcome, line.reason) for line in lines] == [
        ("0_0", Outcome.FAILED, "boom"),
        ("0_1", Outcome.FAILED, "boom"),
    ]
    assert (lines[0].raw_score, lines[1].raw_score) == (0.0, None)
    assert must_poll(control).prompt.group == 2
    assert control.complete(completion(ids(first)[0])).kept is False
    refused = reserve(control, ids(first)[1])
    assert isinstance(refused, Refused)
    assert refused.gone
    run_group(control, second)


def test_broken_reward_ends_the_run_by_name() -> None:
    control = make()
    for _ in range(3):
        fail(control, ids(must_poll(control))[0], "ZeroDivisionError in compute_score")
    with pytest.raises(RunFailed, match=r"3 groups failed in a row.*ZeroDivisionError"):
        control.consume(0)
    assert poll(control) is None


def test_failures_apart_do_not_end_the_run() -> None:
    control = make(total_steps=10)
    for _ in range(5):
        fail(control, ids(must_poll(control))[0])
        step(control)
    assert control.counters.failed == 5


def test_failed_group_is_retried_when_told_so() -> None:
    control = make(failed_group_retries=1)
    offer = must_poll(control)
    fail(control, ids(offer)[0])
    again = must_poll(control)
    assert (again.prompt, again.offer) == (offer.prompt, 1)
    fail(control, ids(again)[0])
    assert control.counters.failed == 1
    assert control.counters.retries == 1


def test_lost_workers_groups_come_first_and_with_a_new_offer() -> None:
    control = make()
    mine, other, later = must_poll(control, "a"), must_poll(control, "b"), must_poll(control, "a")
    for trajectory in ids(mine):
        reserve(control, trajectory)
    control.complete(completion(ids(mine)[0]))
    control.take_effects()
    control.worker_lost("a")
    control.check_deeply()
    effects = control.take_effects()
    assert Abort((ids(mine)[1],), "worker a was lost") in effects
    assert ClearRows(("0_0", "0_1"), "train") in effects
    assert not control.complete(completion(ids(mine)[1])).kept
    assert reserve(control, ids(mine)[1]) == Refused("offer 0 was taken back", gone=True)
    again = [must_poll(control, "b"), must_poll(control, "b")]
    assert [(offer.prompt.group, offer.offer) for offer in again] == [(0, 1), (2, 1)]
    assert [t.key for t in ids(again[0])] == ["0_0.1", "0_1.1"]
    assert control.counters.retries == 2
    assert control.counters.offered == 3
    assert later.prompt.group == 2
    run_group(control, other)


def test_complete_groups_of_a_lost_worker_stay() -> None:
    control = make()
    run_group(control, must_poll(control))
    control.worker_lost("a")
    assert control.buffers[0] == "PENDING 1/2"
    assert control.counters.retries == 0


def test_worker_that_comes_with_another_life_has_lost_its_groups() -> None:
    control = make()
    must_poll(control, "a", life=11)
    again = must_poll(control, "a", life=12)
    assert (again.prompt.group, again.offer) == (0, 1)
    assert poll(control, "a", life=11) is None


def test_message_of_another_epoch_is_refused() -> None:
    control = make()
    offer = must_poll(control)
    with pytest.raises(StaleMessage, match="epoch 3"):
        reserve(control, ids(offer)[0], epoch=3)


def test_sibling_that_does_not_exist_is_refused() -> None:
    control = make()
    offer = must_poll(control)
    with pytest.raises(ValueError, match="siblings 0 to 1"):
        reserve(control, TrajectoryId(offer.prompt.group, 2))


# -- dynamic sampling ---------------------------------------------------------------------------------------------


def test_group_without_signal_is_filtered_and_replaced() -> None:
    control = make(staleness=0, filter_enabled=True)
    first = must_poll(control)
    completed = run_group(control, first, score=1.0)
    assert (completed.kept, completed.reason) == (False, "filtered")
    assert ClearRows(("0_0", "0_1"), "train") in control.take_effects()
    assert {line.outcome for line in control.take_lines()} == {Outcome.FILTERED}
    batch = step(control)
    assert [group.group for group in batch.groups] == [1, 2]
    assert batch.num_filtered == 1


def test_spread_up_to_min_spread_is_none() -> None:
    control = make(filter_enabled=True, min_spread=1.0)
    assert not run_group(control, must_poll(control)).kept  # scores 0 and 1


def test_refills_stop_at_the_budget_and_the_step_trains_on_what_it_has() -> None:
    """batch 2, two batches may be generated: four groups, one of which has signal."""
    control = make(staleness=0, filter_enabled=True, max_num_gen_batches=2)
    run_group(control, must_poll(control))
    for _ in range(3):
        assert control.consume(0) is None
        run_group(control, must_poll(control), score=0.0)
    batch = control.consume(0)
    assert isinstance(batch, Batch)
    assert [group.group for group in batch.groups] == [0]
    assert batch.num_filtered == 3
    assert control.counters.offered == 4


def test_all_filtered_gives_an_empty_batch() -> None:
    control = make(staleness=0, filter_enabled=True, max_num_gen_batches=2)
    for _ in range(4):
        run_group(control, must_poll(control), score=0.0)
    assert poll(control) is None
    batch = control.consume(0)
    assert isinstance(batch, Batch)
    assert (batch.groups, batch.num_filtered) == ((), 4)
    control.publish(Version(1), 0)
    assert poll(control) is not None


def test_refill_is_not_offered_when_groups_on_their_way_use_up_the_budget() -> None:
    control = make(staleness=0, filter_enabled=True, max_num_gen_batches=1)
    first, second = must_poll(control), must_poll(control)
    for trajectory in ids(second):
        reserve(control, trajectory)
    run_group(control, first, score=0.0)
    assert poll(control) is None


def test_metric_that_the_reward_does_not_report_ends_the_run_by_name() -> None:
    control = make(filter_enabled=True, filter_metric="correct")
    run_group(control, must_poll(control))
    with pytest.raises(RunFailed, match=r"filter_groups\.metric=correct.*\(acc\)"):
        control.consume(0)


def test_score_is_the_raw_score() -> None:
    control = make(filter_enabled=True, filter_metric="score")
    assert run_group(control, must_poll(control)).kept


# -- end of data --------------------------------------------------------------------------------------------------


def test_too_few_rows_end_the_run_without_a_partial_batch() -> None:
    control = make(num_prompts=3)
    step(control)
    run_group(control, must_poll(control))
    assert poll(control) is None
    assert isinstance(end := control.consume(1), EndOfData)
    assert "3 prompts" in end.reason


def test_shortage_by_dropped_groups_trains_what_is_left() -> None:
    control = make(num_prompts=2, total_steps=1)
    fail(control, ids(must_poll(control))[0])
    run_group(control, must_poll(control))
    assert poll(control) is None
    batch = control.consume(0)
    assert isinstance(batch, Batch)
    assert [group.group for group in batch.groups] == [1]


# -- validation ---------------------------------------------------------------------------------------------------


def test_validation_runs_pinned_beside_training() -> None:
    control = make()
    training = must_poll(control)
    control.start_validation(V0)
    control.start_validation(V0)
    assert control.validation_result(V0) is None
    offers = [must_poll(control) for _ in range(3)]
    assert {offer.purpose for offer in offers} == {Purpose.VALIDATION}
    assert {offer.pinned_version for offer in offers} == {0}
    assert must_poll(control).purpose is Purpose.TRAIN
    refused = reserve(control, ids(offers[0])[0], 7)
    assert isinstance(refused, Refused)
    assert not refused.gone
    assert reserve(control, ids(offers[0])[0]) == Reserved(-1)
    for offer in offers[:2]:
        assert run_group(control, offer).kept
    assert "1 of 3 prompts are left" in control.waiting_for_validation()
    fail(control, ids(offers[2])[0])
    done = control.validation_result(V0)
    assert done is not None
    assert (done.num_failed, done.num_prompts) == (1, 3)
    assert [(s.group, s.index, s.data_source, s.metrics["acc"]) for s in done.samples] == [
        (0, 0, "memory", 0.0),
        (0, 1, "memory", 1.0),
        (1, 0, "memory", 0.0),
        (1, 1, "memory", 1.0),
    ]
    outcomes = [line.outcome for line in control.take_lines()]
    assert outcomes == [Outcome.VALIDATED] * 4 + [Outcome.FAILED] * 2
    assert ClearRows(("0_0", "0_1"), "val") in control.take_effects()
    assert control.counters.offered == 2
    run_group(control, training)


def test_validation_rounds_do_not_share_keys_and_survive_a_lost_worker() -> None:
    control = make(val_n=1)
    control.start_validation(V0)
    must_poll(control)
    control.worker_lost("a")
    first = [must_poll(control) for _ in range(3)]
    assert [(offer.prompt.group, offer.offer) for offer in first] == [(0, 1), (1, 0), (2, 0)]
    for offer in first:
        run_group(control, offer)
    step(control)
    control.start_validation(Version(1))
    assert must_poll(control).offer == 2


def test_validation_with_tokens_of_another_version_is_not_scored() -> None:
    control = make()
    step(control)
    control.start_validation(Version(1))
    offers = [must_poll(control) for _ in range(3)]
    assert reserve(control, ids(offers[0])[0], 1) == Reserved(-1)
    completed = control.complete(completion(ids(offers[0])[0], 1, 0))
    assert (completed.kept, completed.reason) == (False, "tokens of version 0, validation is pinned to 1")
    for offer in offers[1:]:
        assert run_group(control, offer, 1).kept
    done = control.validation_result(Version(1))
    assert done is not None
    assert (done.num_failed, {sample.group for sample in done.samples}) == (1, {1, 2})


def test_validation_of_another_version_is_refused() -> None:
    control = make()
    with pytest.raises(IllegalMove):
        control.start_validation(Version(1))
    with pytest.raises(IllegalMove):
        control.validation_result(V0)


def test_validation_without_prompts_is_done_at_once() -> None:
    control = Control(ControlSettings(total_steps=1, batch_size=1, rollout_n=1, staleness=0), MemoryFeed())
    control.publish(V0, 0)
    control.start_validation(V0)
    assert control.validation_result(V0) is not None


# -- publish, snapshot, finish ------------------------------------------------------------------------------------


def test_publish_needs_the_batch_to_have_been_consumed() -> None:
    control = make()
    with pytest.raises(IllegalMove) as raised:
        control.check_publish(Version(1))
    assert raised.value.reason is Reason.NOT_CONSUMED
    with pytest.raises(IllegalMove) as raised:
        control.check_publish(Version(2))
    assert raised.value.reason is Reason.VERSION_OUT_OF_ORDER
    assert control.check_publish(V0) is False


def test_trained_groups_are_logged_and_their_rows_cleared() -> None:
    control = make()
    step(control)
    lines = control.take_lines()
    assert [(line.key, line.outcome, line.trained_at) for line in lines] == [
        ("0_0", Outcome.TRAINED, 0),
        ("0_1", Outcome.TRAINED, 0),
        ("1_0", Outcome.TRAINED, 0),
        ("1_1", Outcome.TRAINED, 0),
    ]
    effects = control.take_effects()
    assert ClearRows(("0_0", "0_1"), "train") in effects
    assert AnnounceVersion(Version(1), 0) in effects


def test_resume_offers_the_same_remaining_prompts_in_order() -> None:
    control = make()
    step(control)
    running, complete = must_poll(control), must_poll(control)
    run_group(control, complete, 1)
    state = ControlState.decode(control.take_snapshot(Version(1), 123).encode())
    assert state.log_bytes == 123
    must_poll(control)  # after the snapshot: forgotten by a resume
    resumed = make(state=state, initial_version=1)
    assert resumed.counters.in_flight == 2
    offers = [must_poll(resumed) for _ in range(4)]
    assert [(offer.prompt.group, offer.offer) for offer in offers] == [(2, 1), (3, 1), (4, 0), (5, 0)]
    assert running.prompt.group == 2
    for offer in offers[:2]:
        run_group(resumed, offer, 1)
    batch = resumed.consume(1)
    assert isinstance(batch, Batch)
    assert batch.buffer == 1
    assert resumed.counters.retries == 2


def test_state_of_another_version_or_format_is_refused() -> None:
    control = make()
    state = control.take_snapshot(V0, 0)
    with pytest.raises(ConfigError, match="version 0"):
        make(state=state, initial_version=4)
    with pytest.raises(ConfigError, match="damaged"):
        ControlState.decode(b"\x01\x02")


def test_finish_logs_what_is_in_flight_and_refuses_the_rest() -> None:
    control = make()
    offer = must_poll(control)
    reserve(control, ids(offer)[0])
    control.finish("done")
    control.finish("twice")
    assert [line.outcome for line in control.take_lines()] == [Outcome.IN_FLIGHT] * 2
    assert Abort(tuple(ids(offer)), "done") in control.take_effects()
    assert poll(control) is None
    assert not control.complete(completion(ids(offer)[0])).kept
    assert control.counters.in_flight == 1


def test_waiting_for_names_who_works_on_what() -> None:
    control = make()
    must_poll(control)
    text = control.waiting_for(0, now=3.5)
    assert "buffer 0 has 0 of 2 groups" in text
    assert "a runs 1 (groups 0; 1 without a place yet; group 0 for 2.5 s)" in text
    control.worker_lost("a")
    assert "1 wait for a worker to ask" in control.waiting_for(0, now=3.5)
