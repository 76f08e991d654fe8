"""A resume with the real feed: the prompts that remain are those of the uninterrupted run, in the same order."""

from pathlib import Path

import msgspec
import pytest

from psrl.control.control import Control
from psrl.control.messages import Batch, Complete, GroupOffer, Reserve, Reserved
from psrl.control.settings import ControlSettings
from psrl.control.state import ControlState
from psrl.data.dataset import Counts, PromptDataset
from psrl.data.feed import PromptFeed
from psrl.types import Epoch, FinishReason, TrajectoryId, Version, VersionSpan

ROWS, BATCH, EPOCHS = 7, 3, 3
STEPS = ROWS // BATCH * EPOCHS


def feed() -> PromptFeed:
    rows = [
        (bytes([row, 0, 0, 0]), msgspec.msgpack.encode({"data_source": "t", "ground_truth": row}))
        for row in range(ROWS)
    ]
    dataset = PromptDataset([Path("t")], 8, rows, Counts(ROWS, ROWS, 0, 0, 0), frozenset({"t"}))
    return PromptFeed(dataset, BATCH, shuffle=True, seed=3)


def control(staleness: int, state: ControlState | None = None) -> Control:
    version = state.version if state is not None else Version(0)
    made = Control(
        ControlSettings(total_steps=STEPS, batch_size=BATCH, rollout_n=1, staleness=staleness, initial_version=version),
        feed(),
        state=state,
    )
    made.publish(version, 0)
    return made


def run_one(made: Control) -> GroupOffer | None:
    """Offer one group and run it at once."""
    offer = made.next_group("a", 0, 0.0)
    if offer is None:
        return None
    trajectory, version = TrajectoryId(offer.prompt.group, 0, offer.offer), made.version
    assert isinstance(made.reserve(Reserve(Epoch(0), trajectory, version, "r")), Reserved)
    made.complete(
        Complete(
            epoch=Epoch(0),
            trajectory=trajectory,
            worker="a",
            spans=(VersionSpan(version, 1),),
            num_prompt_tokens=1,
            num_response_tokens=1,
            finish_reason=FinishReason.STOP,
            started_s=0.0,
            ended_s=0.0,
            num_dispatches=1,
            raw_score=1.0,
            shaped_reward=1.0,
        )
    )
    return offer


def train(made: Control, until: int) -> list[tuple[int, bytes]]:
    """Steps up to version `until`, with everything offered that may be; (group, prompt) in the order of training."""
    trained = []
    prompts: dict[int, bytes] = {}
    while made.version < until:
        while (offer := run_one(made)) is not None:
            prompts[offer.prompt.group] = offer.prompt.prompt_ids
        batch = made.consume(made.version)
        assert isinstance(batch, Batch)
        trained += [(group.group, prompts[group.group]) for group in batch.groups]
        made.publish(Version(made.version + 1), 0)
    return trained


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("saved_at", [1, 2, STEPS - 1])
def test_a_run_cut_in_two_trains_the_same_prompts(staleness: int, saved_at: int) -> None:
    whole = train(control(staleness), STEPS)
    assert len({group for group, _ in whole}) == STEPS * BATCH
    first = control(staleness)
    before = train(first, saved_at)
    state = ControlState.decode(first.take_snapshot(Version(saved_at), 0).encode())
    run_one(first)  # lost with the kill
    assert before + train(control(staleness, state), STEPS) == whole
