"""Which replicas pull a new version, and which must not yet."""

from psrl.rollout.sync_policy import SyncCandidate, greedy
from psrl.types import Version

NEWEST = Version(5)


def decide(
    *replicas: SyncCandidate, partial_rollout: bool = True, pinned: tuple[int, ...] = (), now_s: float = 0.0
) -> list[str]:
    return greedy(
        replicas,
        NEWEST,
        partial_rollout=partial_rollout,
        pinned_waiting=frozenset(Version(version) for version in pinned),
        now_s=now_s,
    )


def replica(
    name: str = "r", version: int = 4, *, syncing: bool = False, running: int = 0, pinned: int = 0, retry: float = 0.0
) -> SyncCandidate:
    return SyncCandidate(name, Version(version), syncing, running, pinned, retry)


def test_all_that_are_behind_pull_at_once() -> None:
    assert decide(replica("a"), replica("b", 5), replica("c", -1)) == ["a", "c"]


def test_one_sync_at_a_time_and_a_pause_after_a_failure() -> None:
    assert decide(replica(syncing=True)) == []
    assert decide(replica(retry=2.0), now_s=1.9) == []
    assert decide(replica(retry=2.0), now_s=2.0) == ["r"]


def test_validation_holds_its_replicas() -> None:
    assert decide(replica(pinned=1, running=3)) == []
    assert decide(replica("a", 4), replica("b", 3), pinned=(4,)) == ["b"]


def test_without_partial_rollout_only_idle_replicas_sync() -> None:
    assert decide(replica("a", running=1), replica("b"), partial_rollout=False) == ["b"]
    assert decide(replica("a", running=1)) == ["a"]
