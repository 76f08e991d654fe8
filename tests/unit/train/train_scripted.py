"""Stand-ins for the rest of the system: PSManager with scripted batches, a queue in a dict, weights kept as tensors.

They have the methods that training calls and nothing of the logic; rows depend on the buffer alone.
"""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch

from psrl.config.schema import (
    Actor,
    Algorithm,
    Config,
    Data,
    Model,
    Optim,
    RolloutCorrection,
    TrainActorRolloutRef,
    Trainer,
)
from psrl.control.messages import (
    Batch,
    BatchGroup,
    Consume,
    Counters,
    EndOfData,
    NotReady,
    Published,
    Snapshot,
    Status,
    ValidationDone,
    ValidationSample,
)
from psrl.metrics.logger import MetricLogger
from psrl.train.links import Head, TrainerLinks
from psrl.types import Epoch, GroupId, Version
from psrl.weights.manifest import Manifest

VOCABULARY = 61


class Calls:
    """An event loop on a thread, as BlockingRuntime has one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def make_fields(buffer: int, number: int) -> dict[str, np.ndarray]:
    """What the agent loop would have written for row `number` of a buffer."""
    rng = np.random.default_rng(1000 * buffer + number)
    num_prompt, num_response = int(rng.integers(2, 6)), int(rng.integers(1, 12))
    reward = np.float32(rng.integers(0, 2))
    return {
        "prompts": rng.integers(0, VOCABULARY, num_prompt).astype(np.int32),
        "responses": rng.integers(0, VOCABULARY, num_response).astype(np.int32),
        "response_mask": np.ones(num_response, np.uint8),
        "rollout_log_probs": (-3 - rng.random(num_response)).astype(np.float32),
        "rollout_versions": np.full(num_response, buffer, np.int32),
        "mixed_cache": np.zeros(num_response, np.uint8),
        "raw_score": np.asarray(reward),
        "reward": np.asarray(reward),
    }


class Queue:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, np.ndarray]] = {}

    def kv_batch_get_by_meta(self, meta):
        assert meta.partition_id == "train"
        for key in meta.keys:
            if key not in self.rows:
                group, number = map(int, key.split("_"))
                self.rows[key] = make_fields(group // 4, 4 * (group % 4) + number)
        return [{name: self.rows[key][name] for name in meta.fields} for key in meta.keys]

    def kv_batch_put(self, keys, partition_id, fields):
        for key, columns in zip(keys, fields, strict=True):
            assert not columns.keys() & self.rows[key].keys(), "fields are written once"
            self.rows[key].update(columns)


class Control:
    """Four groups of four a buffer; `empty` buffers have none, from `end` on there is no data."""

    def __init__(self, *, empty: tuple[int, ...] = (), end: int = 1000) -> None:
        self.empty, self.end = empty, end
        self.published: list[tuple[int, bool]] = []
        self.validated: list[int] = []
        self.asked = 0
        self.finished = ""

    async def consume(self, message: Consume):
        self.asked += 1
        if self.asked % 2:
            return NotReady("16 rollouts")
        assert message.buffer == self.published[-1][0]
        if message.buffer >= self.end:
            return EndOfData("the data ended")
        ids = () if message.buffer in self.empty else range(4 * message.buffer, 4 * message.buffer + 4)
        groups = tuple(
            BatchGroup(GroupId(g), tuple(f"{g}_{i}" for i in range(4)), Version(message.buffer)) for g in ids
        )
        return Batch(message.buffer, groups, (0,) * (4 * len(groups)), 1)

    async def publish(self, message):
        self.published.append((message.version, message.skipped))
        return Published(message.version)

    async def start_validation(self, message):
        assert message.version == self.published[-1][0]
        self.validated.append(message.version)

    async def await_validation(self, message):
        samples = tuple(ValidationSample(GroupId(g), 0, "words", float(g), {"acc": float(g % 2)}, 7) for g in range(4))
        return ValidationDone(message.version, samples, 0, 4)

    async def take_snapshot(self, message):
        assert message.version == self.published[-1][0]
        return Snapshot(f"control at {message.version}".encode())

    async def get_status(self, message):
        return Status(Epoch(0), Version(0), Counters(offered=1, trained=1), {}, 0.0)

    async def finish(self, message):
        self.finished = message.reason
        return Counters()


class Weights:
    def __init__(self, model: torch.nn.Module) -> None:
        named = [(name, "float32", tuple(weight.shape)) for name, weight in model.named_parameters()]
        self.manifest = Manifest.of(named)
        self.versions: dict[int, dict[str, torch.Tensor]] = {}

    def shard(self, named, rank, num_ranks):
        assert (rank, num_ranks) == (0, 1)
        assert {name for name, _ in named} == {spec.name for spec in self.manifest.tensors}

    def push(self, group, epoch, version, tensors):
        self.versions[version] = {name: tensor.clone() for name, tensor in tensors}
        return version % 3


class Metrics(MetricLogger):
    """The real one, whose lines are kept."""

    def __init__(self) -> None:
        super().__init__([])
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step, values):
        super().log(step, values)
        self.lines.append((step, values))


def make_config(model_dir: Path, *, bypass: bool = False, **trainer: Any) -> Config:
    actor = Actor(
        ppo_mini_batch_size=2,
        ppo_max_token_len_per_gpu=64,
        clip_ratio_high=0.28,
        optim=Optim(lr=1e-3, lr_warmup_steps=3),
        max_skipped_updates=3,
    )
    return Config(
        data=Data(train_files="", val_files="", max_prompt_length=8, max_response_length=12),
        train_actor_rollout_ref=TrainActorRolloutRef(model=Model(path=str(model_dir)), actor=actor),
        algorithm=Algorithm(rollout_correction=RolloutCorrection(bypass_mode=bypass)),
        trainer=Trainer(**{"val_before_train": False, **trainer}),
    )


def make_links(
    run_dir: Path, model: torch.nn.Module, total_steps: int, *, control: Control | None = None, **more: Any
) -> TrainerLinks:
    head = Head(control or Control(), Metrics())
    return TrainerLinks(Calls(), Queue(), Weights(model), head, Epoch(0), total_steps, run_dir, **more)
