"""Which replica serves a request: pure decisions over a snapshot.

Selection is version-eligible first (a pinned request needs exactly its version; any other is admitted by PSManager at
the replica's version), then by capacity, then by policy. A new policy is one class here and one line in `policy_named`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from psrl.errors import ConfigError
from psrl.types import Version

POLICIES = ("round_robin", "request_num_balance")


class ReplicaView(msgspec.Struct, frozen=True):
    """What a policy may know of a replica."""

    name: str
    version: Version
    num_running: int
    max_running: int
    accepting: bool


def eligible(replicas: Sequence[ReplicaView], pinned_version: Version | None) -> list[ReplicaView]:
    """Replicas that may take a request now, in the order given."""
    return [
        replica
        for replica in replicas
        if replica.accepting
        and replica.num_running < replica.max_running
        and (pinned_version is None or replica.version == pinned_version)
    ]


class Policy(Protocol):
    """Picks one of at least one eligible replicas; may remember what it picked."""

    def choose(self, candidates: Sequence[ReplicaView]) -> ReplicaView: ...


class RoundRobin:
    """The next name in sorted order after the last one picked."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[ReplicaView]) -> ReplicaView:
        ordered = sorted(candidates, key=lambda replica: replica.name)
        chosen = next((replica for replica in ordered if replica.name > self._last), ordered[0])
        self._last = chosen.name
        return chosen


class RequestNumBalance:
    """The newest version among the replicas with fewest running requests; ties by name."""

    def choose(self, candidates: Sequence[ReplicaView]) -> ReplicaView:
        return min(candidates, key=lambda replica: (replica.num_running, -replica.version, replica.name))


def policy_named(name: str) -> Policy:
    """The policy of `psrl.rollout_coordination.routing_strategy.method`. Raises ConfigError for an unknown name."""
    if name == "round_robin":
        return RoundRobin()
    if name == "request_num_balance":
        return RequestNumBalance()
    raise ConfigError(
        f"psrl.rollout_coordination.routing_strategy.method: {name!r} is unknown; one of {', '.join(POLICIES)}"
    )
