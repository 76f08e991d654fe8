"""The rows of one batch as a rank sees them, and the KVBatchMeta by which rank 0 tells the others which they are.

Every rank looks at all rows (zero-copy views of shared memory) and works on its own share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psrl.control.messages import Batch
from psrl.errors import RunFailed
from psrl.transfer import KVBatchMeta
from psrl.types import Purpose

FIELDS = (
    "prompts",
    "responses",
    "response_mask",
    "rollout_log_probs",
    "rollout_versions",
    "mixed_cache",
    "raw_score",
    "reward",
)
"""What agent loops write: int32 [P]; int32, uint8, float32, int32, uint8 [T]; float32 [] twice."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory. Arrays are read-only views; T is the number of response tokens."""

    key: str
    group: int
    staleness: int  # buffer - V_traj
    prompts: NDArray[np.int32]  # [P]
    responses: NDArray[np.int32]  # [T]
    response_mask: NDArray[np.uint8]  # [T]
    rollout_log_probs: NDArray[np.float32]  # [T]
    rollout_versions: NDArray[np.int32]  # [T]
    mixed_cache: NDArray[np.uint8]  # [T]; 1: made over keys and values of older weights
    raw_score: float
    reward: float  # shaped

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) + len(self.responses)

    @property
    def num_trained(self) -> int:
        return int(self.response_mask.sum())


def batch_meta(batch: Batch) -> KVBatchMeta:
    """PSManager's answer as it travels: tags have each row's group and staleness, extra_info what is of the batch."""
    places = [(int(group.group), key) for group in batch.groups for key in group.keys]
    return KVBatchMeta(
        keys=[key for _, key in places],
        tags=[{"group": group, "staleness": age} for (group, _), age in zip(places, batch.staleness, strict=True)],
        partition_id=Purpose.TRAIN.value,
        fields=list(FIELDS),
        extra_info={"num_groups": len(batch.groups), "num_filtered": batch.num_filtered},
    )


def make_rows(meta: KVBatchMeta, fields: Sequence[Mapping[str, NDArray[Any]]]) -> list[Row]:
    """Rows in the batch's order. Raises RunFailed, naming the row, if lengths disagree or there is no prompt."""
    rows = []
    for key, tag, columns in zip(meta.keys, meta.tags, fields, strict=True):
        row = Row(
            key=key,
            group=tag["group"],
            staleness=tag["staleness"],
            raw_score=float(columns["raw_score"]),
            reward=float(columns["reward"]),
            **{name: columns[name] for name in FIELDS if name not in ("raw_score", "reward")},
        )
        lengths = {
            name: len(getattr(row, name))
            for name in ("responses", "response_mask", "rollout_log_probs", "rollout_versions", "mixed_cache")
        }
        if len(set(lengths.values())) != 1 or not len(row.prompts):
            raise RunFailed(f"row {key} is malformed: {len(row.prompts)} prompt tokens, {lengths}")
        rows.append(row)
    return rows


def mini_batches(rows: Sequence[Row], num_groups: int) -> list[list[int]]:
    """Row numbers of consecutive mini-batches of `num_groups` groups each; the last one may be smaller."""
    order: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        order.setdefault(row.group, []).append(number)
    groups = list(order.values())
    return [
        [number for group in groups[start : start + num_groups] for number in group]
        for start in range(0, len(groups), num_groups)
    ]
