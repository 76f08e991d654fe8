"""Sizes are enough, and said in words where they are not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl._core import QueueArena
from psrl.errors import ConfigError
from psrl.transfer.capacity import (
    MAX_CLIENTS,
    QueueLoad,
    default_extent_bytes,
    late_bytes,
    num_extents_needed,
    plan_queue,
    row_bytes,
)


def load(**changes: int) -> QueueLoad:
    values = {
        "staleness": 3,
        "prompts_per_step": 32,
        "rollout_n": 8,
        "validation_rows": 200,
        "max_prompt_length": 64,
        "max_response_length": 64,
        "num_writers": 4,
    }
    return QueueLoad(**{**values, **changes})


@given(
    staleness=st.integers(0, 8),
    prompts=st.integers(1, 512),
    n=st.integers(1, 16),
    validation=st.integers(0, 2000),
    prompt=st.integers(1, 8192),
    response=st.integers(1, 32768),
    extent_pages=st.none() | st.integers(1, 512),
)
@settings(deadline=None)
def test_plan_holds_every_row_one_record_to_an_extent(
    staleness: int, prompts: int, n: int, validation: int, prompt: int, response: int, extent_pages: int | None
) -> None:
    need = load(
        staleness=staleness,
        prompts_per_step=prompts,
        rollout_n=n,
        validation_rows=validation,
        max_prompt_length=prompt,
        max_response_length=response,
    )
    plan = plan_queue(need, extent_bytes=extent_pages and extent_pages * 4096)
    assert QueueArena.segment_bytes(plan.num_extents, plan.extent_bytes, plan.max_clients) <= plan.arena_bytes
    rows = (staleness + 1) * prompts * n + validation
    assert plan.num_extents * plan.extent_bytes >= rows * row_bytes(need) + prompts * n * late_bytes(need)
    assert plan.num_extents >= 2 * rows


def test_default_extent_is_one_largest_row() -> None:
    need = load(max_prompt_length=1024, max_response_length=4096)
    extent = default_extent_bytes(need)
    assert extent % 4096 == 0
    assert max(row_bytes(need), late_bytes(need)) <= extent < max(row_bytes(need), late_bytes(need)) + 4096


def test_a_larger_arena_is_used_whole() -> None:
    need = load()
    planned = plan_queue(need)
    larger = plan_queue(need, arena_bytes=2 * planned.arena_bytes)
    assert larger.num_extents >= 2 * planned.num_extents
    assert QueueArena.segment_bytes(larger.num_extents, larger.extent_bytes, MAX_CLIENTS) <= larger.arena_bytes


def test_too_small_an_arena_is_refused_with_both_numbers() -> None:
    need = load()
    needed = plan_queue(need).arena_bytes
    with pytest.raises(ConfigError, match=rf"arena_bytes = 1000000 is too small: .*staleness = 3 .*need {needed}"):
        plan_queue(need, arena_bytes=1_000_000)
    assert plan_queue(need, arena_bytes=needed).num_extents >= num_extents_needed(need, default_extent_bytes(need))


def test_odd_extents_and_too_many_writers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"extent_bytes = 1000 must be a positive multiple of 4096"):
        plan_queue(load(), extent_bytes=1000)
    with pytest.raises(ConfigError, match="65 processes"):
        plan_queue(load(num_writers=65))
