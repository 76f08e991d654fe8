"""Sequences laid end to end, without padding. Pure.

A sequence is prompt + response. Its last token predicts nothing, so it is not fed. Every response token is a target,
predicted by the position before it.

Shapes: T fed tokens, N targets, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WASTE = 1.25  # a bucket's padded size over its real one, at most


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Sequences of similar length, gathered to [num_rows, width]: `index` [num_rows * width] into the T tokens."""

    num_rows: int
    width: int
    index: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where sequences lie among T tokens; attention needs no more.

    `offsets` [S + 1] int32 as variable-length kernels want them. `buckets` are for batched SDPA: rows padded on the
    right, which causal attention never sees; `restore` [T] picks the real positions out of all buckets' outputs
    (None: one bucket that is the packed order itself).
    """

    offsets: Tensor
    longest: int
    buckets: tuple[Bucket, ...]
    restore: Tensor | None

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | None = None) -> "Layout":
        """Lay out sequences of these lengths (each at least 1)."""
        starts = np.concatenate([[0], np.cumsum(lengths)])
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        if len(set(lengths)) == 1:
            groups = [list(range(len(lengths)))]
        else:
            groups = _groups([lengths[i] for i in order])
            groups = [[order[i] for i in group] for group in groups]
        buckets, restore, base = [], np.zeros(int(starts[-1]), dtype=np.int64), 0
        for group in groups:
            width = max(lengths[i] for i in group)
            index = np.zeros((len(group), width), dtype=np.int64)
            for row, i in enumerate(group):
                index[row] = starts[i] + np.minimum(np.arange(width), lengths[i] - 1)
                restore[starts[i] : starts[i + 1]] = base + row * width + np.arange(lengths[i])
            base += index.size
            buckets.append(Bucket(len(group), width, torch.from_numpy(index.reshape(-1)).to(device)))
        in_order = len(set(lengths)) == 1
        return Layout(
            torch.from_numpy(starts.astype(np.int32)).to(device),
            max(lengths),
            tuple(buckets),
            None if in_order else torch.from_numpy(restore).to(device),
        )


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Runs of descending lengths whose padding stays within _WASTE."""
    groups: list[list[int]] = []
    real = 0
    for i, length in enumerate(lengths):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= _WASTE * (real + length):
            groups[-1].append(i)
            real += length
        else:
            groups.append([i])
            real = length
    return groups


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One micro-batch for the model, on its device."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarting per sequence
    layout: Layout
    sources: Tensor  # [N] int64, positions among T whose hidden state predicts the targets
    targets: Tensor  # [N] int64 token ids
    sequences: Tensor  # [N] int64, 0..S-1
    mask: Tensor  # [N] float32, 1 where the target is trained
    num_sequences: int
    target_lengths: tuple[int, ...]  # targets per sequence

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


Ids = NDArray[np.int32] | Sequence[int]


def pack(
    prompts: Sequence[Ids],
    responses: Sequence[Ids],
    masks: Sequence[NDArray[np.uint8]] | None = None,
    device: torch.device | None = None,
) -> PackedBatch:
    """Pack prompts and responses (token ids) with the responses' masks (None: all 1).

    With no sequence at all the result holds one token with one target under mask 0: it costs next to nothing, gives
    zero gradients, and takes part in the collectives of a sharded model.
    """
    if not prompts:
        prompts, responses, masks = [[0]], [[0]], [np.zeros(1, dtype=np.uint8)]
    inputs, positions, sources, targets = [], [], [], []
    lengths, counts, start = [], [], 0
    for prompt, response in zip(prompts, responses, strict=True):
        ids = np.concatenate([np.asarray(prompt), np.asarray(response)]).astype(np.int64)
        num_prompt, num_response = len(prompt), len(response)
        length = max(len(ids) - 1, 1) if num_response else num_prompt
        inputs.append(ids[:length])
        positions.append(np.arange(length))
        sources.append(start + num_prompt - 1 + np.arange(num_response))
        targets.append(ids[num_prompt:])
        lengths.append(length)
        counts.append(num_response)
        start += length
    flags = np.concatenate(masks) if masks is not None else np.ones(sum(counts))

    def tensor(parts: list[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return PackedBatch(
        input_ids=tensor(inputs),
        position_ids=tensor(positions),
        layout=Layout.of(lengths, device),
        sources=tensor(sources),
        targets=tensor(targets),
        sequences=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device),
        mask=torch.from_numpy(flags.astype(np.float32)).to(device),
        num_sequences=len(counts),
        target_lengths=tuple(counts),
    )
