"""Control: every decision of PSManager, as a pure state machine.

It holds the ledger, the inventory of groups and a validation round. Methods take messages and the time, and return
replies; what has to happen elsewhere is collected in order and fetched by `take_effects()`, lines of the trajectory
log by `take_lines()`. PSManager awaits and carries out; it decides nothing.

- Reserve is the only throttle: a group is offered only while a place is free that no group on its way will need.
  Buffers from `total_steps` on do not exist, so nothing is generated that no step needs.
- Validation has its own inventory and is not in the counters.
- `failure` is set when the run cannot go on; it is raised to the trainer, and nothing is offered any more.
"""

from collections.abc import Iterable, Sequence

from psrl.control.effects import Abort, AnnounceVersion, ClearRows, Effect, LedgerChanged, PromptFeed
from psrl.control.group import Group, Phase, not_finite, without_signal
from psrl.control.inventory import Inventory
from psrl.control.messages import (
    Batch,
    BatchGroup,
    Complete,
    Completed,
    Counters,
    EndOfData,
    Fail,
    GroupOffer,
    Prompt,
    Refused,
    Reserve,
    Reserved,
    ValidationDone,
)
from psrl.control.records import Outcome, TrajectoryLine
from psrl.control.settings import ControlSettings
from psrl.control.state import ControlState
from psrl.control.validation import ValidationRound
from psrl.control.waiting import Waiting
from psrl.control.workers import Workers
from psrl.errors import ConfigError, RunFailed, StaleMessage
from psrl.staleness import Denied, IllegalMove, Ledger, Reason
from psrl.types import Epoch, GroupId, Purpose, TrajectoryId, Version


