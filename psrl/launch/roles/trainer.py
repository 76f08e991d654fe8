"""A trainer rank: `psrl.train.fit` on the main thread, the actor runtime on a second one."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from psrl.actor import BlockingRuntime, UnixAddress
from psrl.control import PSManager
from psrl.launch.messages import CollectMetrics
from psrl.launch.roles import head
from psrl.launch.roles.node import Node
from psrl.launch.spec import RunSpec
from psrl.metrics import JsonlSink, MetricLogger, Sink, WandbSink
from psrl.metrics.staleness import rollout_rates
from psrl.train import fit
from psrl.train.links import Head, TrainerLinks
from psrl.transfer import BlockingTransferQueue
from psrl.transfer.segments import WEIGHTS, SegmentSource
from psrl.weights.manifest import Manifest
from psrl.weights.publish import WeightPublisher
from psrl.weights.store import WeightStore

METRICS = "metrics.jsonl"
_HEAD_METRICS_TIMEOUT_S = 30.0


class RunMetrics:
    """The run's MetricLogger, with the head's share added to each training step: its totals, and rates since the step
    before.
    """

    def __init__(self, metrics: MetricLogger, runtime: BlockingRuntime, node: Node) -> None:
        self._metrics, self._runtime, self._node = metrics, runtime, node
        self._totals: dict[str, float] = {}
        self._asked_s = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shared: dict[str, float] = {}
        if "training/global_step" in values:
            totals = self._runtime.call(self._node.collect_metrics(CollectMetrics()), _HEAD_METRICS_TIMEOUT_S).values
            asked_s = time.perf_counter()
            shared = totals | rollout_rates(self._totals, totals, asked_s - self._asked_s)
            self._totals, self._asked_s = totals, asked_s
        self._metrics.log(step, {**shared, **values})


def run(spec: RunSpec, name: str) -> None:
    """Train to the end of the run."""
    rank = spec.trainers.index(name)
    with ExitStack() as stack:
        blocking = stack.enter_context(BlockingRuntime(name))
        links = blocking.call(_links(spec, name, blocking), head.START_TIMEOUT_S)
        if rank == 0:
            metrics = stack.enter_context(MetricLogger(_sinks(spec)))
            links = blocking.call(_with_head(spec, links, blocking, metrics), head.START_TIMEOUT_S)
        fit.main(spec.config, links)


async def _links(spec: RunSpec, name: str, blocking: BlockingRuntime) -> TrainerLinks:
    queue = await head.connect_queue(blocking.runtime, spec, name)
    store = WeightStore.open(SegmentSource(spec.segments_socket).fetch(WEIGHTS))
    return TrainerLinks(
        calls=blocking,
        queue=BlockingTransferQueue(queue, blocking),
        weights=WeightPublisher(store, Manifest.decode(spec.manifest)),
        head=None,
        epoch=spec.epoch,
        total_steps=spec.total_steps,
        run_dir=Path(spec.run_dir),
        resume_from=Path(spec.resume_from) if spec.resume_from else None,
    )


async def _with_head(
    spec: RunSpec, links: TrainerLinks, blocking: BlockingRuntime, metrics: MetricLogger
) -> TrainerLinks:
    """Rank 0 speaks for all ranks: control, metrics."""
    runtime, address = blocking.runtime, UnixAddress(spec.head_socket)
    node = await runtime.connect(Node, head.NODE, address, timeout_s=head.START_TIMEOUT_S)
    return TrainerLinks(
        calls=links.calls,
        queue=links.queue,
        weights=links.weights,
        head=Head(
            control=await runtime.connect(PSManager, head.MANAGER, address, timeout_s=head.START_TIMEOUT_S),
            metrics=RunMetrics(metrics, blocking, node),
        ),
        epoch=links.epoch,
        total_steps=links.total_steps,
        run_dir=links.run_dir,
        resume_from=links.resume_from,
    )


def _sinks(spec: RunSpec) -> Sequence[Sink]:
    """JSONL always (the launcher's console reads it); others as trainer.logger says."""
    run_dir, trainer = Path(spec.run_dir), spec.config.trainer
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS)]
    if "wandb" in trainer.logger:
        os.makedirs(run_dir, exist_ok=True)
        sinks.append(
            WandbSink(trainer.project_name, trainer.experiment_name, run_dir, msgspec.to_builtins(spec.config))
        )
    return sinks
