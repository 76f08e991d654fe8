"""How much faster is continuous batching than transformers' own batched `generate`?

Both sides sample the same number of tokens from the same model for the same prompts, in the same process,
alternating. `generate` takes as many prompts at a time as the engine has rows, padded on the left, and ends a batch
with its longest answer.

    python bench/bench_engine.py [--requests 1024] [--rows 256] [--hidden 64] [--layers 2] [--vocabulary 115]
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from psrl.rollout.engine.base import EngineRequest
from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings
from psrl.types import SamplingParams


def build(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 32,
        intermediate_size=3 * options.hidden,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval().to(options.device, getattr(torch, options.dtype))


def workload(options: argparse.Namespace, mixed: bool) -> list[tuple[list[int], int]]:
    """(prompt, new tokens): groups of 8 with one prompt of about 19 tokens; 17 new ones, or 4 and 17 in turn."""
    rng = random.Random(0)
    made: list[tuple[list[int], int]] = []
    while len(made) < options.requests:
        prompt = [rng.randrange(options.vocabulary) for _ in range(rng.randint(15, 23))]
        made += [(prompt, rng.choice([4, 17]) if mixed else 17) for _ in range(8)]
    return made[: options.requests]


def with_engine(engine: TorchEngine, work: list[tuple[list[int], int]]) -> int:
    for index, (prompt, new) in enumerate(work):
        sampling = SamplingParams(max_new_tokens=new, seed=index)
        engine.submit(EngineRequest(str(index), np.array(prompt, np.int32), sampling))
    count = 0
    while engine.has_work():
        engine.step()
        count += sum(len(delta.token_ids) for delta in engine.drain(finished_only=True))
    return count


@torch.inference_mode()
def with_generate(model: Any, work: list[tuple[list[int], int]], rows: int) -> int:
    count = 0
    for start in range(0, len(work), rows):
        part = work[start : start + rows]
        width = max(len(prompt) for prompt, _ in part)
        padding = [width - len(prompt) for prompt, _ in part]
        ids = torch.tensor([[0] * pad + prompt for pad, (prompt, _) in zip(padding, part)], device=model.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=model.device)
        longest = max(new for _, new in part)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0)
        assert made.shape[1] == width + longest
        count += sum(new for _, new in part)
    return count


def tokens_per_s(run: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    count = run(*arguments)
    return float(count / (time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("requests", 1024), ("rows", 256), ("hidden", 64), ("layers", 2), ("vocabulary", 115)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain = build(options)
    settings = TorchEngineSettings(max_model_len=64, max_num_seqs=options.rows)
    engine = TorchEngine(build(options), settings)
    results: dict[str, Any] = {
        "question": "tokens/s of the torch engine over transformers generate",
        "settings": vars(options),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine(),
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }
    for name, mixed in (("equal lengths", False), ("mixed lengths", True)):
        work = workload(options, mixed)
        pairs = [
            (tokens_per_s(with_engine, engine, work), tokens_per_s(with_generate, plain, work, options.rows))
            for _ in range(options.rounds + 1)
        ]
        ours, theirs = (statistics.median(side) for side in zip(*pairs[1:], strict=True))  # the first warms up
        results[name] = {"engine": round(ours), "generate": round(theirs), "ratio": round(ours / theirs, 2)}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
