"""From what a scoring function answered to what is trained on. Pure.

The raw score is the function's; a manager shapes it. `naive` leaves it, `dapo` subtracts a penalty that grows with
the tokens beyond `max_resp_len - len`. Several sources add up, weighted, raw and shaped apart.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class BadScore(ValueError):
    """A scoring function answered something that is no score."""


class Judged(msgspec.Struct, frozen=True):
    """A function's answer: its score and the numbers that came with it (`acc` always among them)."""

    score: float
    metrics: dict[str, float]


class Overlong(msgspec.Struct, frozen=True):
    """DAPO's soft length penalty: nothing up to max_resp_len - buffer_len tokens, then linear, -factor at
    max_resp_len."""

    max_resp_len: int
    buffer_len: int
    penalty_factor: float
    log: bool = False  # also report overlong_reward and overlong as metrics

    def penalty(self, num_tokens: int) -> float:
        """At most 0; not clamped from below."""
        excess = num_tokens - (self.max_resp_len - self.buffer_len)
        return -excess / self.buffer_len * self.penalty_factor if excess > 0 else 0.0


class Shaped(msgspec.Struct, frozen=True):
    """The verdict on a sample over all its sources."""

    raw_score: float
    shaped_reward: float
    metrics: dict[str, float]


def judged(answer: Any) -> Judged:
    """Read a function's answer: a finite number, or a dict with a finite number as "score". Raises BadScore.

    Of a dict's other entries the numbers (and truth values) become metrics; text and the rest are dropped.
    """
    if isinstance(answer, Mapping):
        if "score" not in answer:
            raise BadScore(f'the answer is a dict without "score"; it has {", ".join(map(repr, answer)) or "nothing"}')
        score = _number(answer["score"], 'the answer\'s "score"')
        extra = {
            name: number
            for name, value in answer.items()
            if isinstance(name, str) and name.isprintable() and (number := _finite(value)) is not None
        }
        extra.pop("score")
        if "acc" in answer:
            extra["acc"] = _number(answer["acc"], 'the answer\'s "acc"')
    else:
        score = _number(answer, "the answer")
        extra = {}
    return Judged(score, {"acc": score, **extra})


def shape(
    answers: Sequence[Judged], penalties: Sequence[Overlong | None], coefs: Sequence[float], num_tokens: int
) -> Shaped:
    """Add up the answers of all sources for a response of `num_tokens` tokens.

    Metrics of the first source keep their names, those of source k are `k_name`; `penalties` has None for `naive`.
    """
    raw = shaped = 0.0
    metrics: dict[str, float] = {}
    for index, (answer, overlong, coef) in enumerate(zip(answers, penalties, coefs, strict=True)):
        penalty = overlong.penalty(num_tokens) if overlong is not None else 0.0
        raw += coef * answer.score
        shaped += coef * (answer.score + penalty)
        found = dict(answer.metrics)
        if overlong is not None and overlong.log:
            found |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        metrics |= {name if index == 0 else f"{index}_{name}": value for name, value in found.items()}
    return Shaped(raw, shaped, metrics)


def _number(value: Any, what: str) -> float:
    number = _finite(value)
    if number is None:
        shown = repr(value) if isinstance(value, float) else type(value).__name__
        raise BadScore(f"{what} must be a finite number, is {shown}")
    return number


def _finite(value: Any) -> float | None:
    """The value as a finite float; also what only looks like a number (numpy scalars, 0-d tensors), but no text."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
