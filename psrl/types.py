"""Values that every part shares. Plain, frozen, and free of torch."""

from enum import StrEnum
from typing import NewType

import msgspec

Version = NewType("Version", int)
"""Counts published weights. 0 is the loaded model; each publish adds one. Buffer b trains b -> b + 1."""

Epoch = NewType("Epoch", int)
"""Counts (re)starts of training within a run; messages of an older epoch are refused."""

GroupId = NewType("GroupId", int)
"""A prompt in the order in which the sampler drew it (validation counts on its own)."""


class Purpose(StrEnum):
    """What a group is generated for; also the partition of the TransferQueue that its rows go to."""

    TRAIN = "train"
    VALIDATION = "val"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TrajectoryId(msgspec.Struct, frozen=True, order=True):
    """One of the n siblings of a group. `offer` counts how often the group was handed to a worker (from 0)."""

    group: GroupId
    index: int
    offer: int = 0
    purpose: Purpose = Purpose.TRAIN

    @property
    def key(self) -> str:
        """The row's key in the TransferQueue, for example `17_3`; a second offer gives `17_3.1`."""
        return f"{self.group}_{self.index}" + (f".{self.offer}" if self.offer else "")


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn. temperature 0 is greedy; top_k -1 and top_p 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 512
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


class VersionSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """`num_tokens` consecutive response tokens that replica `replica` made under weights `version`.

    `mixed_cache`: over keys and values of older weights (a sync with `psrl.sync.running=keep`), so no other engine and
    no trainer gives the same log-probs.
    """

    version: Version
    num_tokens: int
    replica: str = ""
    mixed_cache: bool = False
