"""The head: the control actors of a run in one process, and the effects by which PSManager moves the rest."""

import logging
from collections.abc import Sequence
from pathlib import Path

from psrl.actor import Runtime, UnixAddress
from psrl.control import ControlSettings, ControlState, PSManager, TrajectoryLog
from psrl.control.messages import Publish
from psrl.data import ChatTokenizer, PromptDataset, PromptFeed
from psrl.errors import StorageError
from psrl.launch.roles.failure import raise_when_failed
from psrl.launch.roles.node import Node
from psrl.launch.spec import RunSpec, is_own_checkpoint
from psrl.rollout.coordinator import RolloutCoordinator
from psrl.rollout.gateway import RolloutGateway
from psrl.rollout.messages import AbortTrajectories, VersionPublished
from psrl.rollout.routing import policy_named
from psrl.train.checkpoint_dir import Checkpoint
from psrl.transfer import QueueNode, TransferQueue
from psrl.transfer.segments import WEIGHTS, SegmentSource
from psrl.types import Epoch, GroupId, TrajectoryId, Version
from psrl.weights.manifest import Manifest
from psrl.weights.store import WeightStore

logger = logging.getLogger(__name__)

MANAGER, GATEWAY, COORDINATOR = "psmanager", "gateway", "coordinator"
NODE = "node"

START_TIMEOUT_S = 300.0
"""How long others wait for the head, which first reads and tokenises the data."""

GENERATE_MAILBOX = 1 << 16  # requests wait in the gateway by design, not in engines
"""Calls in progress at the gateway; more are pushed back."""

CONTROL_MAILBOX = 1 << 16  # completions of a whole batch may arrive at once


class HeadEffects:
    """What PSManager's decisions do to the layers above it. Nothing is decided before `connect`: no version is
    published.
    """

    def __init__(self, weights: WeightStore, manifest_hash: str, queue: TransferQueue) -> None:
        self._weights = weights
        self._manifest_hash = manifest_hash
        self._queue = queue

    def connect(self, gateway: RolloutGateway, gateway_actor: RolloutGateway, coordinator: RolloutCoordinator) -> None:
        """`gateway` is the ref; `gateway_actor` the object behind it, in this process."""
        self._gateway, self._gateway_actor, self._coordinator = gateway, gateway_actor, coordinator

    async def commit_weights(self, message: Publish) -> None:
        if message.manifest_hash != self._manifest_hash:
            raise StorageError(
                f"version {message.version} has manifest {message.manifest_hash}, this run's is {self._manifest_hash}"
            )
        self._weights.commit(message.epoch, message.version, message.slot)

    async def version_published(self, epoch: Epoch, version: Version, slot: int) -> None:
        await self._coordinator.version_published(VersionPublished(epoch, version, slot))

    async def abort(self, trajectories: Sequence[TrajectoryId], reason: str) -> None:
        await self._gateway.abort_trajectories(AbortTrajectories(tuple(trajectories), reason))

    async def clear_rows(self, keys: Sequence[str], partition: str) -> None:
        await self._queue.kv_clear(list(keys), partition)

    def ledger_changed(self) -> None:
        self._gateway_actor.ledger_changed()


async def connect_queue(runtime: Runtime, spec: RunSpec, name: str) -> TransferQueue:
    """The queue, for process `name` that runs `runtime`."""
    segments, head = SegmentSource(spec.segments_socket), UnixAddress(spec.head_socket)
    return await (await QueueNode.attach(runtime, segments, head, timeout_s=START_TIMEOUT_S)).connect(name)


async def run(spec: RunSpec, name: str) -> None:
    """Serve until told to stop."""
    config = spec.config
    tokenizer = ChatTokenizer.load(config.train_actor_rollout_ref.model.path, config.data.apply_chat_template_kwargs)
    train = PromptDataset.load(config.data.train_files, config.data, tokenizer, config.data.train_max_samples)
    validation = PromptDataset.load(config.data.val_files, config.data, tokenizer, config.data.val_max_samples)
    logger.info("training data: %s", train.describe())
    logger.info("validation data: %s", validation.describe())
    state = None
    if spec.resume_from is not None:
        checkpoint = Checkpoint.open(Path(spec.resume_from))
        state = ControlState.decode(checkpoint.control_state())
        if not is_own_checkpoint(checkpoint.path, Path(spec.run_dir)):
            state = state.for_another_log()
    settings = ControlSettings.from_config(
        config,
        num_rows=len(train),
        stop_token_ids=tokenizer.eos_ids,
        epoch=spec.epoch,
        initial_version=spec.initial_version,
    )
    segments = SegmentSource(spec.segments_socket)
    weights = WeightStore.open(segments.fetch(WEIGHTS))
    routing = config.psrl.rollout_coordination.routing_strategy
    async with Runtime(name, listen=UnixAddress(spec.head_socket)) as runtime:
        queue = await (await QueueNode.host(runtime, segments)).connect(name)
        effects = HeadEffects(weights, Manifest.decode(spec.manifest).hash, queue)
        manager = runtime.spawn(
            MANAGER,
            PSManager(
                settings,
                PromptFeed(train, config.data.train_batch_size, shuffle=config.data.shuffle, seed=config.data.seed),
                effects,
                TrajectoryLog(Path(spec.run_dir)),
                state,
                validation=[validation.prompt(row, GroupId(row)) for row in range(len(validation))],
            ),
            mailbox=CONTROL_MAILBOX,
        )
        gateway_actor = RolloutGateway(
            manager,
            policy_named(routing.method),
            max_concurrent_seqs=routing.max_concurrent_seqs_per_instance,
        )
        gateway = runtime.spawn(GATEWAY, gateway_actor, mailbox=GENERATE_MAILBOX)
        coordinator = runtime.spawn(
            COORDINATOR,
            RolloutCoordinator(
                gateway,
                epoch=spec.epoch,
                check_interval_s=config.psrl.rollout_coordination.sync_and_mig_strategy.check_interval_in_ms / 1e3,
                partial_rollout=config.psrl.rollout_coordination.partial_rollout.enable,
                running=config.psrl.sync.running,
                sync_timeout_s=config.psrl.sync.timeout_s,
            ),
        )
        effects.connect(gateway, gateway_actor, coordinator)
        rewards = {worker: UnixAddress(spec.socket_of(worker)) for worker in spec.rewards}
        runtime.spawn(NODE, Node(manager, gateway, coordinator, weights, rewards))
        await raise_when_failed(runtime)
