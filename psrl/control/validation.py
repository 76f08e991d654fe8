"""One validation round: the whole set under one pinned version, with its own inventory. Pure."""

from collections import deque
from collections.abc import Sequence

import msgspec

from psrl.control.group import Group, Phase
from psrl.control.messages import Prompt, ValidationDone, ValidationSample
from psrl.types import GroupId, Purpose, Version


class ValidationRound:
    """Groups are offered in order, those of a lost worker first. `first_offer` keeps keys of rounds apart."""

    def __init__(self, version: Version, prompts: Sequence[Prompt], size: int, first_offer: int) -> None:
        self.version = version
        self.num_prompts = len(prompts)
        self.num_failed = 0
        self.groups = {
            prompt.group: Group(prompt, Purpose.VALIDATION, size, offer=first_offer - 1) for prompt in prompts
        }
        if len(self.groups) != len(prompts):
            raise ValueError("validation prompts must have distinct group ids")
        self.last_offer = first_offer
        self._queue = deque(self.groups)
        self._samples: list[ValidationSample] = []

    @property
    def done(self) -> bool:
        return not self.groups

    def next(self, worker: str, life: int, now: float) -> Group | None:
        """Hand the next group to a worker."""
        if not self._queue:
            return None
        group = self.groups[self._queue.popleft()]
        group.hand_out(worker, life, now)
        self.last_offer = max(self.last_offer, group.offer)
        return group

    def offer_again(self, group: Group) -> None:
        group.phase = Phase.QUEUED
        self._queue.appendleft(group.id)

    def complete(self, group: Group) -> None:
        """All siblings are done: keep their scores."""
        source = _data_source(group.prompt)
        for index, sibling in sorted(group.completed.items()):
            self._samples.append(
                ValidationSample(
                    group=group.id,
                    index=index,
                    data_source=source,
                    reward=sibling.shaped_reward,
                    metrics=sibling.metrics,
                    num_response_tokens=sibling.num_response_tokens,
                )
            )
        del self.groups[group.id]

    def fail(self, group: Group) -> None:
        self.num_failed += 1
        del self.groups[group.id]

    def result(self) -> ValidationDone:
        samples = sorted(self._samples, key=lambda sample: (sample.group, sample.index))
        return ValidationDone(self.version, tuple(samples), self.num_failed, self.num_prompts)

    def describe(self) -> str:
        """What is left, in words."""
        running = sorted(group.id for group in self.groups.values() if group.phase is Phase.RUNNING)
        return (
            f"validation at version {self.version}: {len(self.groups)} of {self.num_prompts} prompts are left, "
            f"{len(running)} being generated{_list_of(running)}, {len(self._queue)} waiting for a worker"
        )


def _list_of(groups: Sequence[GroupId], most: int = 5) -> str:
    shown = ", ".join(str(group) for group in groups[:most]) + (", ..." if len(groups) > most else "")
    return f" (groups {shown})" if groups else ""


class _Row(msgspec.Struct):
    data_source: str = ""


def _data_source(prompt: Prompt) -> str:
    return msgspec.msgpack.decode(prompt.row, type=_Row).data_source
