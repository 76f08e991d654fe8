"""The order of draws: whole epochs, and the same rows after a resume."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.config.schema import Data
from psrl.data import ChatTokenizer, Order, Position, PromptDataset, PromptFeed, Sampler
from psrl.errors import ConfigError, DataError

orders = st.builds(
    Order, num_rows=st.integers(1, 40), batch_size=st.integers(1, 12), shuffle=st.booleans(), seed=st.integers(0, 5)
).filter(lambda order: order.draws_per_epoch > 0)


def draw(sampler: Sampler, count: int) -> list[int | None]:
    return [sampler.next() for _ in range(count)]


@settings(deadline=None)
@given(orders, st.integers(1, 3))
def test_an_epoch_draws_each_row_at_most_once_in_whole_batches(order: Order, num_epochs: int) -> None:
    sampler = Sampler(order, num_epochs)
    assert sampler.steps_per_epoch * order.batch_size == order.draws_per_epoch
    for _ in range(num_epochs):
        rows = draw(sampler, order.draws_per_epoch)
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(order.num_rows))
        if not order.shuffle:
            assert rows == sorted(rows)
    assert draw(sampler, 2) == [None, None]


@settings(deadline=None)
@given(orders, st.integers(0, 100), st.integers(1, 50))
def test_a_resumed_sampler_goes_on_as_the_uninterrupted_one(order: Order, before: int, after: int) -> None:
    whole = Sampler(order)
    expected = draw(whole, before + after)
    first = Sampler(order)
    draw(first, before)
    saved = msgspec.msgpack.encode(first.position)
    second = Sampler(order)
    draw(second, 3)  # wherever it was
    second.restore(msgspec.msgpack.decode(saved, type=Position))
    assert second.num_drawn == before
    assert draw(second, after) == expected[before:]
    assert second.position == whole.position


def test_shuffled_epochs_differ_and_repeat_by_seed() -> None:
    order = Order(100, 10, True, 1)
    sampler, same = Sampler(order), Sampler(order)
    one, two = draw(sampler, 100), draw(sampler, 100)
    assert one != two
    assert sorted(row for row in one if row is not None) == list(range(100))
    assert draw(same, 200) == one + two
    assert draw(Sampler(msgspec.structs.replace(order, seed=2)), 100) != one


def test_another_order_is_refused_with_what_differs() -> None:
    position = Sampler(Order(100, 10, True, 1, "aa")).position
    with pytest.raises(ConfigError) as caught:
        Sampler(Order(90, 10, True, 2, "aa")).restore(position)
    assert "num_rows was 100, is 90; seed was 1, is 2" in str(caught.value)
    with pytest.raises(ConfigError, match="damaged: epoch 0, index 100"):
        Sampler(position.order).restore(msgspec.structs.replace(position, index=100))


def test_a_batch_that_never_fills_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows do not fill one batch of 4"):
        Sampler(Order(3, 4, False, 0))


def feed_of(tmp_path: Path, tokenizer: ChatTokenizer, make_row: Callable[..., Any], **kwargs: Any) -> PromptFeed:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(make_row(str(number))) for number in range(11)))
    dataset = PromptDataset.load(str(path), Data(train_files=[], val_files=[]), tokenizer)
    return PromptFeed(dataset, **kwargs)


def test_feed_numbers_prompts_over_the_run_and_resumes(
    tmp_path: Path, tokenizer: ChatTokenizer, make_row: Callable[..., Any]
) -> None:
    def new() -> PromptFeed:
        return feed_of(tmp_path, tokenizer, make_row, batch_size=4, shuffle=True, seed=7)

    whole = new()
    expected = [whole.next() for _ in range(30)]
    assert [prompt.group for prompt in expected if prompt is not None] == list(range(30))
    cut = new()
    for _ in range(13):
        cut.next()
    resumed = new()
    resumed.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(cut.position), type=Position))
    assert [resumed.next() for _ in range(17)] == expected[13:]


def test_feed_ends_after_its_epochs(tmp_path: Path, tokenizer: ChatTokenizer, make_row: Callable[..., Any]) -> None:
    feed = feed_of(tmp_path, tokenizer, make_row, batch_size=4, num_epochs=2)
    assert feed.steps_per_epoch == 2
    assert sum(feed.next() is not None for _ in range(20)) == 16


def test_feed_refuses_too_few_rows(tmp_path: Path, tokenizer: ChatTokenizer, make_row: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="one batch of 12 prompts"):
        feed_of(tmp_path, tokenizer, make_row, batch_size=12)


def test_real_gsm8k_position_survives(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    source = os.environ.get("PSRL_GSM8K")
    if not source:
        pytest.skip("PSRL_GSM8K is not set")
    from psrl.data.prepare import gsm8k

    gsm8k(source, tmp_path)
    config = Data(train_files=[], val_files=[], max_prompt_length=4096)
    dataset = PromptDataset.load(str(tmp_path / "train.parquet"), config, tokenizer)
    whole = PromptFeed(dataset, 64, shuffle=True)
    assert whole.steps_per_epoch == 116
    expected = [whole.next() for _ in range(8000)]
    resumed = PromptFeed(dataset, 64, shuffle=True)
    for _ in range(7 * 64):
        resumed.next()
    again = PromptFeed(dataset, 64, shuffle=True)
    again.restore(resumed.position)
    assert [again.next() for _ in range(8000 - 7 * 64)] == expected[7 * 64 :]
