"""The stages of a training step on one rank. `psrl.train.fit` puts them in order.

Every stage is collective: all ranks call it with equal arguments. Rank 0 alone talks to PSManager and tells the others;
while it waits it tells them so every few seconds, so a long wait for rollouts is no hang, and a dead rank is noticed.
"""

import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch

from psrl import clock
from psrl.config.schema import Config
from psrl.control.messages import (
    AwaitValidation,
    Batch,
    Consume,
    EndOfData,
    Finish,
    GetStatus,
    NotReady,
    Publish,
    StartValidation,
    TakeSnapshot,
    ValidationDone,
)
from psrl.errors import CheckpointError, ConfigError, RunFailed
from psrl.metrics.data_metrics import throughput_metrics, timing_metrics
from psrl.metrics.flops import mfu, training_tflops
from psrl.train import checkpoint, model, stats
from psrl.train.advantages import make_estimator
from psrl.train.checkpoint_dir import Checkpoint
from psrl.train.fsdp import compute_dtype, local_weights
from psrl.train.learner import Learner, RowValues
from psrl.train.links import Head, TrainerLinks
from psrl.train.optim import learning_rate
from psrl.train.packing import Plan, balance_metrics, plan
from psrl.train.ranks import Ranks
from psrl.train.rows import Row, batch_meta, make_rows, mini_batches
from psrl.train.validation import round_metrics
from psrl.transfer import KVBatchMeta
from psrl.types import Purpose, Version

T = TypeVar("T")

_WAIT_S = 5.0  # how long PSManager holds a question before it answers NotReady
_CALL_S = 60.0  # deadline of a call that has nothing to wait for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workload:
    """The size of a batch: tokens, operations (10^12) of its updates, and balance over ranks."""

    num_prompt_tokens: int
    num_response_tokens: int
    tflops: float
    balance: dict[str, float]


