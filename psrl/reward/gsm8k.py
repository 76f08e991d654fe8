"""GSM8K's rule: the final answer as text, equal to the truth or not. Pure.

Only the last 300 characters are searched. `strict` wants the last `#### ` followed by a number, commas and dollar signs
removed; `flexible` takes the last number anywhere, as it stands. Nothing is compared as a number: "12.0" is not "12".
"""

import re

from psrl.config.rules import GSM8K_METHODS as METHODS

_SEARCHED_CHARACTERS = 300
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[0-9.,]+)")


def extract(solution: str, method: str = "strict") -> str | None:
    """The final answer that a solution gives, or None. Raises ValueError for an unknown method."""
    tail = solution[-_SEARCHED_CHARACTERS:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return found[-1].replace(",", "").replace("$", "") if found else None
    if method == "flexible":
        found = _FLEXIBLE.findall(tail)
        usable = [text for text in found if text not in ("", ".")]
        return usable[-1] if usable else (found[0] if found else None)
    raise ValueError(f"unknown method {method!r}: use {' or '.join(METHODS)}")


def score(solution: str, ground_truth: str, method: str = "strict", format_score: float = 0.0) -> float:
    """1 if the answer equals the truth, `format_score` if there is another answer, 0 if there is none."""
    answer = extract(solution, method)
    if answer is None:
        return 0.0
    return 1.0 if answer == ground_truth else format_score
