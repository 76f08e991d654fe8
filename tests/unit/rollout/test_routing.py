"""Selection: eligibility, capacity, policies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.errors import ConfigError
from psrl.rollout.routing import POLICIES, ReplicaView, RequestNumBalance, RoundRobin, eligible, policy_named
from psrl.types import Version


def view(name: str, version: int = 0, running: int = 0, limit: int = 4, accepting: bool = True) -> ReplicaView:
    return ReplicaView(name, Version(version), running, limit, accepting)


def test_full_held_and_other_versions_are_not_eligible() -> None:
    replicas = [view("a", running=4), view("b", accepting=False), view("c", version=3), view("d", version=2)]
    assert [replica.name for replica in eligible(replicas, None)] == ["c", "d"]
    assert [replica.name for replica in eligible(replicas, Version(2))] == ["d"]
    assert eligible(replicas, Version(7)) == []


def test_round_robin_visits_all_in_turn_and_survives_changes() -> None:
    policy = RoundRobin()
    replicas = [view("b"), view("a"), view("c")]
    assert [policy.choose(replicas).name for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert policy.choose([view("a"), view("b")]).name == "a"  # c left


def test_balance_takes_the_least_loaded_and_the_newer_of_equals() -> None:
    policy = RequestNumBalance()
    assert policy.choose([view("a", running=2), view("b", running=1)]).name == "b"
    assert policy.choose([view("a", version=1, running=1), view("b", version=2, running=1)]).name == "b"
    assert policy.choose([view("b"), view("a")]).name == "a"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_balance_keeps_loads_within_one(arrivals: list[int]) -> None:
    policy = RequestNumBalance()
    running = {"a": 0, "b": 0, "c": 0}
    for _ in arrivals:
        chosen = policy.choose([view(name, running=count, limit=100) for name, count in running.items()])
        running[chosen.name] += 1
    assert max(running.values()) - min(running.values()) <= 1


def test_unknown_policy_names_the_key_and_the_choices() -> None:
    for name in POLICIES:
        policy_named(name)
    with pytest.raises(ConfigError, match=r"routing_strategy\.method.*'fastest'.*round_robin"):
        policy_named("fastest")
