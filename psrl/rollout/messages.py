"""What agent loops, PSManager and the launcher say to the rollout side."""

import msgspec

from psrl.types import Epoch, FinishReason, SamplingParams, TrajectoryId, Version, VersionSpan


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Continue `prompt_ids` (int32 little-endian bytes) for one trajectory."""

    epoch: Epoch
    trajectory: TrajectoryId
    prompt_ids: bytes
    sampling: SamplingParams
    pinned_version: Version | None = None  # validation: exactly these weights; None: any admissible


class Generated(msgspec.Struct, frozen=True, tag=True):
    """A finished generation. Lengths of token_ids, log_probs and the spans' sum are equal."""

    trajectory: TrajectoryId
    token_ids: bytes  # int32 little-endian, [T]
    log_probs: bytes  # float32 little-endian, [T]; of the distribution that was sampled from
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    started_s: float  # when a place was first reserved; loop clock (monotonic of this machine)
    ended_s: float
    num_dispatches: int  # 1 + times it went through selection again
    error: str = ""


class AbortTrajectories(msgspec.Struct, frozen=True, tag=True):
    """Stop these; their Generate calls answer with finish_reason abort."""

    trajectories: tuple[TrajectoryId, ...]
    reason: str


class RegisterReplica(msgspec.Struct, frozen=True, tag=True):
    """A replica's server is up. Registering a known name again replaces it (restart)."""

    epoch: Epoch
    name: str
    address: str  # grpc target
    version: Version
    max_num_seqs: int


class ReplicaLost(msgspec.Struct, frozen=True, tag=True):
    """The replica's process ended; its requests are to be dispatched again."""

    name: str
    reason: str


class VersionPublished(msgspec.Struct, frozen=True, tag=True):
    """PSManager committed a version; the coordinator may sync replicas to it."""

    epoch: Epoch
    version: Version
    slot: int


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Done; nothing to say."""


class HoldReplica(msgspec.Struct, frozen=True, tag=True):
    """Route nothing new to it (a sync is about to start); what runs there goes on."""

    name: str


class SetReplica(msgspec.Struct, frozen=True, tag=True):
    """The replica serves `version` from now on and may be routed to. An unknown name is added."""

    name: str
    address: str
    version: Version
    max_num_seqs: int


class GetRolloutView(msgspec.Struct, frozen=True, tag=True):
    """What runs and waits where, for the coordinator's decisions and for metrics."""


class ReplicaLoad(msgspec.Struct, frozen=True, tag=True):
    name: str
    version: Version
    accepting: bool
    num_running: int
    num_pinned: int  # of these, validation requests that must not see another version


class RolloutView(msgspec.Struct, frozen=True, tag=True):
    replicas: tuple[ReplicaLoad, ...]
    num_waiting: int
    pinned_waiting: tuple[Version, ...]  # versions that waiting validation requests need
    num_generated_tokens: int  # since start
    num_finished: int
    num_redispatched: int
    busy_s: float  # seconds since start in which at least one request was running


class SyncView(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's own account of syncs since start."""

    newest: Version
    versions: dict[str, Version]
    num_syncs: int
    num_failures: int
    num_full_loads: int  # syncs in which an engine could not take the new weights by direct copies
    pause_s: float  # summed time in which engines stood still for a sync
    transfer_s: float
    num_bytes: int


class GetSyncView(msgspec.Struct, frozen=True, tag=True):
    """Ask the coordinator for SyncView."""
