"""Exact patches between two versions of the flat layout: made, applied, and chosen where they are faster.

    layout_of(manifest)        how the bytes of a version are read as items; the C++ core (`csrc/weights/delta.h`) does
                               the coding: `delta_encode`, `delta_apply`, and block by block as chunks come
    changes, encode_changes    the same patch from tensors that were compared where they live, a GPU for instance
    faster                     the patch or all of the version: a pure choice from measured rates

A patch names its base by `version_hash(manifest, checksums)`, a hash of the content: whoever holds those bytes can
apply it, however they came, and whoever does not is refused by name (StorageError) and takes the full version.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from psrl._core import (
    WEIGHT_CHUNK_BYTES,
    DeltaLayout,
    PatchHeader,
    chunk_checksums,
    delta_apply,
    delta_apply_block,
    delta_encode,
    delta_encode_block,
    delta_encode_changes,
    version_hash,
)
from psrl.errors import StorageError
from psrl.weights.manifest import Manifest

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeltaLayout",
    "LinkRates",
    "PatchHeader",
    "block_changes",
    "changes",
    "chunk_checksums",
    "delta_apply",
    "delta_apply_block",
    "delta_encode",
    "delta_encode_block",
    "delta_encode_changes",
    "faster",
    "full_seconds",
    "layout_of",
    "patch_seconds",
    "version_hash",
]

FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Dtypes whose bits are a sign and a magnitude, so that a step counts ulps; all others are plain bytes."""


def layout_of(manifest: Manifest) -> DeltaLayout:
    """Each tensor's items, up to where the next tensor starts."""
    ends = [spec.offset for spec in manifest.tensors[1:]] + [manifest.total_bytes]
    runs: dict[int, int] = {}
    start = 0
    for spec, end in zip(manifest.tensors, ends):
        if end > start:
            runs[end] = FLOAT_BYTES.get(spec.dtype, 1)
        start = end
    return DeltaLayout(list(runs.items()) or [(manifest.total_bytes, 1)])


# --- Comparing tensors where they live -------------------------------------------------------------------------------


def changes(base: "torch.Tensor", new: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
    """(places, steps) of the items that differ: int64 and int32 [changed], on the tensors' device.

    Items are the elements of float tensors of 2 or 4 bytes, the bytes of all others; places count from the tensor's
    start, row-major. A handful of passes over the tensor; only what changed needs to go to the host.
    """
    import torch

    if base.dtype != new.dtype or base.shape != new.shape:
        raise StorageError(f"delta: {base.dtype} {tuple(base.shape)} against {new.dtype} {tuple(new.shape)}")
    words = {2: torch.int16, 4: torch.int32}
    width = FLOAT_BYTES.get(str(base.dtype).removeprefix("torch."), 1)
    before, after = (
        tensor.detach().contiguous().reshape(-1).view(words.get(width, torch.uint8)) for tensor in (base, new)
    )
    places = (before != after).nonzero().reshape(-1)
    bits = 8 * width
    lines = []
    for flat in (before, after):
        word = flat[places].to(torch.int64)
        # Sign and magnitude as one ascending line, as the core does.
        lines.append(word if width == 1 else word ^ ((word >> (bits - 1)) & ((1 << (bits - 1)) - 1)))
    half = 1 << (bits - 1)
    steps = ((lines[1] - lines[0] + half) & ((1 << bits) - 1)) - half
    return places, steps.to(torch.int32)


Places = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]


def block_changes(
    manifest: Manifest, named: Iterable[tuple[str, "torch.Tensor", "torch.Tensor"]]
) -> Callable[[int], Places]:
    """What `delta_encode_changes` takes, for each block, from `changes` of all tensors that may have changed.

    `named` has (name, places, steps), whole tensors, in any order. Bytes between tensors count as unchanged.
    """
    specs = manifest.by_name()
    found: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = []
    for name, places, steps in sorted(named, key=lambda entry: specs[entry[0]].offset):
        spec = specs[name]
        width = FLOAT_BYTES.get(spec.dtype, 1)
        offsets = places.cpu().numpy() * width
        if offsets.size and (offsets[0] < 0 or offsets[-1] > spec.nbytes - width):
            raise StorageError(f"delta: a change of {name} lies outside of its {spec.nbytes} bytes")
        found.append((offsets + spec.offset, steps.cpu().numpy()))
    all_offsets = np.concatenate([offsets for offsets, _ in found] or [np.empty(0, np.int64)])
    all_steps = np.concatenate([steps for _, steps in found] or [np.empty(0, np.int32)])

    def of_block(block: int) -> Places:
        start = block * WEIGHT_CHUNK_BYTES
        first, end = np.searchsorted(all_offsets, (start, start + WEIGHT_CHUNK_BYTES))
        return (all_offsets[first:end] - start).astype(np.uint32), all_steps[first:end]

    return of_block


# --- The choice ------------------------------------------------------------------------------------------------------


class LinkRates(msgspec.Struct, frozen=True):
    """Measured on this link and its two ends, in bytes of a version (or, for the link, on the wire) a second."""

    link_bytes_per_s: float
    encode_bytes_per_s: float
    apply_bytes_per_s: float
    copy_bytes_per_s: float
    """The receiver's rate of taking in a full version: the copy and its checksums."""


def full_seconds(full_bytes: int, rates: LinkRates) -> float:
    return _pipelined(full_bytes, full_bytes / rates.link_bytes_per_s, full_bytes / rates.copy_bytes_per_s)


def patch_seconds(full_bytes: int, patch_bytes: int, rates: LinkRates, encoded: bool = False) -> float:
    """`encoded`: the patch is there already, made for another link."""
    encode = 0.0 if encoded else full_bytes / rates.encode_bytes_per_s
    apply = full_bytes / rates.apply_bytes_per_s
    return _pipelined(full_bytes, encode, patch_bytes / rates.link_bytes_per_s, apply)


def faster(full_bytes: int, patch_bytes: int, rates: LinkRates, has_base: bool = True, encoded: bool = False) -> bool:
    """Does the patch arrive before all of the version would? Never without its base at the receiver."""
    if not has_base:
        return False
    return patch_seconds(full_bytes, patch_bytes, rates, encoded) < full_seconds(full_bytes, rates)


def _pipelined(full_bytes: int, *stages: float) -> float:
    """Chunks go through all stages one behind the other: the slowest sets the pace, the others add one chunk each."""
    num_chunks = max(1, -(-full_bytes // WEIGHT_CHUNK_BYTES))
    slowest = max(stages)
    return slowest + (sum(stages) - slowest) / num_chunks
