"""Reward settings: every name is resolved or refused."""

from typing import Any

import pytest

from psrl.config.schema import Data, OverlongBufferCfg, Reward, RewardFn, RewardKwargs, RewardManager, RewardModelSpec
from psrl.errors import ConfigError
from psrl.reward import RewardPlan
from psrl.reward.manager import Overlong
from psrl.reward.plan import Function, Source


def data(*specs: RewardModelSpec, **kwargs: Any) -> Data:
    return Data(train_files=[], val_files=[], reward_model_dicts=list(specs) or [RewardModelSpec()], **kwargs)


def manager(*functions: RewardFn, **kwargs: Any) -> RewardManager:
    return RewardManager(reward_fn=list(functions), reward_kwargs=RewardKwargs(**kwargs))


def test_defaults_use_the_built_in_rule_unshaped() -> None:
    assert RewardPlan.of(Reward(), data()).sources == (Source(None, None, 1.0),)


def test_the_reference_scripts_name_for_the_built_in_rule() -> None:
    assert RewardPlan.of(Reward(), data(RewardModelSpec(reward_fn="compute_score"))).sources[0].function is None


def test_penalty_takes_its_length_from_the_data() -> None:
    reward = Reward(managers={"dapo": manager(overlong_buffer_cfg=OverlongBufferCfg(enable=True, len=8))})
    assert RewardPlan.of(reward, data(max_response_length=28)).sources[0].overlong == Overlong(28, 8, 1.0)


def test_functions_are_found_by_name_or_as_the_only_one() -> None:
    one, two = RewardFn(path="a.py", name="one"), RewardFn(path="b.py", name="two", kwargs={"k": 1})
    only = Reward(custom_reward_function=one)
    assert RewardPlan.of(only, data()).sources[0].function == Function("a.py", "one")
    both = Reward(active_managers=["naive"], managers={"naive": manager(one, two)})
    named = RewardModelSpec(reward_loop_type="naive", reward_fn="two", reward_coef=0.5)
    assert RewardPlan.of(both, data(named)).sources == (
        Source(Function("b.py", "two", {"k": 1}, "reward.managers.naive.reward_fn"), None, 0.5),
    )


@pytest.mark.parametrize(
    ("reward", "spec", "said"),
    [
        (
            Reward(),
            RewardModelSpec(reward_loop_type="naive"),
            "reward_loop_type=naive is not among reward.active_managers",
        ),
        (Reward(active_managers=["mine"]), RewardModelSpec(reward_loop_type="mine"), "is unknown: use naive or dapo"),
        (Reward(), RewardModelSpec(reward_fn="absent"), "reward_fn=absent does not name one function"),
        (
            Reward(managers={"dapo": manager(RewardFn(path="a", name="f"), RewardFn(path="b", name="g"))}),
            RewardModelSpec(),
            "(there: f, g)",
        ),
        (
            Reward(
                managers={"dapo": manager(max_resp_len=8, overlong_buffer_cfg=OverlongBufferCfg(enable=True, len=9))}
            ),
            RewardModelSpec(),
            "len=9 must be in 1..max_resp_len=8",
        ),
    ],
)
def test_what_cannot_be_resolved_is_refused(reward: Reward, spec: RewardModelSpec, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RewardPlan.of(reward, data(spec))
    assert said in str(caught.value)
    assert "data.reward_model_dicts.0" in str(caught.value) or "managers.dapo" in str(caught.value)


def test_no_source_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward_model_dicts is empty"):
        RewardPlan.of(Reward(), Data(train_files=[], val_files=[], reward_model_dicts=[]))


def test_data_sources_need_a_rule_unless_a_function_judges() -> None:
    RewardPlan.of(Reward(), data()).check_data_sources({"openai/gsm8k", "psrl/arithmetic"})
    with pytest.raises(ConfigError, match="'my/data'"):
        RewardPlan.of(Reward(), data()).check_data_sources({"openai/gsm8k", "my/data"})
    custom = Reward(custom_reward_function=RewardFn(path="a.py", name="one"))
    RewardPlan.of(custom, data()).check_data_sources({"my/data"})


def test_metrics_are_known_unless_a_function_may_report_more() -> None:
    assert RewardPlan.of(Reward(), data()).known_metrics() == {"acc"}
    logged = Source(None, Overlong(10, 2, 1.0, log=True), 1.0)
    plain = Source(None, None, 0.5)
    assert RewardPlan((logged, plain)).known_metrics() == {"acc", "overlong_reward", "overlong", "1_acc"}
    custom = Source(Function("a.py", "one"), None, 1.0)
    assert RewardPlan((plain, custom)).known_metrics() is None
