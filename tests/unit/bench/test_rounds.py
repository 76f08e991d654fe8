"""Ratios are taken within a round; what is told is their median."""

import pytest

from psrl.bench.record import require_possible
from psrl.bench.rounds import Row, in_turn, interleaved, multiple, quantiles_us, share
from psrl.errors import BenchError


def test_a_share_is_of_the_rate_and_a_multiple_of_the_time() -> None:
    ours, limit = [2.0, 4.0, 10.0], [1.0, 1.0, 5.0]
    assert share(ours, limit, "memcpy") == {
        "ratio": 0.5,
        "spread": [0.25, 0.5],
        "rounds": 3,
        "measure": "share of",
        "limit": "memcpy",
    }
    assert multiple(ours, limit, "size/bandwidth")["ratio"] == 2.0
    assert multiple(ours, limit, "size/bandwidth")["spread"] == [2.0, 4.0]


def test_rounds_must_be_of_the_same_number() -> None:
    with pytest.raises(ValueError, match="shorter"):
        share([1.0, 2.0], [1.0], "memcpy")


def test_every_action_is_done_in_every_round_and_each_begins_one() -> None:
    done: list[str] = []
    times = interleaved({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, 3)
    assert done == ["a", "b", *"ab", *"ba", *"ab"]  # the first round does not count
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3}
    assert in_turn([1, 2, 3], 4) == [2, 3, 1]


def test_quantiles() -> None:
    found = quantiles_us([i * 1e-6 for i in range(101)])
    assert (found["p10_us"], found["p50_us"], found["p90_us"], found["count"]) == (10.0, 50.0, 90.0, 101)


def row(measure: str, ratio: float, raw: float = 0.95, to_sent: float | None = None) -> Row:
    return {
        "what": "it",
        "measure": measure,
        "ratio": ratio,
        "raw_gbit_per_s": raw,
        "to_sent": ratio if to_sent is None else to_sent,
    }


@pytest.mark.parametrize(
    "possible",
    [
        row("times", 1.0),
        row("times", 1.2),
        row("share of", 1.0),
        row("share of", 0.4),
        row("times", 0.1, to_sent=18.0),  # a patch: fewer bytes than a version, and slower than those need
        row("times", 1.01, raw=1.02),
    ],
)
def test_what_a_link_can_do_is_believed(possible: Row) -> None:
    require_possible([possible], 1.0)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (row("times", 0.99), "0.9900 x size/bandwidth, so bytes went around"),
        (row("times", 0.05, to_sent=0.7), "0.7000 x size/bandwidth"),
        (row("share of", 1.25), "0.8000 x size/bandwidth"),
        (row("times", 1.1, raw=9.4), "9.400 Gbit/s on links of 1, so their limit is not in force"),
    ],
)
def test_what_no_link_can_do_is_refused_by_name(wrong: Row, reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        require_possible([row("times", 1.1), wrong], 1.0)
