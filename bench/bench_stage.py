"""How long does an engine stand still for new weights, and what does getting them there cost it meanwhile?

    python bench/bench_stage.py [--device cuda|cpu] [--shapes 0.5b,3b] [--rounds 7] [--output FILE]

One process plays trainer and replica over one store, with the tensors of a Qwen2 model of the shape. Prints one JSON
object; its `shapes` hold, beside the machine's own limits measured in the same rounds:

    register_s        locking the three slots for the GPU, in pieces with and without pauses; `longest_gap_ms` is how
                      long a loop of small kernels beside it stood still at most (`alone`: with nothing beside it)
    stage_gb_s        from the slot to the staging buffer, every chunk compared with its checksum; `under_load` beside a
                      loop of kernels, which meanwhile ran at `load_share` of its rate
    limit_gb_s        one large copy of pinned memory by torch (on the CPU: of warm memory); `checksum` of one core
    apply_ms          the pause: recorded copies into the torch engine's model (`direct`; a CUDA graph where there is a
                      GPU), into an engine's that fuses its projections (`fused`, `fused_no_graph`), and one copy after
                      the other (`by_name`). `first_load_ms` is the load that is recorded, with the graph's making
    limit_ms          one copy of as many bytes on the device
    bit_equal         parameters against what was published, after every apply

On the CPU a small shape runs by the same code.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from psrl._core import Segment, WeightStore, chunk_checksums
from psrl.bench.record import commit
from psrl.rollout.engine.model_weights import ModelWeights
from psrl.types import Version
from psrl.weights.device_copies import DirectCopies, record
from psrl.weights.publish import WeightPublisher, describe
from psrl.weights.stage import Device, HostRegistration
from psrl.weights.subscribe import WeightSubscriber

SHAPES = {
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008},
}
VOCABULARY = {"small": 8000, "0.5b": 151936, "3b": 151936}


def build(shape: str, device: torch.device) -> Any:
    """A random model, in bfloat16. All of these shapes tie their embeddings and have two key heads."""
    config = Qwen2Config(vocab_size=VOCABULARY[shape], num_key_value_heads=2, tie_word_embeddings=True, **SHAPES[shape])
    with device:
        return Qwen2ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


class Load:
    """Small kernels one after the other, each waited for, as an engine that decodes a few rows does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = 1024 if device.type == "cuda" else 64
        self._a = torch.randn(size, size, device=device)
        self._ends: list[float] = []
        self._stop = threading.Event()

    def __enter__(self) -> "Load":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        time.sleep(0.2)
        self._ends.clear()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            for _ in range(8):
                self._a @ self._a
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            self._ends.append(time.perf_counter())

    def during(self, action: Callable[[], object]) -> dict[str, float]:
        """Steps a second and the longest step while `action` runs."""
        first = len(self._ends)
        start = time.perf_counter()
        action()
        elapsed = time.perf_counter() - start
        ends = [start, *self._ends[first:], time.perf_counter()]
        gaps = [b - a for a, b in itertools.pairwise(ends)]
        return {"steps_s": (len(ends) - 2) / elapsed, "longest_gap_ms": 1e3 * max(gaps), "seconds": elapsed}


def measure_registration(device: Device, segment: Segment, where: torch.device) -> dict[str, Any]:
    """Each way in turn; the last one stays for what follows."""

    def timed(pause_s: float) -> tuple[float, HostRegistration]:
        start = time.perf_counter()
        registration = HostRegistration(device, segment, pause_s)
        return time.perf_counter() - start, registration

    result: dict[str, Any] = {"bytes": segment.size}
    with Load(where) as load:
        result["alone"] = load.during(lambda: time.sleep(1.0))
        for name, pause_s in (("no_pause", 0.0), ("pause_5_ms", 0.005)):
            held: list[HostRegistration] = []
            result[name] = load.during(lambda pause_s=pause_s, held=held: held.append(timed(pause_s)[1]))
            result[name]["num_pieces"] = held[0].num_pieces
            result[name]["close_s"] = seconds(held[0].close, where)
    return result


def measure_staging(stage: Callable[[], float], num_bytes: int, where: torch.device, rounds: int) -> dict[str, Any]:
    """`stage` returns GB/s. The limits are measured between its rounds."""
    pinned = torch.zeros(min(num_bytes, 2 << 30), dtype=torch.uint8, pin_memory=where.type == "cuda")
    there = torch.zeros(pinned.shape, dtype=torch.uint8, device=where)
    sample = pinned[: 256 << 20].numpy()
    staged, copies, sums = [], [], []
    for _ in range(rounds):
        staged.append(stage())
        copies.append(pinned.nbytes / 1e9 / seconds(lambda: there.copy_(pinned), where))
        sums.append(sample.nbytes / 1e9 / seconds(lambda: chunk_checksums(sample), where))
    loaded: list[float] = []
    with Load(where) as load:
        alone = load.during(lambda: time.sleep(1.0))["steps_s"]
        beside = load.during(lambda: loaded.extend(stage() for _ in range(rounds)))["steps_s"]
    return {
        "stage_gb_s": {"registered": statistics.median(staged), "under_load": statistics.median(loaded)},
        "load_share": beside / alone,
        "limit_gb_s": {"copy": statistics.median(copies), "checksum": statistics.median(sums)},
    }