class Control:
    """Decides what is offered, admitted, kept, trained and dropped."""

    def __init__(
        self,
        settings: ControlSettings,
        feed: PromptFeed,
        validation: Sequence[Prompt] = (),
        state: ControlState | None = None,
        *,
        attempt: int = 0,
        left_behind: Counters | None = None,
    ) -> None:
        """`state` resumes; `left_behind` is what the log has of the history after it.

        Raises ConfigError when `state` is not of version `settings.initial_version`.
        """
        self.settings = settings
        self.attempt = attempt
        self.published: Version | None = None  # None until the initial weights are
        self.finished = False
        self.failure = ""  # why the run cannot go on
        self._validation_prompts = tuple(validation)
        self._round: ValidationRound | None = None
        self._results: dict[Version, ValidationDone] = {}
        self._next_val_offer = 0
        self._failed_in_a_row = 0
        self._inventory = Inventory(feed, settings.rollout_n, settings.initial_version)
        self._workers = Workers()
        self._effects: list[Effect] = []
        self._lines: list[TrajectoryLine] = []
        self._ledger = Ledger(
            settings.batch_size,
            settings.staleness,
            version=settings.initial_version,
            end=settings.total_steps,
            budget=settings.batch_size * settings.max_num_gen_batches if settings.filter_enabled else None,
        )
        if state is not None:
            if state.version != settings.initial_version:
                raise ConfigError(f"control state of version {state.version}, weights of {settings.initial_version}")
            self._inventory.restore(state)
        self._inventory.add(left_behind or Counters())

    # -- work -----------------------------------------------------------------------------------------------------

    def next_group(self, worker: str, life: int, now: float) -> GroupOffer | None:
        """The next group for this worker, or None when nothing is to be done now.

        Groups of lost workers and retries come first, then a running validation, then new prompts.
        """
        if self._workers.is_lost(worker, life):
            return None
        if self._workers.replaces(worker, life):
            self.worker_lost(worker)
        self._workers.greet(worker, life)
        if self.finished or self.failure or self.published is None:
            return None
        group = self._next_training(worker, life, now) if self._inventory.has_unfinished_offers else None
        if group is None and self._round is not None:
            group = self._round.next(worker, life, now)
        group = group or self._next_training(worker, life, now)
        return self._offer(group) if group is not None else None

    def reserve(self, message: Reserve) -> Reserved | Refused:
        """A place for one trajectory, which is about to start under `message.version`."""
        self.check_epoch(message.epoch)
        group = self._find(message.trajectory)
        if isinstance(group, str):
            return Refused(group, gone=True)
        index = message.trajectory.index
        if group.purpose is Purpose.VALIDATION:
            assert self._round is not None
            if message.version != self._round.version:
                return Refused(f"validation needs version {self._round.version}, not {message.version}")
            group.reserved[index] = message.version
            return Reserved(-1)
        if index in group.completed:
            return Refused("the trajectory is complete", gone=True)
        place = self._ledger.reserve(group.id, index, message.version)
        if isinstance(place, Denied):
            return Refused(f"{place.reason.value} ({place.detail})", gone=place.final)
        self._inventory.unplaced.discard(group.id)
        group.reserved[index] = min(message.version, group.reserved.get(index, message.version))
        return Reserved(place.buffer)

    def complete(self, message: Complete) -> Completed:
        """A trajectory's row and score are on the queue. The last sibling decides the group."""
        self.check_epoch(message.epoch)
        group = self._find(message.trajectory)
        if isinstance(group, str):
            return Completed(False, group)
        index = message.trajectory.index
        if index in group.completed:
            return Completed(True)
        if index not in group.reserved:
            raise IllegalMove(Reason.NOT_RESERVED, message.trajectory.key)
        problem = not_finite(message) or self._refuse_versions(group, message)
        if problem is not None:
            self._fail_group(group, problem)
            return Completed(False, problem)
        group.completed[index] = message
        if len(group.completed) < group.size:
            return Completed(True)
        return self._finish_group(group)

    def fail(self, message: Fail) -> None:
        """A trajectory cannot be finished: its group is offered again, or fails."""
        self.check_epoch(message.epoch)
        group = self._find(message.trajectory)
        if isinstance(group, Group) and group.phase is Phase.RUNNING:
            self._fail_group(group, message.reason)

    def worker_lost(self, worker: str) -> None:
        """Offer the groups of a dead worker again; what their siblings had done is discarded."""
        if self.finished:
            return
        self._workers.lose(worker)
        for group in self._all_groups():
            if group.worker == worker and group.phase is Phase.RUNNING:
                self._discard(group, f"worker {worker} was lost")
                self._offer_again(group)

    # -- the trainer ----------------------------------------------------------------------------------------------

    def consume(self, buffer: int) -> Batch | EndOfData | None:
        """The batch of `buffer` once it is ready; None while it is not. Asking again gives the same."""
        self.raise_failure()
        if buffer != self._ledger.version:
            raise IllegalMove(Reason.OUTSIDE_WINDOW, f"buffer {buffer} is not that of version {self._ledger.version}")
        if buffer >= self.settings.total_steps:
            return EndOfData(f"all {self.settings.total_steps} steps are done")
        if self.published is None:
            return None
        if not self._ledger.is_ready(buffer):
            end = self._out_of_data(buffer)
            if end is not None or not self._ledger.is_ready(buffer):
                return end
        groups = [self._inventory.groups[held.group] for held in self._ledger.consume(buffer)]
        return Batch(
            buffer=buffer,
            groups=tuple(BatchGroup(group.id, group.keys(), group.version()) for group in groups),
            staleness=tuple(buffer - group.version_of(i) for group in groups for i in range(group.size)),
            num_filtered=self._ledger.buffers[buffer].filtered,
        )

    def check_publish(self, version: Version) -> bool:
        """Whether `version` is still to be committed; False when it is published already. Raises when it may not be."""
        self.raise_failure()
        if version == self.published:
            return False
        if self.published is None:
            if version != self.settings.initial_version:
                raise IllegalMove(
                    Reason.VERSION_OUT_OF_ORDER, f"version {version}; the first is {self.settings.initial_version}"
                )
            return True
        self._ledger.check_publish(version)
        return True

    def publish(self, version: Version, slot: int) -> None:
        """The weights are committed. Groups of the buffer before `version` are trained, their rows may go."""
        if self.published is not None:
            advanced = self._ledger.publish(version)
            for held in advanced.trained:
                self._end(self._inventory.groups[held.group], Outcome.TRAINED, trained_at=version - 1)
            self._abort_stale(advanced.aborted, f"too old for version {version}")
        self.published = version
        self._effects.append(AnnounceVersion(version, slot))
        self._effects.append(LedgerChanged())

    def start_validation(self, version: Version) -> None:
        """Begin a round under the published version; harmless when it runs or ran already."""
        self.raise_failure()
        if version in self._results or (self._round is not None and self._round.version == version):
            return
        if version != self.published:
            raise IllegalMove(Reason.OUTSIDE_WINDOW, f"validation of version {version}, published is {self.published}")
        if self._round is not None:
            raise IllegalMove(Reason.OUTSIDE_WINDOW, f"{self._round.describe()}; version {version} must wait")
        self._round = ValidationRound(version, self._validation_prompts, self.settings.val_n, self._next_val_offer)
        self._settle_round()

    def validation_result(self, version: Version) -> ValidationDone | None:
        """The finished round; None while it runs. Raises IllegalMove when it was never started."""
        self.raise_failure()
        if version in self._results:
            return self._results[version]
        if self._round is None or self._round.version != version:
            raise IllegalMove(Reason.OUTSIDE_WINDOW, f"no validation of version {version} was started")
        return None

    def take_snapshot(self, version: Version, log_bytes: int) -> ControlState:
        """What a checkpoint of `version` needs. Only right after its publication, before the next one."""
        self.raise_failure()
        if version != self.published:
            raise IllegalMove(Reason.VERSION_OUT_OF_ORDER, f"snapshot of {version}, published is {self.published}")
        return self._inventory.snapshot(version, self.attempt, log_bytes)

    def finish(self, reason: str) -> None:
        """Offer nothing more and stop what runs. Groups that have not ended stay counted as in flight."""
        if self.finished:
            return
        self.finished = True
        for group in self._all_groups():
            if group.purpose is Purpose.TRAIN or group.phase is Phase.RUNNING:
                self._lines += group.lines(self.attempt, Outcome.IN_FLIGHT, reason=reason)
            if group.phase is Phase.RUNNING:
                self._effects.append(Abort(group.unfinished(), reason))

    def num_losses(self, worker: str) -> int:
        """How often this worker was lost; a poll that began before the last time is answered with nothing."""
        return self._workers.num_losses(worker)

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        return self._inventory.counters

    @property
    def buffers(self) -> dict[int, str]:
        """How full each buffer is, for people: id -> `READY 32/32`."""
        return {
            b: f"{buffer.status} {len(buffer.occupied)}/{buffer.needed}" for b, buffer in self._ledger.buffers.items()
        }

    def waiting_for(self, buffer: int, now: float) -> str:
        """Who the trainer waits for, in words."""
        if self.published is None:
            return f"the first weights (version {self.settings.initial_version}) have not been published"
        return Waiting(self._ledger, self._inventory, self._round).describe(buffer, now)

    def waiting_for_validation(self) -> str:
        """What a validation that is not done waits for, in words."""
        return self._round.describe() if self._round is not None else "no validation runs"

    @property
    def version(self) -> Version:
        """The newest version that may be used; before the initial Publish, the one it will bring."""
        return self._ledger.version

    def check_epoch(self, epoch: Epoch) -> None:
        """Raise StaleMessage for a message of another life of the trainer."""
        if epoch != self.settings.epoch:
            raise StaleMessage(f"message of epoch {epoch}, this is epoch {self.settings.epoch}")

    def raise_failure(self) -> None:
        if self.failure:
            raise RunFailed(self.failure)

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def take_lines(self) -> list[TrajectoryLine]:
        lines, self._lines = self._lines, []
        return lines

    def check(self) -> None:
        """Assert conservation; constant time."""
        self._inventory.check()

    def check_deeply(self) -> None:
        """Assert everything; linear in the number of groups."""
        self._inventory.check_deeply()
        self._ledger.check()
        assert len(self._inventory.unplaced) <= self._ledger.free(), "each group on its way has a place to come"
        for group_id, group in self._inventory.groups.items():
            placed = self._ledger.buffer_of(group_id) is not None
            assert (group_id in self._inventory.unplaced) == (group.phase is Phase.RUNNING and not placed)
            assert placed or group.phase is not Phase.COMPLETE

    # -- groups ---------------------------------------------------------------------------------------------------

    def _next_training(self, worker: str, life: int, now: float) -> Group | None:
        """A group to offer again, else a new prompt; None when no place is free for it."""
        if self._ledger.free() <= len(self._inventory.unplaced):
            return None
        return self._inventory.hand_out(worker, life, now)

    def _offer(self, group: Group) -> GroupOffer:
        validating = group.purpose is Purpose.VALIDATION
        return GroupOffer(
            epoch=self.settings.epoch,
            prompt=group.prompt,
            offer=group.offer,
            purpose=group.purpose,
            num_trajectories=group.size,
            sampling=self.settings.val_sampling if validating else self.settings.sampling,
            pinned_version=self._round.version if validating and self._round is not None else None,
        )

    def _all_groups(self) -> list[Group]:
        return [*self._inventory.groups.values(), *(self._round.groups.values() if self._round is not None else ())]

    def _find(self, trajectory: TrajectoryId) -> Group | str:
        """The live group of a trajectory, or why there is none."""
        if self.finished:
            return "the run is finished"
        known = self._inventory.groups
        if trajectory.purpose is Purpose.VALIDATION:
            known = self._round.groups if self._round is not None else {}
        group = known.get(trajectory.group)
        if group is None:
            return "the group has ended or was never offered"
        if trajectory.offer != group.offer or group.phase is Phase.QUEUED:
            return f"offer {trajectory.offer} was taken back"
        if not 0 <= trajectory.index < group.size:
            raise ValueError(f"{trajectory.key}: a group has siblings 0 to {group.size - 1}")
        return group

    def _refuse_versions(self, group: Group, message: Complete) -> str | None:
        """Why the versions of the tokens cannot be admitted; the ledger learns of older ones than were reserved."""
        versions = [span.version for span in message.spans]
        if not versions:
            return None
        if group.purpose is Purpose.VALIDATION:
            assert self._round is not None
            wrong = [version for version in versions if version != self._round.version]
            return f"tokens of version {wrong[0]}, validation is pinned to {self._round.version}" if wrong else None
        if max(versions) > self._ledger.version:
            raise IllegalMove(Reason.VERSION_UNPUBLISHED, f"{message.trajectory.key} has tokens of {max(versions)}")
        place = self._ledger.reserve(group.id, message.trajectory.index, min(versions))
        return f"{place.reason.value} ({place.detail})" if isinstance(place, Denied) else None

    def _finish_group(self, group: Group) -> Completed:
        """All siblings are complete: keep the group, or drop it for lack of signal."""
        if group.purpose is Purpose.VALIDATION:
            assert self._round is not None
            self._failed_in_a_row = 0
            self._round.complete(group)
            self._lines += group.lines(self.attempt, Outcome.VALIDATED)
            self._effects.append(ClearRows(group.keys(), group.purpose))
            self._settle_round()
            return Completed(True)
        try:
            filtered = without_signal(group, self.settings)
        except RunFailed as failure:
            self.failure = str(failure)
            filtered = False
        self._failed_in_a_row = 0
        if filtered:
            dropped = self._ledger.filter(group.id, group.version())
            reason = f"{self.settings.filter_metric} is the same for all siblings"
            self._end(group, Outcome.FILTERED, reason=reason)
            aborted = dropped.aborted
        else:
            group.phase = Phase.COMPLETE
            aborted = self._ledger.occupy(group.id, group.version()).aborted
        self._abort_stale(aborted, "no buffer is left for its version")
        self._effects.append(LedgerChanged())
        return Completed(not filtered, "filtered" if filtered else "")

    def _discard(self, group: Group, reason: str) -> None:
        """Stop the siblings of this offer, remove their rows and give the reservation back."""
        if group.unfinished():
            self._effects.append(Abort(group.unfinished(), reason))
        self._effects.append(ClearRows(group.keys(), group.purpose))
        if group.purpose is Purpose.TRAIN:
            self._ledger.release(group.id)
            self._effects.append(LedgerChanged())

    def _offer_again(self, group: Group) -> None:
        if group.purpose is Purpose.VALIDATION:
            assert self._round is not None
            self._round.offer_again(group)
        else:
            self._inventory.offer_again(group)

    def _fail_group(self, group: Group, reason: str) -> None:
        group.failures += 1
        self._discard(group, reason)
        if group.failures <= self.settings.failed_group_retries:
            self._offer_again(group)
            return
        if group.purpose is Purpose.VALIDATION:
            assert self._round is not None
            self._round.fail(group)
            self._lines += group.lines(self.attempt, Outcome.FAILED, reason=reason)
            self._settle_round()
        else:
            self._end(group, Outcome.FAILED, reason=reason, clear=False)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.settings.max_failed_in_a_row and not self.failure:
            self.failure = f"{self._failed_in_a_row} groups failed in a row; the last one: {reason}"

    def _abort_stale(self, groups: Iterable[GroupId], reason: str) -> None:
        """The ledger took back these reservations: nothing may be trained on them any more."""
        for group_id in groups:
            group = self._inventory.groups[group_id]
            self._effects.append(Abort(group.unfinished(), reason))
            self._end(group, Outcome.STALE_ABORTED, reason=reason)

    def _end(
        self,
        group: Group,
        outcome: Outcome,
        *,
        trained_at: int | None = None,
        reason: str | None = None,
        clear: bool = True,
    ) -> None:
        """The group reached its end: count it, log its siblings, remove its rows."""
        self._lines += group.lines(self.attempt, outcome, trained_at=trained_at, reason=reason)
        if clear:
            self._effects.append(ClearRows(group.keys(), group.purpose))
        self._inventory.end(group, outcome)

    def _settle_round(self) -> None:
        if self._round is not None and self._round.done:
            self._results = {self._round.version: self._round.result()}  # nobody asks for an older one any more
            self._next_val_offer = self._round.last_offer + 1
            self._round = None

    def _out_of_data(self, buffer: int) -> EndOfData | None:
        """The data has ended and nothing is on its way: a buffer short of rows ends the run, one that is short
        because groups were dropped is trained with what it has."""
        inventory = self._inventory
        if not inventory.dry or not inventory.idle:
            return None
        needed = (buffer + 1 - inventory.origin) * self.settings.batch_size
        if inventory.num_drawn < needed:
            return EndOfData(f"the data ended after {inventory.num_drawn} prompts; step {buffer + 1} needs {needed}")
        self._ledger.close_short(buffer)
        return None
