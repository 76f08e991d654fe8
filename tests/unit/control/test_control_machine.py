"""A whole run around Control under random faults: workers, replicas with lagging weights, a trainer, kills, resumes.

Checked after every step: conservation, the bound, synchrony at staleness 0. Checked at the end of every example, after
a fair schedule: progress (the trainer got every step or a named end), and that no prompt was lost or doubled.
"""

from dataclasses import dataclass, field
from random import Random

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psrl.control.control import Control
from psrl.control.memory import MemoryFeed, synthetic_prompt
from psrl.control.messages import Batch, Complete, EndOfData, Fail, GroupOffer, Reserve, Reserved
from psrl.control.records import Outcome, TrajectoryLine
from psrl.control.settings import ControlSettings
from psrl.control.state import ControlState
from psrl.types import Epoch, FinishReason, GroupId, Purpose, TrajectoryId, Version, VersionSpan

WORKERS = ("a", "b")
pick = st.randoms(use_true_random=False)


@dataclass
class Sibling:
    """A trajectory at a worker. `spans` grow as replicas make tokens; `replica` None: waits for a place."""

    trajectory: TrajectoryId
    worker: str
    offer: GroupOffer
    replica: int | None = None
    spans: list[VersionSpan] = field(default_factory=list)


class Run(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 3),
        batch_size=st.integers(1, 3),
        rollout_n=st.integers(1, 3),
        total_steps=st.integers(1, 4),
        spare=st.one_of(st.none(), st.integers(-2, 3)),
        max_num_gen_batches=st.integers(1, 3),
        filter_enabled=st.booleans(),
        scores=st.sampled_from(["equal", "random", "distinct"]),
        retries=st.integers(0, 1),
    )
    def begin(
        self, staleness, batch_size, rollout_n, total_steps, spare, max_num_gen_batches, filter_enabled, scores, retries
    ):
        self.settings = ControlSettings(
            total_steps=total_steps,
            batch_size=batch_size,
            rollout_n=rollout_n,
            staleness=staleness,
            filter_enabled=filter_enabled,
            max_num_gen_batches=max_num_gen_batches,
            max_failed_in_a_row=10**6,
            failed_group_retries=retries,
            val_n=2,
        )
        self.num_prompts = None if spare is None else max(0, total_steps * batch_size + spare)
        self.scores = scores
        self.life = dict.fromkeys(WORKERS, 1)
        self.lines: list[TrajectoryLine] = []
        self.batches: dict[int, Batch] = {}
        self.saved: ControlState | None = None
        self.saved_lines = 0
        self.attempt = 0
        self.polled: set[tuple[str, int]] = set()
        self.time = 0.0
        self.start(None)

    def start(self, state: ControlState | None) -> None:
        version = state.version if state is not None else Version(0)
        self.control = Control(
            msgspec.structs.replace(self.settings, initial_version=version),
            MemoryFeed(self.num_prompts),
            [synthetic_prompt(i) for i in range(2)],
            state,
            attempt=self.attempt,
        )
        self.replicas = [version, version]
        self.siblings: dict[TrajectoryId, Sibling] = {}
        self.validating: Version | None = None
        self.polled = set()
        self.control.publish(version, 0)
        self.settle()

    def settle(self) -> None:
        """Carry out the effects as the layers above would, and keep the log."""
        for effect in self.control.take_effects():
            for trajectory in getattr(effect, "trajectories", ()):
                self.siblings.pop(trajectory, None)
        self.lines += self.control.take_lines()

    # -- workers and replicas

    @rule(worker=st.sampled_from(WORKERS))
    def ask(self, worker: str) -> None:
        self.poll(worker)

    def poll(self, worker: str) -> bool:
        self.time += 1.0
        self.polled.add((worker, self.life[worker]))
        offer = self.control.next_group(worker, self.life[worker], self.time)
        self.settle()
        if offer is None:
            return False
        for index in range(offer.num_trajectories):
            trajectory = TrajectoryId(offer.prompt.group, index, offer.offer, offer.purpose)
            assert trajectory not in self.siblings
            self.siblings[trajectory] = Sibling(trajectory, worker, offer)
        return True

    def some(self, random, running: bool) -> Sibling | None:
        known = [s for s in self.siblings.values() if (s.replica is not None) == running]
        return random.choice(known) if known else None

    @rule(random=pick, replica=st.integers(0, 1), tokens=st.integers(0, 3))
    def dispatch(self, random, replica: int, tokens: int) -> None:
        sibling = self.some(random, running=False)
        if sibling is not None:
            self.dispatch_to(sibling, replica, tokens)

    def dispatch_to(self, sibling: Sibling, replica: int, tokens: int) -> bool:
        version = self.replicas[replica]
        pinned = sibling.offer.pinned_version
        if pinned is not None and pinned != version:
            return False
        answer = self.control.reserve(Reserve(Epoch(0), sibling.trajectory, version, f"r{replica}"))
        self.settle()
        if not isinstance(answer, Reserved):
            if answer.gone:
                self.siblings.pop(sibling.trajectory, None)
            return False
        sibling.replica = replica
        if tokens:
            sibling.spans.append(VersionSpan(version, tokens, f"r{replica}"))
        return True

    @rule(replica=st.integers(0, 1))
    def sync(self, replica: int) -> None:
        """Partial rollout: what runs goes on under the new weights; pinned requests hold the replica."""
        on_it = [s for s in self.siblings.values() if s.replica == replica]
        if any(s.offer.pinned_version is not None for s in on_it):
            return
        self.replicas[replica] = self.control.version
        for sibling in on_it:
            sibling.spans.append(VersionSpan(self.control.version, 1, f"r{replica}"))

    @rule(replica=st.integers(0, 1))
    def lose_replica(self, replica: int) -> None:
        """Its requests go through selection again with what was streamed; it comes back with the newest weights."""
        self.replicas[replica] = self.control.version
        for sibling in self.siblings.values():
            if sibling.replica == replica:
                sibling.replica = None

    @rule(random=pick, twice=st.booleans())
    def complete(self, random, twice: bool) -> None:
        sibling = self.some(random, running=True)
        if sibling is not None:
            self.complete_it(sibling, random, twice)

    def complete_it(self, sibling: Sibling, random, twice: bool = False) -> None:
        trajectory = sibling.trajectory
        score = {"equal": 1.0, "random": float(random.random() < 0.5), "distinct": float(trajectory.index)}[self.scores]
        message = Complete(
            epoch=Epoch(0),
            trajectory=trajectory,
            worker=sibling.worker,
            spans=tuple(sibling.spans),
            num_prompt_tokens=1,
            num_response_tokens=sum(span.num_tokens for span in sibling.spans),
            finish_reason=FinishReason.STOP,
            started_s=0.0,
            ended_s=self.time,
            num_dispatches=1,
            raw_score=score,
            shaped_reward=score,
            metrics={"acc": score},
        )
        for _ in range(1 + twice):
            self.control.complete(message)
            self.settle()
        self.siblings.pop(trajectory, None)

    @rule(random=pick)
    def fail(self, random) -> None:
        sibling = self.some(random, running=True)
        if sibling is not None:
            self.control.fail(Fail(Epoch(0), sibling.trajectory, sibling.worker, "engine error"))
            self.settle()
            self.siblings.pop(sibling.trajectory, None)

    @rule(worker=st.sampled_from(WORKERS), told=st.booleans())
    def lose_worker(self, worker: str, told: bool) -> None:
        """With `told` the launcher says so; else only the new process's first poll does."""
        if told:
            self.control.worker_lost(worker)
        self.life[worker] += 1
        for trajectory in [t for t, s in self.siblings.items() if s.worker == worker]:
            del self.siblings[trajectory]
        if told:
            self.settle()
            former = (worker, self.life[worker] - 1)
            assert former not in self.polled or self.control.next_group(*former, self.time) is None

    # -- trainer

    @rule()
    def step(self) -> None:
        self.train()

    def train(self) -> bool:
        """One step if its buffer is ready."""
        version = self.control.version
        batch = self.control.consume(version)
        if not isinstance(batch, Batch):
            return False
        assert self.control.consume(version) == batch
        assert max(batch.staleness, default=0) <= self.settings.staleness
        assert min(batch.staleness, default=0) >= 0
        assert [group.group for group in batch.groups] == sorted({group.group for group in batch.groups})
        self.batches[version] = batch
        assert self.control.check_publish(Version(version + 1))
        self.control.publish(Version(version + 1), 0)
        self.settle()
        return True

    @precondition(lambda self: self.validating is None)
    @rule()
    def validate(self) -> None:
        self.validating = self.control.version
        self.control.start_validation(self.validating)

    @rule()
    def end_validation(self) -> None:
        if self.validating is not None:
            done = self.control.validation_result(self.validating)
            if done is not None:
                assert len(done.samples) == 2 * (done.num_prompts - done.num_failed)
                self.validating = None

    @rule()
    def save(self) -> None:
        self.saved = ControlState.decode(self.control.take_snapshot(self.control.version, 0).encode())
        self.saved_lines = len(self.lines)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def kill_and_resume(self) -> None:
        self.attempt += 1
        self.lines = self.lines[: self.saved_lines]  # the rest is rolled back
        self.start(self.saved)

    # -- what must hold

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "control"):
            return
        self.control.check_deeply()
        if self.settings.staleness == 0:
            for sibling in self.siblings.values():
                if sibling.offer.purpose is Purpose.TRAIN and sibling.replica is not None:
                    assert all(span.version == self.control.version for span in sibling.spans)

    def ended(self) -> dict[GroupId, Outcome]:
        ends: dict[GroupId, Outcome] = {}
        seen = set()
        for line in self.lines:
            if line.purpose is Purpose.TRAIN:
                assert (line.group, line.index) not in seen, "a group ended twice"
                seen.add((line.group, line.index))
                ends[line.group] = line.outcome
                if line.outcome is Outcome.TRAINED:
                    assert all(0 <= line.trained_at - s.version <= self.settings.staleness for s in line.spans)
        return ends

    def teardown(self) -> None:
        """A fair schedule from here on: every replica syncs, every request completes, the trainer trains."""
        if not hasattr(self, "control"):
            return
        random = Random(0)
        for _ in range(400):
            if isinstance(end := self.control.consume(self.control.version), EndOfData):
                break
            for worker in WORKERS:
                while self.poll(worker):
                    pass
            for sibling in list(self.siblings.values()):
                if sibling.trajectory in self.siblings and (
                    sibling.replica is not None or any(self.dispatch_to(sibling, replica, 1) for replica in (0, 1))
                ):
                    self.complete_it(sibling, random)
            self.train()
            self.sync(0)
            self.sync(1)
            self.end_validation()
            if self.validating is not None and self.validating != self.control.version:
                self.replicas[0] = self.validating  # a replica stays on the pinned version until it is done
            self.holds()
        else:
            raise AssertionError(f"no progress: {self.control.waiting_for(self.control.version, self.time)}")
        self.at_the_end(end)

    def at_the_end(self, end: EndOfData) -> None:
        control, settings = self.control, self.settings
        budget = settings.batch_size * settings.max_num_gen_batches
        if control.version < settings.total_steps:
            assert self.num_prompts is not None, end
            assert self.num_prompts < settings.total_steps * settings.batch_size, end
        for version, batch in self.batches.items():
            short = len(batch.groups) < settings.batch_size
            exhausted = settings.filter_enabled and len(batch.groups) + batch.num_filtered == budget
            assert not short or exhausted or self.num_prompts is not None, (version, batch)
            assert not settings.filter_enabled or len(batch.groups) + batch.num_filtered <= budget
        counters, ends = control.counters, self.ended()
        assert counters.stale_aborted == 0
        assert counters.trained == sum(end is Outcome.TRAINED for end in ends.values())
        assert counters.filtered == sum(end is Outcome.FILTERED for end in ends.values())
        assert counters.failed == sum(end is Outcome.FAILED for end in ends.values())
        # Every prompt was drawn in order, once, and has one end or is still in flight.
        control.finish("end")
        self.settle()
        assert sorted(self.ended()) == list(range(counters.offered))
        if self.num_prompts is None:
            assert counters.in_flight == 0, "nothing is offered that no step needs"


TestRun = Run.TestCase
TestRun.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
