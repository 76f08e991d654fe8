"""`psrl-bench delta`: how small patches between versions are, and how quick, next to the entropy floor and to memory.

One thread. `floor` is H(p) + p h bits a parameter, pooled over all of the version: p the share of changed values, h the
entropy of the step in ulps. Encoding is set against reading a version's bytes once, applying (out of place into warm
memory) against memcpy of them. The base's and the result's checksums are known beforehand, as a slot's are.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from psrl._core import read_through
from psrl.bench.places import settings
from psrl.bench.record import Record
from psrl.bench.rounds import Row, gbytes_per_s, interleaved, share
from psrl.bench.versions import MODELS, Masters, flat_model
from psrl.errors import BenchError, ConfigError
from psrl.weights.delta import chunk_checksums, delta_apply, delta_encode, layout_of
from psrl.weights.manifest import Manifest

Flat = npt.NDArray[np.uint8]
MANIFEST, BASE, NEXT = "manifest.msgpack", "base.npy", "next-*.npy"
"""Of a folder with versions: the manifest, the base, and one step from it for each learning rate."""


def delta(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    record, rows = Record("delta", settings(options)), list[Row]()
    for name, manifest, base, new in _versions(options):
        rows += measure(name, manifest, base, new, options.rounds)
    return record.finish(rows)


def _versions(options: argparse.Namespace) -> Iterator[tuple[str, Manifest, Flat, Flat]]:
    if options.versions:
        yield from kept(options.versions)
        return
    manifests = [MODELS[options.model]()] if options.model else [flat_model(int(mib * 2**20)) for mib in options.mib]
    for manifest in manifests:
        for lr in options.lr:
            masters = Masters(manifest)
            base = masters.version().numpy()
            masters.step(lr)
            yield f"step at {lr:g}", manifest, base, masters.version().numpy()


def kept(folder: Path) -> Iterator[tuple[str, Manifest, Flat, Flat]]:
    """Of a training run, as bench/bench_delta.py keeps them."""
    try:
        manifest = Manifest.decode((folder / MANIFEST).read_bytes())
        base = np.load(folder / BASE)
    except OSError as error:
        raise ConfigError(f"--versions {folder}: {error.strerror}: {error.filename}") from error
    for path in sorted(folder.glob(NEXT)):
        yield f"step at {path.stem.removeprefix('next-')}", manifest, base, np.load(path)


def measure(name: str, manifest: Manifest, base: Flat, new: Flat, rounds: int) -> list[Row]:
    layout = layout_of(manifest)
    sums = [chunk_checksums(version) for version in (base, new)]
    target, other = np.zeros_like(base), np.zeros_like(base)

    def encode() -> bytes:
        return delta_encode(layout, 1, 0, 1, manifest.digest, base, sums[0], new, sums[1])

    patch = encode()
    actions: dict[str, Callable[[], object]] = {
        "read": lambda: read_through(base),
        "encode": encode,
        "memcpy": lambda: np.copyto(other, base),
        "apply": lambda: delta_apply(layout, patch, manifest.digest, base, sums[0], target),
    }
    times = interleaved(actions, rounds)
    if not np.array_equal(target, new):
        raise BenchError(f"{name}: what the patch makes is not the version")
    floor, changed, step_bits = floor_bytes(base, new)
    num_bytes = base.nbytes
    exact = {"ratio": round(floor / len(patch), 4), "spread": [round(floor / len(patch), 4)] * 2, "rounds": 1}
    common = {"size_bytes": num_bytes, "patch_bytes": len(patch)}
    rate = {action: gbytes_per_s(num_bytes, taken) for action, taken in times.items()}
    return [
        {"what": f"patch: {name}", **exact, "measure": "share of", "limit": "floor", **common}
        | {"changed": round(changed, 5), "step_bits": round(step_bits, 3), "smaller": round(num_bytes / len(patch), 1)},
        {"what": f"encode: {name}", **share(times["encode"], times["read"], "reading it once"), **common}
        | {"GBps": rate["encode"], "read_GBps": rate["read"]},
        {"what": f"apply: {name}", **share(times["apply"], times["memcpy"], "memcpy"), **common}
        | {"GBps": rate["apply"], "memcpy_GBps": rate["memcpy"]},
    ]


def floor_bytes(base: Flat, new: Flat) -> tuple[float, float, float]:
    """(bytes at the floor, share of changed values, entropy of the step in bits) of bf16 versions."""
    lines = []
    for version in (base, new):
        bits = version.view(np.int16)
        lines.append(bits ^ ((bits >> 15) & 0x7FFF))
    steps = lines[1] - lines[0]
    changed = steps[steps != 0]
    p = changed.size / steps.size
    if p == 0:
        return 0.0, 0.0, 0.0
    shares = np.unique(changed, return_counts=True)[1] / changed.size
    h = float(-(shares * np.log2(shares)).sum())
    entropy = -p * np.log2(p) - (1 - p) * np.log2(1 - p) if p < 1 else 0.0
    return steps.size * (entropy + p * h) / 8, p, h