def fused_load(model: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Parameters as a fusing engine has them, and what loads `tensors` into them."""
    groups = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    moves: list[tuple[torch.Tensor, str]] = []
    parameters: dict[str, torch.Tensor] = {}
    rows: dict[str, list[str]] = {}
    for name in tensors:
        target = name
        for whole, parts in groups.items():
            for part in parts:
                target = target.replace(part, whole)
        rows.setdefault(target, []).append(name)
    order = [part for parts in groups.values() for part in parts]
    for target, names in rows.items():
        names.sort(key=lambda name: next((i for i, part in enumerate(order) if part in name), 0))
        like = tensors[names[0]]
        shape = (sum(tensors[name].shape[0] for name in names), *like.shape[1:])
        parameters[target] = torch.zeros(shape, dtype=like.dtype, device=next(model.parameters()).device)
        at = 0
        for name in names:
            moves.append((parameters[target].narrow(0, at, tensors[name].shape[0]), name))
            at += tensors[name].shape[0]

    def load() -> None:
        for into, name in moves:
            into.copy_(tensors[name])

    return parameters, load


def equal(model: Any, published: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(parameter, published[name]) for name, parameter in model.named_parameters())


def measure(shape: str, where: torch.device, rounds: int) -> dict[str, Any]:
    model = build(shape, where)
    published = {name: parameter.clone() for name, parameter in model.named_parameters()}
    manifest = describe(published.items())
    segment = Segment.create("weights", WeightStore.required_bytes(manifest.total_bytes))
    store = WeightStore.format(segment, manifest.total_bytes)
    publisher = WeightPublisher(store, manifest)
    device = Device(str(where))
    gigabytes = manifest.payload_bytes / 1e9
    version = 0

    def publish() -> None:
        nonlocal version
        version += 1
        for tensor in published.values():
            tensor.add_(torch.randn((), device=where, dtype=tensor.dtype))
        synchronize(where)
        store.commit(0, version, publisher.write(0, version, published.items()))

    result: dict[str, Any] = {"num_bytes": manifest.payload_bytes, "num_tensors": len(published)}
    subscriber = WeightSubscriber(store, manifest, "bench", device)

    def stage() -> float:
        with subscriber.pull(Version(version), 60.0) as pulled:
            return gigabytes / pulled.transfer_s

    publish()
    stage()
    unregistered = [stage() for _ in range(3)]
    result["register"] = measure_registration(device, segment, where)
    registration = HostRegistration(device, segment, pause_s=0)

    staging = measure_staging(stage, manifest.total_bytes, where, rounds)
    staging["stage_gb_s"]["unregistered"] = statistics.median(unregistered)
    result.update(staging)

    weights = ModelWeights(model)
    times: dict[str, list[float]] = {"direct": [], "by_name": [], "fused": [], "fused_no_graph": [], "limit": []}
    bit_equal = True
    with subscriber.pull(Version(version), 60.0) as pulled:
        tensors = pulled.tensors
        weights.check(tensors)
        result["first_load_ms"] = 1e3 * seconds(lambda: weights.copy(tensors), where)
        bit_equal &= equal(model, published)
        parameters, load_fused = fused_load(model, tensors)
        copies = record(load_fused, tensors.items(), parameters.items())
    assert isinstance(copies, DirectCopies), copies
    assert not weights.full_load, weights.full_load
    a = torch.empty(manifest.payload_bytes, dtype=torch.uint8, device=where)
    b = torch.zeros_like(a)
    by_name = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ways: dict[str, Callable[[], object]] = {
        "direct": lambda: (weights.check(tensors), weights.copy(tensors)),
        "fused": copies.apply,
        "fused_no_graph": copies._copy,
        "by_name": lambda: [by_name[name].copy_(tensor) for name, tensor in tensors.items()],
        "limit": lambda: a.copy_(b),
    }
    for _ in range(rounds):
        publish()
        with subscriber.pull(Version(version), 60.0):
            for name, way in ways.items():
                times[name].append(seconds(way, where))
            bit_equal &= equal(model, published)
    expected = {name: tensor.clone() for name, tensor in parameters.items()}
    with subscriber.pull(Version(version), 60.0):
        load_fused()
    bit_equal &= all(torch.equal(expected[name], tensor) for name, tensor in parameters.items())
    median_ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    result["limit_ms"] = median_ms.pop("limit")
    result["apply_ms"] = median_ms
    result["apply_graph"] = copies.is_graph
    result["num_copies"] = copies.num_copies
    result["bit_equal"] = bit_equal
    registration.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    where = torch.device("cuda:0" if options.device == "cuda" else options.device)
    shapes = (options.shapes or ("0.5b,3b" if where.type == "cuda" else "small")).split(",")
    torch.set_num_threads(min(torch.get_num_threads(), 16))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "commit": commit(),
        "rounds": options.rounds,
        "shapes": {shape: measure(shape, where, options.rounds) for shape in shapes},
    }
    result["load_average_after"] = os.getloadavg()[0]
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")
    wrong = [shape for shape, values in result["shapes"].items() if not values["bit_equal"]]
    if wrong:
        raise SystemExit(f"not bit-equal: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
