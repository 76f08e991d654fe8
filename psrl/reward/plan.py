"""Which functions judge, how their answers are shaped and weighted: the reward settings, resolved. Pure.

Every name is resolved here or refused; nothing falls back to something else.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from psrl.config.schema import Data, Reward, RewardFn, RewardManager, RewardModelSpec
from psrl.errors import ConfigError
from psrl.reward import rules
from psrl.reward.manager import Overlong

_MANAGERS = ("naive", "dapo")
_BUILT_IN_NAMES = ("default", "compute_score")  # the second is how the reference's scripts call it


class Function(msgspec.Struct, frozen=True):
    """A scoring function of the user's: a name in a Python file, and arguments to add."""

    path: str
    name: str
    kwargs: dict[str, Any] = {}
    key: str = "reward.custom_reward_function"  # that named it

    def __str__(self) -> str:
        return f"{self.key}: reward function {self.name} of {self.path}"


class Source(msgspec.Struct, frozen=True):
    """One scoring source. `function` None is the built-in rule of the row's data source."""

    function: Function | None
    overlong: Overlong | None
    coef: float
    gsm8k_method: str = "strict"  # of the built-in rule

    def __str__(self) -> str:
        return "the built-in rule" if self.function is None else str(self.function)


class RewardPlan(msgspec.Struct, frozen=True):
    """All that a reward worker needs to know."""

    sources: tuple[Source, ...]

    def __str__(self) -> str:
        """Who judges, for messages: each function with its key and file."""
        return " and ".join(dict.fromkeys(map(str, self.sources)))

    @classmethod
    def of(cls, reward: Reward, data: Data) -> "RewardPlan":
        """Resolve the settings. Raises ConfigError with everything that is wrong with them."""
        problems: list[str] = []
        sources = []
        for index, spec in enumerate(data.reward_model_dicts):
            try:
                sources.append(_source(spec, reward, data, f"data.reward_model_dicts.{index}"))
            except ConfigError as error:
                problems += error.problems
        if not sources and not problems:
            problems.append("data.reward_model_dicts is empty: nothing would judge the answers")
        if problems:
            raise ConfigError(*problems)
        return cls(tuple(sources))

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        """Raise ConfigError if a data source has to be judged by a built-in rule and there is none."""
        if self._uses_rules and (problem := rules.unknown(data_sources)):
            raise ConfigError(problem)

    def check_truth(self, data_source: str, ground_truth: Any) -> str:
        """What is wrong with a row's ground truth if a built-in rule has to judge by it; empty if nothing is."""
        return rules.unfit(data_source, ground_truth) if self._uses_rules else ""

    def known_metrics(self) -> frozenset[str] | None:
        """Metrics that come with each score. None if a function of the user's may report more."""
        if any(source.function is not None for source in self.sources):
            return None
        metrics = set()
        for index, source in enumerate(self.sources):
            logged = source.overlong is not None and source.overlong.log
            names = ("acc", "overlong_reward", "overlong") if logged else ("acc",)
            metrics |= {name if index == 0 else f"{index}_{name}" for name in names}
        return frozenset(metrics)

    @property
    def _uses_rules(self) -> bool:
        return any(source.function is None for source in self.sources)


def _source(spec: RewardModelSpec, reward: Reward, data: Data, where: str) -> Source:
    kind = spec.reward_loop_type
    if kind not in reward.active_managers:
        raise ConfigError(
            f"{where}.reward_loop_type={kind} is not among reward.active_managers={reward.active_managers}"
        )
    manager = reward.managers.get(kind)
    if manager is None or kind not in _MANAGERS:
        raise ConfigError(f"{where}.reward_loop_type={kind} is unknown: use {' or '.join(_MANAGERS)}")
    function = _function(spec.reward_fn, manager, reward.custom_reward_function, where, kind)
    overlong = _overlong(manager, data, kind) if kind == "dapo" else None
    return Source(function, overlong, spec.reward_coef, manager.reward_kwargs.gsm8k_method)


def _function(name: str, manager: RewardManager, custom: RewardFn | None, where: str, kind: str) -> Function | None:
    """The one function that `name` means: the only one given, or the one so named. None is the built-in rule."""
    listed = f"reward.managers.{kind}.reward_fn"
    given = [Function(f.path, f.name, dict(f.kwargs), listed) for f in manager.reward_fn]
    if custom is not None:
        given.append(Function(custom.path, custom.name, dict(custom.kwargs)))
    named = [function for function in given if function.name == name]
    if not named and name in _BUILT_IN_NAMES:
        if not given:
            return None
        named = given if name == "default" else []
    if len(named) == 1:
        return named[0]
    names = ", ".join(function.name for function in given) or "none"
    raise ConfigError(
        f"{where}.reward_fn={name} does not name one function of {listed} or "
        f"reward.custom_reward_function (there: {names})"
    )


def _overlong(manager: RewardManager, data: Data, kind: str) -> Overlong | None:
    kwargs = manager.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return None
    max_resp_len = data.max_response_length if kwargs.max_resp_len is None else kwargs.max_resp_len
    if not 0 < buffer.len <= max_resp_len:
        raise ConfigError(
            f"reward.managers.{kind}.reward_kwargs.overlong_buffer_cfg.len={buffer.len} must be in "
            f"1..max_resp_len={max_resp_len}"
        )
    return Overlong(max_resp_len, buffer.len, buffer.penalty_factor, buffer.log)
