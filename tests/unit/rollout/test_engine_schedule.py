from hypothesis import given
from hypothesis import strategies as st

from psrl.rollout.engine.schedule import Part, plan_prefill, split_by_length


def test_what_does_not_fit_whole_goes_on_in_the_next_step() -> None:
    assert plan_prefill([5, 10, 3], 8) == [Part(0, 5), Part(1, 3)]
    assert plan_prefill([7, 3], 8) == [Part(0, 7), Part(1, 1)]
    assert plan_prefill([5], 0) == []


@given(st.lists(st.integers(1, 200), max_size=40), st.integers(1, 1000))
def test_plans_stay_in_the_budget_and_in_order(pending: list[int], budget: int) -> None:
    parts = plan_prefill(pending, budget)
    assert sum(part.num_tokens for part in parts) == min(budget, sum(pending))
    assert [part.index for part in parts] == list(range(len(parts)))
    assert all(part.num_tokens == pending[part.index] for part in parts[:-1])


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 1000))
def test_passes_hold_each_part_once_and_bound_their_padding(lengths: list[int], max_padded: int) -> None:
    parts = [Part(index, length) for index, length in enumerate(lengths)]
    passes = split_by_length(parts, max_padded)
    assert sorted(part.index for group in passes for part in group) == list(range(len(parts)))
    for group in passes:
        longest, shortest = group[0].num_tokens, group[-1].num_tokens
        assert 2 * shortest >= longest
        assert len(group) == 1 or longest * len(group) <= max_padded
