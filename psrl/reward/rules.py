"""The built-in scoring function of each data source. Pure. An unknown source is an error at start, never a score."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from psrl.errors import ConfigError
from psrl.reward import gsm8k
from psrl.types import FinishReason

Rule = Callable[[str, str, Mapping[str, Any], str], float]
"""(solution, ground_truth, extra_info, method of finding the final answer) -> score."""


def _gsm8k(solution: str, ground_truth: str, extra_info: Mapping[str, Any], method: str) -> float:
    return gsm8k.score(solution, ground_truth, method)


def _arithmetic(solution: str, ground_truth: str, extra_info: Mapping[str, Any], method: str) -> float:
    """As GSM8K, but an answer that was cut off counts for nothing: it has to end by itself."""
    if extra_info.get("finish_reason") != FinishReason.STOP:
        return 0.0
    return gsm8k.score(solution, ground_truth, method)


RULES: dict[str, Rule] = {
    "openai/gsm8k": _gsm8k,
    "psrl/arithmetic": _arithmetic,
    "psrl/arithmetic_val": _arithmetic,
    "psrl/arithmetic_test": _arithmetic,
}


def score(
    data_source: str, solution: str, ground_truth: Any, extra_info: Mapping[str, Any], method: str = "strict"
) -> float:
    """Judge by the rule of the data source; a whole number is as good a truth as its text.

    `method` is how the final answer is found, see `psrl.reward.gsm8k`.

    Raises ConfigError if the source has no rule, TypeError for any other kind of truth.
    """
    rule = RULES.get(data_source)
    if rule is None:
        raise ConfigError(unknown((data_source,)))
    if problem := unfit(data_source, ground_truth):
        raise TypeError(problem)
    return rule(solution, str(ground_truth), extra_info, method)


def unfit(data_source: str, ground_truth: Any) -> str:
    """What is wrong with a ground truth that the built-in rules cannot judge by; empty if nothing is."""
    if isinstance(ground_truth, str) or (isinstance(ground_truth, int) and not isinstance(ground_truth, bool)):
        return ""
    return (
        f"the built-in rule of {data_source} takes text or a whole number, not {type(ground_truth).__name__}: "
        "write it as the text of the answer, or give reward.custom_reward_function.path"
    )


def unknown(data_sources: Iterable[str]) -> str:
    """One sentence about data sources without a rule; empty if each has one."""
    missing = sorted(set(data_sources) - RULES.keys())
    if not missing:
        return ""
    names, known = ", ".join(map(repr, missing)), ", ".join(map(repr, RULES))
    return (
        f"no built-in reward for data source {names} (there are {known}): "
        "set data.data_source_name to one of these if the column is missing, or give reward.custom_reward_function.path"
    )
