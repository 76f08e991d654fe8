"""The ledger's rules, one at a time."""

import pytest

from psrl.staleness import Closed, Denied, Held, IllegalMove, Ledger, Occupied, Place, Reason, Status
from psrl.types import GroupId, Version

V0, V1 = Version(0), Version(1)


def G(number: int) -> GroupId:
    return GroupId(number)


def reserve(ledger: Ledger, group: int, version: int = 0, index: int = 0) -> Place | Denied:
    answer = ledger.reserve(G(group), index, Version(version))
    ledger.check()
    return answer


def fill(ledger: Ledger, *groups: int, version: int = 0) -> list[Occupied]:
    for group in groups:
        assert isinstance(reserve(ledger, group, version), Place)
    return [ledger.occupy(G(group), Version(version)) for group in groups]


def step(ledger: Ledger, *groups: int) -> None:
    version = ledger.version
    fill(ledger, *groups, version=version)
    ledger.consume(version)
    ledger.publish(Version(version + 1))


def refused(reason: Reason, call, *arguments) -> None:
    with pytest.raises(IllegalMove) as raised:
        call(*arguments)
    assert raised.value.reason is reason


def test_reserve_takes_the_latest_buffer_and_occupy_the_earliest() -> None:
    ledger = Ledger(2, 1)
    assert reserve(ledger, 7) == Place(1, 1)
    assert ledger.occupy(G(7), V0) == Occupied(0, 0, 1, ready=False)
    assert ledger.buffer_of(G(7)) == 0


def test_at_staleness_zero_only_the_published_version_is_admitted() -> None:
    ledger = Ledger(1, 0)
    step(ledger, 0)
    assert isinstance(reserve(ledger, 1, 0), Denied)
    assert reserve(ledger, 1, 1) == Place(1, 0)
    refused(Reason.VERSION_UNPUBLISHED, ledger.reserve, G(2), 0, Version(2))


def test_siblings_share_an_entry_and_the_oldest_counts() -> None:
    ledger = Ledger(2, 1)
    assert reserve(ledger, 0, 0, index=0) == Place(1, 1)
    assert reserve(ledger, 0, 0, index=0) == Place(1, 1, joined=True)
    fill(ledger, 1, 2)
    ledger.consume(0)
    ledger.publish(V1)
    assert reserve(ledger, 0, 1, index=1) == Place(1, 1, joined=True)
    assert reserve(ledger, 3, 1) == Place(2, 1)
    got = reserve(ledger, 3, 0, index=1)
    assert isinstance(got, Denied)
    assert (got.reason, got.final) == (Reason.SIBLING_TOO_OLD, False)
    assert ledger.occupy(G(0), V0).buffer == 1
    got = reserve(ledger, 0, 1, index=0)
    assert isinstance(got, Denied)
    assert (got.reason, got.final) == (Reason.GROUP_OCCUPIED, True)


def test_sibling_started_again_on_older_weights_lowers_the_version() -> None:
    ledger = Ledger(1, 2)
    step(ledger, 0)
    assert reserve(ledger, 1, 1) == Place(3, 0)
    assert isinstance(reserve(ledger, 1, 0), Denied)
    assert reserve(ledger, 2, 1) == Place(2, 0)
    assert reserve(ledger, 2, 0) == Place(2, 0, joined=True)
    assert ledger.buffers[2].reserved[0].version == 0
    assert ledger.occupy(G(1), V1).buffer == 1, "group 2 is too old for the place that group 1 left"
    assert ledger.buffer_of(G(2)) == 2


def test_sibling_that_goes_on_under_newer_weights_keeps_the_version_of_its_start() -> None:
    ledger = Ledger(1, 2)
    assert reserve(ledger, 2) == Place(2, 0)
    step(ledger, 0)
    assert reserve(ledger, 2, 1) == Place(2, 0, joined=True)
    assert ledger.buffers[2].reserved[0].version == 0
    assert fill(ledger, 1, version=1)[0].buffer == 1
    assert ledger.buffer_of(G(2)) == 2, "the place that group 1 left is too late for what group 2 has made"
    assert ledger.occupy(G(2), V0).buffer == 2


