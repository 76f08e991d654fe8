"""Patches from Python: real slots, tensors compared where they live, the choice, and a process killed in mid-apply."""

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from psrl._core import WEIGHT_CHUNK_BYTES, Segment, WeightStore
from psrl.errors import ChecksumMismatch, StorageError
from psrl.weights.delta import (
    LinkRates,
    PatchHeader,
    block_changes,
    changes,
    chunk_checksums,
    delta_apply,
    delta_apply_block,
    delta_encode,
    delta_encode_block,
    delta_encode_changes,
    faster,
    full_seconds,
    layout_of,
    patch_seconds,
    version_hash,
)
from psrl.weights.manifest import Manifest

MANIFEST = Manifest.of(
    [
        ("a.norm", "float32", (33,)),
        ("b.weight", "bfloat16", (1500, 1500)),
        ("c.count", "int64", ()),
        ("d.empty", "bfloat16", (0,)),
        ("e.weight", "float16", (7, 5)),
        ("f.scale", "float8_e4m3fn", (130,)),
    ]
)
Tensors = dict[str, torch.Tensor]


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made: Tensors = {}
    for spec in MANIFEST.tensors:
        values = torch.randn(spec.shape, generator=generator) * 0.1
        made[spec.name] = (values * 1000 if "count" in spec.name else values).to(getattr(torch, spec.dtype))
    return made


def trained(before: Tensors, seed: int, step: float = 1e-4) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    after = {name: value.clone() for name, value in before.items()}
    for value in after.values():
        if value.dtype.itemsize > 1 and value.is_floating_point():
            moved = value.float() + step * torch.randn(value.shape, generator=generator)
            value.copy_(moved.to(value.dtype))
        elif value.numel():
            value.reshape(-1).view(torch.uint8)[0] += 3
    return after


def flat(named: Tensors) -> np.ndarray:
    data = np.zeros(MANIFEST.total_bytes, np.uint8)
    for spec in MANIFEST.tensors:
        if spec.nbytes:
            data[spec.offset : spec.offset + spec.nbytes] = named[spec.name].reshape(-1).view(torch.uint8).numpy()
    return data


def patch_between(base: np.ndarray, new: np.ndarray, num_threads: int = 1) -> bytes:
    layout = layout_of(MANIFEST)
    sums, new_sums = chunk_checksums(base), chunk_checksums(new)
    return delta_encode(layout, 3, 8, 9, MANIFEST.digest, base, sums, new, new_sums, num_threads)


def apply(patch: bytes, base: np.ndarray) -> np.ndarray:
    out = np.full_like(base, 0xEE)
    sums = delta_apply(layout_of(MANIFEST), patch, MANIFEST.digest, base, chunk_checksums(base), out)
    assert sums == chunk_checksums(out)
    return out


def test_patch_makes_the_next_version_bit_for_bit() -> None:
    before = tensors(0)
    base, new = flat(before), flat(trained(before, 1))
    patch = patch_between(base, new)
    assert patch == patch_between(base, new, num_threads=3)
    assert len(patch) < base.nbytes / 10
    for _ in range(2):
        assert np.array_equal(apply(patch, base), new)
    header = PatchHeader.read(patch)
    assert (header.epoch, header.base_version, header.version) == (3, 8, 9)
    assert header.manifest_hash == MANIFEST.digest
    assert header.result_hash == version_hash(MANIFEST.digest, chunk_checksums(new))


