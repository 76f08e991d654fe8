"""Slow relays, in simulation: each hop has a rate of its own, and the route is mended as `Pace` says."""

from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.weights.pace import Pace, PaceRule
from psrl.weights.topology import Route

UNIT = 1 << 20
NUM = 200
NODES = [f"n{i}" for i in range(6)]
FAST = 100.0  # units a second


def simulate(route: Route, send: dict[str, float], receive: dict[str, float], limit_s: float = 2000.0):
    """Units move along the route, each hop at the lesser of both ends' rates, a sender's shared by its children.

    When all have everything, and who was passed by.
    """
    pace = Pace(PaceRule(), UNIT, 0.0)
    have = dict.fromkeys(route.nodes, 0.0)
    have[route.source] = NUM
    passed, at, step = [], 0.0, 0.1
    while min(have.values()) < NUM and at < limit_s:
        at += step
        before = dict(have)
        for child, parent in route.parents:
            busy = sum(before[c] < before[parent] for c in route.children(parent)) or 1
            rate = min(send.get(parent, FAST) / busy, receive.get(child, FAST))
            have[child] = min(before[parent], have[child] + rate * step)
        slow = pace.look(at, route, {node: int(units) for node, units in have.items()}, NUM)
        if slow:
            passed.append(slow)
            route = route.pass_by(slow, dead=False)
    return at, passed


CHAIN = Route.of("chain", NODES)


def test_an_even_chain_is_left_alone() -> None:
    seconds, passed = simulate(CHAIN, {}, {})
    assert passed == []
    assert seconds < NUM / FAST + 1


def test_a_slow_receiver_goes_to_the_end() -> None:
    # Its predecessor has what it is fed at full speed, so it is seen.
    seconds, passed = simulate(CHAIN, {}, {"n2": 5.0})
    assert passed == ["n2"]
    assert 0.9 * NUM / 5 < seconds < 1.2 * NUM / 5
    others, _ = simulate(Route.of("chain", ["n0", "n1", "n3", "n4", "n5"]), {}, {})
    assert others < 0.1 * seconds


def test_a_slow_sender_hands_on_no_more() -> None:
    seconds, passed = simulate(CHAIN, {"n2": 5.0}, {})
    assert passed[-1] == "n2"
    assert len(passed) <= 2
    assert seconds < 0.3 * NUM / 5


def test_a_relay_that_stands_still_is_passed_by() -> None:
    seconds, passed = simulate(CHAIN, {"n1": 0.0}, {"n1": 0.0}, limit_s=30)
    assert passed == ["n1"]
    assert seconds >= 30  # n1 itself never gets it


def test_the_first_relay_is_passed_by_when_it_stands_still() -> None:
    route = CHAIN.pass_by("n1", dead=False)
    assert route.nodes[-1] == "n1"
    _, passed = simulate(route, {"n2": 0.0}, {"n2": 0.0}, limit_s=30)
    assert passed == ["n2"]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["chain", "tree", "star"]),
    st.dictionaries(st.sampled_from(NODES[1:]), st.floats(5, FAST), max_size=3),
    st.dictionaries(st.sampled_from(NODES[1:]), st.floats(5, FAST), max_size=3),
)
def test_it_always_ends_and_never_much_later(kind, send, receive) -> None:
    seconds, passed = simulate(Route.of(kind, NODES), send, receive)
    assert len(passed) == len(set(passed))
    slowest = min([FAST, *send.values(), *receive.values()])
    assert seconds < 5 * NUM / slowest + 10
