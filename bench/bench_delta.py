"""How near are patches to the entropy floor, and how fast are they made and applied next to memory itself?

    python bench/bench_delta.py [--rounds 7] [--warm-up 10] [--versions FOLDER] [--out FILE]     prints one JSON object

The versions are real: SmolLM2 with fp32 masters takes `warm-up` AdamW steps at 1e-5 on text of this repository, then
one more from the same state at each learning rate; all are published in bf16. They are kept in FOLDER, since making
them takes minutes. The model needs the `smollm2` extra.

One thread, interleaved rounds, medians. `floor` is H(p) + p h bits a parameter, pooled over all of the version: p the
share of changed values, h the entropy of the step in ulps; `to_floor` = floor / patch. `encode` is set against reading
a version's bytes once, `apply` (out of place into warm memory) against memcpy of them. The base's and the result's
checksums are known beforehand, as a slot's are.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrl._core import DeltaLayout, chunk_checksums, delta_apply, delta_encode, read_through
from psrl.weights.delta import layout_of
from psrl.weights.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]
RATES = ("1e-6", "1e-5", "2e-5", "4e-5")
Flat = npt.NDArray[np.uint8]


def make_versions(folder: Path, warm_up: int) -> None:
    """Writes manifest.msgpack, base.npy and next-RATE.npy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from psrl.data.models.smollm2 import smollm2
    from psrl.weights.publish import describe

    torch.manual_seed(0)
    smollm2(folder / "model", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = "\n".join(path.read_text() for path in sorted((ROOT / "psrl").rglob("*.py")))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    manifest = describe(model.state_dict(keep_vars=True).items(), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)

    def backward() -> None:
        batch = torch.stack([ids[at : at + 256] for at in torch.randint(len(ids) - 256, (4,)).tolist()])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def save(name: str) -> None:
        flat = np.zeros(manifest.total_bytes, np.uint8)
        state = model.state_dict()
        for spec in manifest.tensors:
            values = state[spec.name].to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy()
            flat[spec.offset : spec.offset + spec.nbytes] = values
        np.save(folder / name, flat)

    for _ in range(warm_up):
        backward()
        optimizer.step()
    backward()
    save("base.npy")
    masters = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    moments = {
        key: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for key, s in state["state"].items()
    }
    for rate in RATES:
        model.load_state_dict(masters)
        fresh = {key: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for key, s in moments.items()}
        optimizer.load_state_dict({"state": fresh, "param_groups": state["param_groups"]})
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.step()
        save(f"next-{rate}.npy")
    (folder / "manifest.msgpack").write_bytes(manifest.encode())


def floor_bytes(base: Flat, new: Flat) -> tuple[float, float, float]:
    """(bytes at the floor, share of changed values, entropy of the step) of bf16 versions."""
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


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(layout: DeltaLayout, manifest: Manifest, base: Flat, new: Flat, rounds: int) -> dict[str, object]:
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
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(seconds(action))
    assert np.array_equal(target, new)
    floor, p, h = floor_bytes(base, new)
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "changed": round(p, 5),
        "step_entropy_bits": round(h, 3),
        "patch_bytes": len(patch),
        "smaller": round(base.nbytes / len(patch), 1),
        "to_floor": round(floor / len(patch), 4),
        "encode_to_read": round(middle["read"] / middle["encode"], 3),
        "apply_to_memcpy": round(middle["memcpy"] / middle["apply"], 3),
        "gb_per_s": {name: round(base.nbytes / taken / 1e9, 2) for name, taken in middle.items()},
        "spread": {name: round((max(taken) - min(taken)) / middle[name], 2) for name, taken in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--versions", type=Path, default=Path(tempfile.gettempdir()) / "psrl-bench-delta")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.versions / "manifest.msgpack").exists():
        options.versions.mkdir(parents=True, exist_ok=True)
        make_versions(options.versions, options.warm_up)
    manifest = Manifest.decode((options.versions / "manifest.msgpack").read_bytes())
    layout = layout_of(manifest)
    base = np.load(options.versions / "base.npy")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    result = {
        "question": "patch size next to the entropy floor; encode next to reading, apply next to memcpy",
        "model": "SmolLM2-135M-Instruct, bf16, one AdamW step",
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "commit": commit.stdout.strip(),
        "version_bytes": manifest.total_bytes,
        "rounds": options.rounds,
        "learning_rates": {
            rate: measure(layout, manifest, base, np.load(options.versions / f"next-{rate}.npy"), options.rounds)
            for rate in RATES
        },
        "load_average": os.getloadavg()[0],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