def test_full_is_named_and_a_release_makes_room() -> None:
    ledger = Ledger(1, 1)
    reserve(ledger, 0)
    reserve(ledger, 1)
    got = reserve(ledger, 2)
    assert isinstance(got, Denied)
    assert (got.reason, got.final) == (Reason.FULL, False)
    assert ledger.free() == 0
    assert ledger.release(G(0)) == 1
    assert ledger.release(G(0)) is None
    assert ledger.free() == 1
    assert reserve(ledger, 2) == Place(1, 0)


def test_buffers_beyond_the_end_do_not_exist() -> None:
    ledger = Ledger(1, 3, end=2)
    assert ledger.free() == 2
    assert reserve(ledger, 0) == Place(1, 0)
    assert reserve(ledger, 1) == Place(0, 0)
    assert isinstance(reserve(ledger, 2), Denied)
    for buffer in (0, 1):
        ledger.occupy(G(1 - buffer), V0)
        ledger.consume(buffer)
        ledger.publish(Version(buffer + 1))
    got = reserve(ledger, 2, 2)
    assert isinstance(got, Denied)
    assert (got.reason, got.final) == (Reason.END_OF_RUN, True)


def test_version_is_aborted_when_all_its_buffers_are_ready() -> None:
    ledger = Ledger(1, 1)
    fill(ledger, 0, 1)
    assert ledger.max_aborted_version == 0
    got = reserve(ledger, 2)
    assert isinstance(got, Denied)
    assert got.reason is Reason.VERSION_ABORTED
    ledger.consume(0)
    ledger.publish(V1)
    assert isinstance(reserve(ledger, 2), Denied)
    assert reserve(ledger, 2, 1) == Place(2, 0)


def test_occupied_group_leaves_its_place_to_an_earlier_reservation() -> None:
    """So that the earliest step finds room as soon as any group is done."""
    ledger = Ledger(1, 1)
    reserve(ledger, 0)  # buffer 1
    reserve(ledger, 1)  # buffer 0
    assert ledger.occupy(G(0), V0).buffer == 0
    assert ledger.buffer_of(G(1)) == 1


def test_reservation_too_old_to_move_keeps_its_buffer() -> None:
    ledger = Ledger(1, 1)
    reserve(ledger, 0)
    fill(ledger, 1)
    ledger.consume(0)
    ledger.publish(V1)
    reserve(ledger, 2, 1)
    assert ledger.buffer_of(G(0)) == 1
    assert ledger.occupy(G(2), V1).buffer == 2
    assert ledger.occupy(G(0), V0).buffer == 1


def test_consume_and_publish_go_one_after_the_other() -> None:
    ledger = Ledger(2, 1)
    refused(Reason.NOT_READY, ledger.consume, 0)
    fill(ledger, 5, 3)
    refused(Reason.OUTSIDE_WINDOW, ledger.consume, 1)
    refused(Reason.NOT_CONSUMED, ledger.publish, V1)
    assert ledger.consume(0) == (Held(G(3), V0), Held(G(5), V0))
    assert ledger.consume(0) == (Held(G(3), V0), Held(G(5), V0))
    refused(Reason.VERSION_OUT_OF_ORDER, ledger.publish, Version(2))
    advanced = ledger.publish(V1)
    assert [held.group for held in advanced.trained] == [3, 5]
    refused(Reason.VERSION_OUT_OF_ORDER, ledger.publish, V1)
    refused(Reason.OUTSIDE_WINDOW, ledger.consume, 0)


def test_occupy_needs_a_reservation_and_a_version_that_can_be_true() -> None:
    ledger = Ledger(1, 1)
    refused(Reason.NOT_RESERVED, ledger.occupy, G(0), V0)
    reserve(ledger, 0)
    refused(Reason.VERSION_UNPUBLISHED, ledger.occupy, G(0), V1)
    fill(ledger, 1)
    ledger.consume(0)
    ledger.publish(V1)
    refused(Reason.VERSION_TOO_OLD, ledger.occupy, G(0), Version(-1))
    ledger.occupy(G(0), V0)
    refused(Reason.GROUP_OCCUPIED, ledger.occupy, G(0), V0)
    refused(Reason.GROUP_OCCUPIED, ledger.release, G(0))


