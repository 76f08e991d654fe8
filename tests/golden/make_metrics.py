"""Makes metrics.json: small cases worked out in plain Python floats, apart from the code under test.

python tests/golden/make_metrics.py
"""

import json
import math
import random
from pathlib import Path

import numpy as np


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": math.fsum(values) / len(values), "max": max(values), "min": min(values)}


def data_case(seed: int) -> dict:
    source = random.Random(seed)
    rows = [
        {
            "raw": source.choice([0.0, 1.0]),
            "penalty": source.choice([0.0, -0.25]),
            "prompt": source.randint(1, 5),
            "response": source.choice([0, 1, 4, 6, 6]),
        }
        for _ in range(7)
    ]
    advantages = [source.gauss(0, 1) for _ in range(sum(row["response"] for row in rows))]
    answered = [row for row in rows if row["response"] > 0]
    expect: dict[str, float] = {}
    columns = {
        "critic/score": [row["raw"] for row in answered],
        "critic/rewards": [row["raw"] + row["penalty"] for row in answered],
        "critic/advantages": advantages,
        "response_length": [row["response"] for row in rows],
        "response_length_non_aborted": [row["response"] for row in answered],
        "prompt_length": [row["prompt"] for row in rows],
    }
    for name, values in columns.items():
        expect |= {f"{name}/{key}": float(value) for key, value in spread(values).items()}
        if "length" in name:
            longest = 5 if name.startswith("prompt") else 6
            expect[f"{name}/clip_ratio"] = sum(value == longest for value in values) / len(values)
    expect["response/aborted_ratio"] = 1 - len(answered) / len(rows)
    return {"kind": "data", "rows": rows, "advantages": advantages, "expect": expect}


def validation_case(seed: int, count: int) -> dict:
    """One source; draws are made one by one with the legacy generator, as the field's tools do."""
    source = random.Random(seed)
    samples = {f"p{prompt}": [source.choice([0.0, 0.5, 1.0]) for _ in range(count)] for prompt in range(3)}
    answers = {uid: [str(value) if value != 0.5 else "half" for value in values] for uid, values in samples.items()}
    sizes = sorted({size for size in (2, 4, 8) if size < count} | {count}) if count > 1 else []
    sums: dict[str, list[float]] = {}
    for uid, values in samples.items():
        mean = math.fsum(values) / count
        sums.setdefault(f"mean@{count}", []).append(mean)
        if count > 1:
            variance = math.fsum((value - mean) ** 2 for value in values) / count
            sums.setdefault(f"std@{count}", []).append(math.sqrt(variance))
        for size in sizes:
            for kind in ("best", "worst", "maj"):
                np.random.seed(42)
                drawn = []
                for _ in range(1000):
                    picked = [int(i) for i in np.random.choice(count, size=size, replace=True)]
                    if kind == "maj":
                        said = [answers[uid][i] for i in picked]
                        winner = max(dict.fromkeys(said), key=said.count)
                        drawn.append(values[picked[said.index(winner)]])
                    else:
                        drawn.append((max if kind == "best" else min)(values[i] for i in picked))
                mean = math.fsum(drawn) / len(drawn)
                spread_of = math.sqrt(math.fsum((value - mean) ** 2 for value in drawn) / len(drawn))
                sums.setdefault(f"{kind}@{size}/mean", []).append(mean)
                sums.setdefault(f"{kind}@{size}/std", []).append(spread_of)
    expect = {metric: math.fsum(values) / len(values) for metric, values in sums.items()}
    return {"kind": "validation", "samples": samples, "answers": answers, "expect": expect}


if __name__ == "__main__":
    cases = [data_case(seed) for seed in range(3)] + [
        validation_case(seed, count) for seed, count in enumerate((1, 3, 4))
    ]
    Path(__file__).with_name("metrics.json").write_text(json.dumps({"cases": cases}, indent=1) + "\n")
