"""What the wiring hands to a trainer rank: the rest of the system, as far as training needs it.

The protocols name the few methods that training calls; PSManager's ref, BlockingTransferQueue, WeightPublisher and
MetricLogger have them. Tests hand in small objects of their own.
"""

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from psrl.control.messages import (
    AwaitValidation,
    Batch,
    Consume,
    Counters,
    EndOfData,
    Finish,
    GetStatus,
    NotReady,
    Publish,
    Published,
    Snapshot,
    StartValidation,
    Status,
    TakeSnapshot,
    ValidationDone,
)
from psrl.transfer import KVBatchMeta
from psrl.types import Epoch, Version
from psrl.weights.manifest import Manifest
from psrl.weights.publish import Group

T = TypeVar("T")


class Control(Protocol):
    """PSManager."""

    async def consume(self, message: Consume) -> Batch | NotReady | EndOfData: ...
    async def publish(self, message: Publish) -> Published: ...
    async def start_validation(self, message: StartValidation) -> None: ...
    async def await_validation(self, message: AwaitValidation) -> ValidationDone | NotReady: ...
    async def take_snapshot(self, message: TakeSnapshot) -> Snapshot: ...
    async def get_status(self, message: GetStatus) -> Status: ...
    async def finish(self, message: Finish) -> Counters: ...


class Calls(Protocol):
    """BlockingRuntime: runs a coroutine on the actor thread and waits for it."""

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T: ...


class Samples(Protocol):
    """BlockingTransferQueue."""

    def kv_batch_get_by_meta(self, meta: KVBatchMeta) -> Sequence[Mapping[str, NDArray[Any]]]: ...

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[Mapping[str, NDArray[Any]]]
    ) -> object: ...


class Weights(Protocol):
    """WeightPublisher."""

    manifest: Manifest

    def shard(self, named: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> None: ...
    def push(self, group: Group, epoch: Epoch, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> int: ...


class MetricSink(Protocol):
    """MetricLogger."""

    def log(self, step: int, values: dict[str, float]) -> None: ...


@dataclass(frozen=True, slots=True)
class Head:
    """What only rank 0 has: it speaks for all ranks."""

    control: Control
    metrics: MetricSink


@dataclass(frozen=True, slots=True)
class TrainerLinks:
    """One rank's links. `head` is given on rank 0 and None elsewhere."""

    calls: Calls
    queue: Samples
    weights: Weights
    head: Head | None
    epoch: Epoch
    total_steps: int  # min(steps of the data, trainer.total_training_steps)
    run_dir: Path
    resume_from: Path | None = None  # a checkpoint folder, chosen and verified before
