"""Golden values for scoring rules and the overlong penalty, worked out apart from the code under test.

Scores: the final answer is found by scanning characters, not by regular expressions. Penalties: exact rational
arithmetic, rounded to float64 once. Run `python tests/golden/make_reward_rules.py` to write reward_rules.json beside
this file.
"""

import json
from fractions import Fraction
from pathlib import Path

NUMBER = set("0123456789.,")

SOLUTIONS = [
    ("9+5=14\n14+3=17\n#### 17", "17"),
    ("#### 17", "17"),
    ("####17", "17"),
    ("####  17", "17"),
    ("#### 1,234", "1234"),
    ("#### -5", "-5"),
    ("#### --5", "-5"),
    ("#### 12.0", "12"),
    ("#### 5 and #### 6", "5"),
    ("#### 5 and #### 6", "6"),
    ("the answer is 137", "137"),
    ("I don't know.", "137"),
    ("", "0"),
    ("#### 7" + " " * 293, "7"),
    ("#### 7" + " " * 294, "7"),
    ("#### 7" + " " * 295, "7"),
    ("#### 7" + "x" * 400, "7"),
    ("#### 3.", "3"),
    ("it costs 1,000 dollars.", "1,000"),
    ("...", "."),
    ("\n#### 42\n", "42"),
    ("#### 四", "4"),
]

PENALTIES = [
    (max_len, buffer, factor, num_tokens, score)
    for max_len, buffer, factor in [(100, 40, 1.0), (28, 7, 0.5), (4096, 2048, 1.0), (10, 10, 2.0), (5, 1, 0.25)]
    for num_tokens in (0, 1, max_len - buffer, max_len - buffer + 1, max_len - 1, max_len, max_len + 3)
    for score in (0.0, 1.0, -1.0)
]


def runs(text: str) -> list[tuple[int, str]]:
    """Every longest run of number characters with one minus taken if it stands right before: (start, text)."""
    found, index = [], 0
    while index < len(text):
        start = index
        if text[index] == "-" and index + 1 < len(text) and text[index + 1] in NUMBER:
            index += 1
        if text[index] not in NUMBER:
            index += 1
            continue
        while index < len(text) and text[index] in NUMBER:
            index += 1
        found.append((start, text[start:index]))
    return found


def strict(solution: str) -> str | None:
    tail = solution[-300:]
    answers = [text for start, text in runs(tail) if tail[:start].endswith("#### ")]
    return answers[-1].replace(",", "") if answers else None


def flexible(solution: str) -> str | None:
    every = [text for _, text in runs(solution[-300:])]
    usable = [text for text in every if text != "."]
    return (usable or every[:1] or [None])[-1]


def main() -> None:
    scores = [
        {
            "solution": solution,
            "ground_truth": truth,
            "strict": strict(solution),
            "flexible": flexible(solution),
            "score": float(strict(solution) == truth),
        }
        for solution, truth in SOLUTIONS
    ]
    penalties = []
    for max_len, buffer, factor, num_tokens, score in PENALTIES:
        excess = max(Fraction(0), Fraction(num_tokens - (max_len - buffer)))
        penalty = -excess / buffer * Fraction(factor)
        penalties.append(
            {
                "max_resp_len": max_len,
                "len": buffer,
                "penalty_factor": factor,
                "num_tokens": num_tokens,
                "score": score,
                "penalty": float(penalty),
                "reward": float(Fraction(score) + penalty),
            }
        )
    path = Path(__file__).with_name("reward_rules.json")
    path.write_text(json.dumps({"scores": scores, "penalties": penalties}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