class Trainer:
    """One rank's part in training: the learner, and the links to the rest of the system."""

    def __init__(self, config: Config, links: TrainerLinks, ranks: Ranks) -> None:
        self.config, self.links, self.ranks = config, links, ranks
        torch.manual_seed(config.trainer.seed + ranks.rank)
        source = config.train_actor_rollout_ref.model
        packed_lm = model.load(
            source.path, override_config=source.override_config, checkpointing=source.enable_gradient_checkpointing
        )
        self.hf_config = packed_lm.lm.config
        self.learner = Learner(packed_lm, config, ranks)
        self._estimate = make_estimator(config.algorithm)
        resumed = Checkpoint.open(links.resume_from) if links.resume_from else None
        if resumed:
            checkpoint.load(resumed, self.learner)
        self.first_step = resumed.step if resumed else 0
        self._checkpointer = checkpoint.Checkpointer(
            links.run_dir / "checkpoints",
            self.learner,
            base_model=source.path,
            run_id=resumed.manifest.run_id if resumed else uuid.uuid4().hex,
            num_kept=config.trainer.max_actor_ckpt_to_keep,
            dtype=compute_dtype(config.train_actor_rollout_ref.actor.fsdp_config, ranks.device),
        )
        self._check_coverage()
        links.weights.shard(self.learner.model.weights(), ranks.rank, ranks.world_size)
        self.seconds: dict[str, float] = {}

    # -- talking to the rest ----------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on the actor loop's clock, which all processes of a machine share."""

        async def read() -> float:
            return clock.now()

        return self.links.calls.call(read(), _CALL_S)

    def _ask(self, question: Coroutine[Any, Any, T], timeout_s: float = _CALL_S) -> T:
        return self.links.calls.call(question, timeout_s)

    def _wait(self, ask: Callable[[Head], Coroutine[Any, Any, Any]], answers: Any, what: str) -> Any:
        """Rank 0 asks until there is one of `answers`; every rank gets it. RunFailed when nothing moves."""
        started = time.perf_counter()
        while True:
            reply: Any = self._ask(ask(self.links.head), _CALL_S) if self.links.head else None
            encoded = self.ranks.broadcast(msgspec.msgpack.encode(reply) if self.links.head else None)
            answer = msgspec.msgpack.decode(encoded, type=answers | NotReady)
            if not isinstance(answer, NotReady):
                return answer
            waited = time.perf_counter() - started
            log.info("waited %.0f s for %s: %s", waited, what, answer.waiting_for)
            if self.links.head and waited > self.config.psrl.progress_timeout_s:
                self._require_progress(self.links.head, what, answer.waiting_for)

    def _require_progress(self, head: Head, what: str, waiting_for: str) -> None:
        idle = self.now() - self._ask(head.control.get_status(GetStatus())).last_progress_s
        if idle > self.config.psrl.progress_timeout_s:
            raise RunFailed(f"nothing moved for {idle:.0f} s while waiting for {what}: {waiting_for}")

    def next_batch(self, buffer: int) -> KVBatchMeta | EndOfData:
        """Which rows buffer `buffer` has, when it is ready; or that there will be none."""

        async def ask(head: Head) -> KVBatchMeta | EndOfData | NotReady:
            answer = await head.control.consume(Consume(self.links.epoch, buffer, wait_s=_WAIT_S))
            return batch_meta(answer) if isinstance(answer, Batch) else answer

        with self.timed("wait_for_gen"):
            meta: KVBatchMeta | EndOfData = self._wait(ask, KVBatchMeta | EndOfData, f"buffer {buffer}")
        return meta

    def fetch(self, meta: KVBatchMeta) -> list[Row]:
        """All rows of the batch, as views."""
        return make_rows(meta, self.links.queue.kv_batch_get_by_meta(meta) if len(meta) else [])

    # -- the stages -------------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row]) -> list[Plan]:
        """Mini-batches, each spread over ranks and micro-batches."""
        lengths = [row.num_tokens for row in rows]
        return [
            plan(numbers, lengths, self.ranks.world_size, self.learner.max_tokens)
            for numbers in mini_batches(rows, self.learner.mini_batch_groups)
        ]

    def old_log_probs(self, rows: Sequence[Row], plans: Sequence[Plan]) -> tuple[RowValues, dict[str, float]]:
        """The anchor of the ratio, for this rank's rows: recomputed and written back, or as the engine gave it."""
        mine = [number for cut in plans for number in cut.rows(self.ranks.rank)]
        if self.config.algorithm.rollout_correction.bypass_mode:
            return {number: rows[number].rollout_log_probs.copy() for number in mine}, {}
        with self.timed("old_log_prob"):
            values, entropy = self.learner.log_probs(rows, plans)
            self._write_back(rows, {number: {"old_log_probs": values[number]} for number in mine})
        return values, {"actor/entropy": entropy, **stats.agreement_metrics(rows, values, self.ranks)}

    def advantages(self, rows: Sequence[Row], plans: Sequence[Plan]) -> dict[int, float]:
        """Per sequence, by row number; written back per token for this rank's rows."""
        with self.timed("adv"):
            scores = torch.tensor([row.reward for row in rows], dtype=torch.float32)
            values = self._estimate(scores, torch.tensor([row.group for row in rows])).tolist()
            mine = [number for cut in plans for number in cut.rows(self.ranks.rank)]
            self._write_back(
                rows,
                {n: {"advantages": (rows[n].response_mask * values[n]).astype("float32")} for n in mine},
            )
        return dict(enumerate(values))

    def update(
        self,
        step: int,
        rows: Sequence[Row],
        plans: Sequence[Plan],
        old_log_probs: RowValues,
        advantages: Mapping[int, float],
    ) -> tuple[bool, dict[str, float]]:
        """All optimizer updates of step `step` (from 1); whether any was applied, and the metrics' means over them."""
        actor = self.config.train_actor_rollout_ref.actor
        rate = learning_rate(actor.optim, step - 1, self.links.total_steps)
        found: dict[str, list[float]] = {}
        num_skipped = 0
        with self.timed("update_actor"):
            for cut in [cut for _ in range(actor.ppo_epochs) for cut in plans]:
                result, metrics = self.learner.update(rows, cut, old_log_probs, advantages, rate)
                if result.skipped:
                    num_skipped += 1
                    log.warning("step %d: update skipped, non-finite gradient in %s", step, result.bad_tensor)
                    continue
                for name, value in {**metrics, "actor/grad_norm": result.grad_norm}.items():
                    found.setdefault(name, []).append(value)
        applied = len(plans) * actor.ppo_epochs - num_skipped
        means = {name: sum(values) / len(values) for name, values in found.items()}
        return applied > 0, {**means, "actor/lr": rate, "actor/updates": applied, "actor/skipped_updates": num_skipped}

    def publish(self, version: int, *, skipped: bool = False) -> None:
        """Every rank writes its shards to a free slot; PSManager's acceptance makes them version `version`."""
        with self.timed("publish"):
            epoch, weights, head = self.links.epoch, self.links.weights, self.links.head
            dtype = getattr(torch, weights.manifest.tensors[0].dtype)
            slot = weights.push(self.ranks, epoch, Version(version), local_weights(self.learner.model, dtype))
            if head:
                accepted = Publish(epoch, Version(version), slot, weights.manifest.hash, skipped=skipped)
                self._ask(head.control.publish(accepted), 2 * _CALL_S)

    def validate(self, version: int) -> dict[str, float]:
        """Metrics of the whole validation set under exactly the published `version`."""
        epoch, pinned = self.links.epoch, Version(version)
        with self.timed("testing"):
            if self.links.head:
                self._ask(self.links.head.control.start_validation(StartValidation(epoch, pinned)))
            done: ValidationDone = self._wait(
                lambda head: head.control.await_validation(AwaitValidation(epoch, pinned, wait_s=_WAIT_S)),
                ValidationDone,
                f"validation of version {version}",
            )
        return round_metrics(done)

    def save(self, step: int, *, last: bool) -> dict[str, float]:
        """A checkpoint of step `step`. A failure is logged and counted; at the last step it is raised."""
        state = b""
        with self.timed("save_checkpoint"):
            if self.links.head:
                state = self._ask(
                    self.links.head.control.take_snapshot(TakeSnapshot(self.links.epoch, Version(step)))
                ).state
            try:
                path = self._checkpointer.save(step, state)
            except CheckpointError as error:
                if last:
                    raise
                log.error("%s; the run goes on, the last good checkpoint stands", error)
                return {"checkpoint/failed": 1.0}
        log.info("saved %s", path)
        return {"checkpoint/failed": 0.0}

    def finish(self, reason: str) -> None:
        """Tell PSManager that nothing more will be trained."""
        if self.links.head:
            self._ask(self.links.head.control.finish(Finish(self.links.epoch, reason)))

    # -- numbers ----------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a stage to `seconds`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def batch_metrics(
        self, meta: KVBatchMeta, rows: Sequence[Row], advantages: Mapping[int, float]
    ) -> dict[str, float]:
        """What the batch consists of."""
        return stats.batch_metrics(
            meta,
            rows,
            advantages,
            staleness=self.config.psrl.staleness,
            max_prompt_length=self.config.data.max_prompt_length,
            max_response_length=self.config.data.max_response_length,
        )

    def workload(self, rows: Sequence[Row], plans: Sequence[Plan]) -> Workload:
        """What `work_metrics` needs to know of the rows, so that they can be let go of before the step ends."""
        lengths = [row.num_tokens for row in rows]
        shares = [[n for cut in plans for n in cut.rows(rank)] for rank in range(self.ranks.world_size)]
        num_passes = self.config.train_actor_rollout_ref.actor.ppo_epochs
        return Workload(
            num_prompt_tokens=sum(len(row.prompts) for row in rows),
            num_response_tokens=sum(len(row.responses) for row in rows),
            tflops=training_tflops(self.hf_config, lengths) * num_passes,
            balance=balance_metrics(lengths, shares),
        )

    def work_metrics(self, work: Workload) -> dict[str, float]:
        """Tokens, rates, balance and timings, from `seconds`, which starts anew."""
        seconds, self.seconds = self.seconds, {}
        num_tokens, world_size = work.num_prompt_tokens + work.num_response_tokens, self.ranks.world_size
        on_gpu = self.ranks.device.type == "cuda"
        device = torch.cuda.get_device_name(self.ranks.device) if on_gpu else "CPU"
        share = mfu(work.tflops, seconds.get("update_actor", 0.0), device, world_size)
        return {
            **timing_metrics(
                {**seconds, "gen": seconds["wait_for_gen"]}, work.num_prompt_tokens, work.num_response_tokens
            ),
            **throughput_metrics(num_tokens, seconds["step"], world_size),
            **work.balance,
            **({} if share is None else {"perf/mfu/actor": share}),
        }

    def group_metrics(self) -> dict[str, float]:
        """The conservation counters of PSManager; nothing on other ranks than 0."""
        if self.links.head is None:
            return {}
        return stats.group_metrics(self._ask(self.links.head.control.get_status(GetStatus())).counters)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand metrics to the logger."""
        if self.links.head:
            self.links.head.metrics.log(step, metrics)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _write_back(self, rows: Sequence[Row], fields: Mapping[int, Mapping[str, Any]]) -> None:
        if fields:
            keys = [rows[number].key for number in fields]
            self.links.queue.kv_batch_put(keys, Purpose.TRAIN.value, list(fields.values()))

    def _check_coverage(self) -> None:
        """The weights that are published must be exactly those that the engines expect. Raises ConfigError."""
        ours = {name: tuple(weight.shape) for name, weight in self.learner.model.weights()}
        theirs = {spec.name: spec.shape for spec in self.links.weights.manifest.tensors}
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if differing:
            shown = "; ".join(
                f"{n}: trainer {ours.get(n, 'none')}, engine {theirs.get(n, 'none')}" for n in differing[:5]
            )
            raise ConfigError(f"{len(differing)} weights differ between trainer and engines: {shown}")