def test_negative_age_is_never_admitted() -> None:
    """A counter that went backwards: samples stamped 57 while 3 is published."""
    ledger = Ledger(1, 3, version=3)
    refused(Reason.VERSION_UNPUBLISHED, ledger.reserve, G(0), 0, Version(57))


# -- dynamic sampling ---------------------------------------------------------------------------------------------


def test_filtered_groups_are_charged_to_the_earliest_open_buffer() -> None:
    ledger = Ledger(2, 1, budget=4)
    reserve(ledger, 0)
    assert ledger.filter(G(0), V0).buffer == 0
    assert ledger.buffer_of(G(0)) is None
    assert ledger.buffers[0].filtered == 1


def test_used_up_budget_closes_the_buffer_with_what_it_has() -> None:
    ledger = Ledger(2, 0, budget=3)
    fill(ledger, 0)
    reserve(ledger, 1)
    assert not ledger.filter(G(1), V0).closed
    reserve(ledger, 2)
    assert ledger.free() == 0
    assert ledger.filter(G(2), V0).closed
    assert ledger.buffers[0].status is Status.READY
    assert ledger.consume(0) == (Held(G(0), V0),)


def test_budget_counts_groups_on_their_way() -> None:
    ledger = Ledger(2, 0, budget=2)
    reserve(ledger, 0)
    reserve(ledger, 1)
    ledger.filter(G(0), V0)
    assert ledger.free() == 0
    assert isinstance(reserve(ledger, 2), Denied)
    assert ledger.occupy(G(1), V0) == Occupied(0, 0, 1, ready=True)


# -- closing short ------------------------------------------------------------------------------------------------


def test_close_short_moves_reservations_that_are_admitted_elsewhere() -> None:
    ledger = Ledger(2, 1)
    for group in range(3):
        reserve(ledger, group)
    assert [ledger.buffer_of(G(group)) for group in range(3)] == [1, 1, 0]
    ledger.release(G(0))
    assert ledger.close_short(0) == Closed(0, 0, moved=(G(2),))
    assert ledger.buffer_of(G(2)) == 1
    ledger.check()
    assert ledger.consume(0) == ()
    ledger.publish(V1)


def test_close_short_aborts_what_has_no_other_place() -> None:
    ledger = Ledger(2, 0)
    fill(ledger, 0)
    reserve(ledger, 1)
    assert ledger.close_short(0) == Closed(0, 1, aborted=(G(1),))
    assert ledger.buffer_of(G(1)) is None
    refused(Reason.ALREADY_READY, ledger.close_short, 0)
    refused(Reason.OUTSIDE_WINDOW, ledger.close_short, 1)


@pytest.mark.parametrize("arguments", [(0, 0), (1, -1)])
def test_sizes_that_make_no_sense_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="needed must be"):
        Ledger(*arguments)
    with pytest.raises(ValueError, match="budget"):
        Ledger(2, 0, budget=1)
    with pytest.raises(ValueError, match="slots"):
        Ledger(2, 0, slots=1)


def test_the_worked_example_of_the_design_page() -> None:
    def view() -> list[str]:
        return [
            " ".join(
                [f"O{e.group}" for e in b.occupied] + ["."] * b.empty + [f"R{e.group}" for e in reversed(b.reserved)]
            )
            for b in ledger.buffers.values()
            if not b.consumed
        ]

    ledger = Ledger(2, 1)
    for group in (0, 1):
        reserve(ledger, group)
    assert view() == [". .", "R1 R0"]
    for group in (2, 3):
        reserve(ledger, group)
    assert isinstance(reserve(ledger, 4), Denied)
    assert view() == ["R3 R2", "R1 R0"]
    ledger.occupy(G(1), V0)
    assert view() == ["O1 R2", "R3 R0"]
    ledger.occupy(G(3), V0)
    assert view() == ["O1 O3", "R2 R0"]
    assert [held.group for held in ledger.consume(0)] == [1, 3]
    ledger.publish(V1)
    reserve(ledger, 4, 1)
    assert isinstance(reserve(ledger, 5, 0), Denied)
    assert view() == ["R2 R0", ". R4"]
    ledger.occupy(G(4), V1)
    assert view() == ["R2 R0", "O4 ."]
    ledger.occupy(G(0), V0)
    ledger.occupy(G(2), V0)
    assert view() == ["O0 O2", "O4 ."]