def test_patches_form_a_chain_and_refuse_other_bases_by_name() -> None:
    before = tensors(0)
    versions = [before]
    for seed in range(1, 4):
        versions.append(trained(versions[-1], seed))
    flats = [flat(version) for version in versions]
    patches = [patch_between(base, new) for base, new in itertools.pairwise(flats)]
    at = flats[0]
    for patch in patches:
        at = apply(patch, at)
    assert np.array_equal(at, flats[-1])
    with pytest.raises(StorageError, match="from version 8 to 9 starts from"):
        apply(patches[1], flats[0])
    damaged = bytearray(patches[0])
    damaged[len(damaged) // 2] ^= 4
    with pytest.raises(StorageError):
        apply(bytes(damaged), flats[0])
    rotten = flats[0].copy()
    rotten[5000] ^= 1
    out = np.empty_like(rotten)
    with pytest.raises(ChecksumMismatch, match="the base is not what its checksum says"):
        delta_apply(layout_of(MANIFEST), patches[0], MANIFEST.digest, rotten, chunk_checksums(flats[0]), out)


def test_checksums_are_those_of_the_slots(make_store: Callable[[int], tuple[WeightStore, Segment]]) -> None:
    store, _ = make_store(MANIFEST.total_bytes)
    data = flat(tensors(0))
    ticket = store.begin(1, 0, MANIFEST.digest)
    store.put(ticket, 0, data)
    store.seal(ticket, data.nbytes)
    assert store.checksums(ticket.slot) == chunk_checksums(data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_changes_of_equal_tensors_are_none(dtype: torch.dtype) -> None:
    value = torch.ones(3, 4, dtype=dtype)
    places, steps = changes(value, value.clone())
    assert places.numel() == steps.numel() == 0


def test_steps_count_representable_values_through_zero() -> None:
    tiny = torch.tensor([0x0001, 0x0000, -0x8000, 0x7F80], dtype=torch.int16).view(torch.bfloat16)
    other = torch.tensor([-0x7FFF, -0x8000, 0x0000, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
    places, steps = changes(tiny, other)
    assert places.tolist() == [0, 1, 2, 3]
    assert steps.tolist() == [-3, -1, 1, 1]
    with pytest.raises(StorageError, match="against"):
        changes(tiny, tiny.float())


@pytest.mark.parametrize("step", [1e-4, 10.0])
def test_patch_from_compared_tensors_has_the_same_bytes(step: float) -> None:
    before = tensors(0)
    after = trained(before, 1, step)
    base, new = flat(before), flat(after)
    layout = layout_of(MANIFEST)
    sums, new_sums = chunk_checksums(base), chunk_checksums(new)
    compared = [(name, *changes(before[name], after[name])) for name in reversed(before)]
    of_block = block_changes(MANIFEST, compared)
    made = np.zeros_like(base)
    assert layout.num_blocks == 2
    for block in range(layout.num_blocks):
        part = slice(block * WEIGHT_CHUNK_BYTES, (block + 1) * WEIGHT_CHUNK_BYTES)
        coded = delta_encode_changes(layout, block, *of_block(block), base[part], sums[block], made[part])
        assert coded == delta_encode_block(layout, block, base[part], sums[block], new[part], new_sums[block])
        out = np.empty_like(base[part])
        assert delta_apply_block(layout, coded, base[part], sums[block], out) == new_sums[block]
        assert np.array_equal(out, new[part])
    assert np.array_equal(made, new)


def test_changes_outside_of_their_tensor_are_refused() -> None:
    with pytest.raises(StorageError, match=r"e\.weight lies outside"):
        block_changes(MANIFEST, [("e.weight", torch.tensor([35]), torch.tensor([1], dtype=torch.int32))])


GB = 10**9


@pytest.mark.parametrize(
    ("link", "patch", "has_base", "encoded", "wanted"),
    [
        (GB / 8, GB // 50, True, False, True),  # 1 Gbit/s
        (3 * GB, GB // 50, True, False, True),  # 24 Gbit/s: encoding is a little faster
        (12 * GB, GB // 50, True, False, False),  # 100 Gbit/s: encoding and applying are what takes time
        (12 * GB, GB // 50, True, True, False),  # so is applying alone
        (4.1 * GB, GB // 50, True, False, False),
        (4.1 * GB, GB // 50, True, True, True),  # the patch is there, from another link
        (GB / 8, GB // 50, False, False, False),  # nothing to apply it to
        (GB / 8, GB + 100, True, False, False),  # all changed
    ],
)
def test_the_faster_way_is_chosen(link: float, patch: int, has_base: bool, encoded: bool, wanted: bool) -> None:
    rates = LinkRates(
        link_bytes_per_s=link, encode_bytes_per_s=4 * GB, apply_bytes_per_s=5 * GB, copy_bytes_per_s=8 * GB
    )
    assert faster(GB, patch, rates, has_base=has_base, encoded=encoded) is wanted


def test_times_are_those_of_the_slowest_stage_and_a_chunk_of_the_others() -> None:
    rates = LinkRates(link_bytes_per_s=1e9, encode_bytes_per_s=4e9, apply_bytes_per_s=4e9, copy_bytes_per_s=8e9)
    full = 100 * WEIGHT_CHUNK_BYTES
    assert full_seconds(full, rates) == pytest.approx(full / 1e9 * (1 + 1 / 8 / 100))
    assert patch_seconds(full, full // 100, rates) == pytest.approx(full / 1e9 * (1 / 4 + (1 / 4 + 1 / 100) / 100))


CHILD = """
import sys, numpy as np
from psrl._core import Segment
from psrl.weights.delta import chunk_checksums, delta_apply, layout_of
from psrl.weights.manifest import Manifest
fd, patch_path, manifest_path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
manifest = Manifest.decode(open(manifest_path, "rb").read())
patch = open(patch_path, "rb").read()
segment = Segment.attach(fd)
total = manifest.total_bytes
base, out = segment.view(0, total), segment.view(total, total, writable=True)
sums = chunk_checksums(base)
print("ready", flush=True)
while True:
    delta_apply(layout_of(manifest), patch, manifest.digest, base, sums, out)
"""


def test_a_process_killed_while_applying_leaves_the_base_and_the_work_can_be_repeated(tmp_path) -> None:
    before = tensors(0)
    base, new = flat(before), flat(trained(before, 1))
    patch = patch_between(base, new)
    (tmp_path / "patch").write_bytes(patch)
    (tmp_path / "manifest").write_bytes(MANIFEST.encode())
    segment = Segment.create("two versions", 2 * MANIFEST.total_bytes)
    segment.view(0, MANIFEST.total_bytes, writable=True)[:] = base
    for delay_s in (0.0, 0.002, 0.005):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(segment.fd), str(tmp_path / "patch"), str(tmp_path / "manifest")],
            pass_fds=[segment.fd],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        child.stdout.close()
        left = segment.view(0, MANIFEST.total_bytes)
        assert np.array_equal(left, base)
        out = segment.view(MANIFEST.total_bytes, MANIFEST.total_bytes, writable=True)
        delta_apply(layout_of(MANIFEST), patch, MANIFEST.digest, left, chunk_checksums(left), out)
        assert np.array_equal(out, new)
