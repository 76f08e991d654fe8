"""When replicas pull a new version: pure decisions over a snapshot.

`greedy`: every replica that is behind the newest version pulls at once, except
- one that is pulling already, or waits after a failure;
- one whose validation requests (running or waiting for its version) must not see another version (semantics 20);
- without partial rollout, one that still has requests running.
"""

from collections.abc import Sequence

import msgspec

from psrl.types import Version


class SyncCandidate(msgspec.Struct, frozen=True):
    name: str
    version: Version
    syncing: bool
    num_running: int
    num_pinned: int
    retry_at_s: float = 0.0  # not before, after a failed sync


def greedy(
    replicas: Sequence[SyncCandidate],
    newest: Version,
    *,
    partial_rollout: bool,
    pinned_waiting: frozenset[Version],
    now_s: float,
) -> list[str]:
    """Names of the replicas that should pull `newest` now."""
    return [
        replica.name
        for replica in replicas
        if replica.version < newest
        and not replica.syncing
        and replica.retry_at_s <= now_s
        and replica.num_pinned == 0
        and replica.version not in pinned_waiting
        and (partial_rollout or replica.num_running == 0)
    ]
