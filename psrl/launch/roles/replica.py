"""A replica: one engine behind its gRPC server, fed with weights from shared memory."""

import asyncio
import os
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from psrl.actor import Runtime, UnixAddress
from psrl.launch.roles import head
from psrl.launch.roles.failure import raise_when_failed
from psrl.launch.spec import RunSpec
from psrl.rollout.coordinator import RolloutCoordinator
from psrl.rollout.engine.base import EngineLoad
from psrl.rollout.messages import RegisterReplica
from psrl.rollout.replica import ReplicaSettings, serve_replica
from psrl.transfer.segments import WEIGHTS, SegmentSource
from psrl.types import Epoch, Version
from psrl.weights.manifest import Manifest
from psrl.weights.stage import Device, HostRegistration
from psrl.weights.store import WeightStore
from psrl.weights.subscribe import Pulled, WeightSubscriber


class StoreSource:
    """The node's weight slots as an engine's source, for the epoch of this run or a later one."""

    def __init__(self, spec: RunSpec, name: str) -> None:
        segment = SegmentSource(spec.segments_socket).fetch(WEIGHTS)
        device = Device(spec.device)
        self._registration = HostRegistration(device, segment, pause_s=0)  # nothing is served yet: nothing to stall
        self._subscriber = WeightSubscriber(WeightStore.open(segment), Manifest.decode(spec.manifest), name, device)
        self._epoch = spec.epoch

    def pull(self, min_version: Version, timeout_s: float, *, min_epoch: Epoch) -> AbstractContextManager[Pulled]:
        return self._subscriber.pull(min_version, timeout_s, min_epoch=Epoch(max(min_epoch, self._epoch)))

    def cancel(self) -> None:
        self._subscriber.cancel()


async def run(spec: RunSpec, name: str) -> None:
    """Load the model, register with the coordinator, serve until told to stop."""
    config = spec.config
    rollout = config.gen_actor_rollout_ref.rollout
    deployment = config.psrl.deployment
    model = config.train_actor_rollout_ref.model
    index = spec.replicas.index(name)
    torch.set_num_threads(deployment.threads_per_process)
    source = await asyncio.to_thread(StoreSource, spec, name)
    settings = ReplicaSettings(
        name=name,
        model_path=model.path,
        override_config=model.override_config,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        dtype=rollout.dtype,
        device=spec.device,
        port=deployment.rollout_port + index if deployment.rollout_port else 0,
        # Of this process alone: a replica that is started again has another address.
        socket_path="" if deployment.rollout_port else str(Path(spec.socket_dir) / f"{name}-{os.getpid()}.sock"),
        epoch=spec.epoch,
        min_version=spec.initial_version,
        pull_timeout_s=head.START_TIMEOUT_S,  # the first weights come when the trainer has loaded its model
    )
    async with Runtime(name) as runtime:
        coordinator = await runtime.connect(
            RolloutCoordinator, head.COORDINATOR, UnixAddress(spec.head_socket), timeout_s=head.START_TIMEOUT_S
        )

        async def register(address: str, load: EngineLoad) -> None:
            await coordinator.register_replica(
                RegisterReplica(spec.epoch, name, address, load.version, rollout.max_num_seqs)
            )

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_replica(settings, source, register))
            tasks.create_task(raise_when_failed(runtime))
