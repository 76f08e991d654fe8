"""What the gateway makes of a replica's deltas."""

import numpy as np
import pytest

from psrl.errors import EngineError
from psrl.rollout.agent_loop import rollout_of
from psrl.rollout.messages import Generate
from psrl.rollout.replica_pb2 import Delta
from psrl.rollout.request import GenerationRequest
from psrl.types import Epoch, FinishReason, GroupId, SamplingParams, TrajectoryId


def make(max_new_tokens: int = 8) -> GenerationRequest:
    prompt = np.arange(3, dtype="<i4").tobytes()
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(9,))
    return GenerationRequest(Generate(Epoch(0), TrajectoryId(GroupId(1), 0), prompt, sampling), 0.0)


def delta(*tokens: int, version: int = 0, mixed_cache: bool = False) -> Delta:
    ids, log_probs = np.array(tokens, "<i4"), np.full(len(tokens), -0.5, "<f4")
    return Delta(token_ids=ids.tobytes(), log_probs=log_probs.tobytes(), version=version, mixed_cache=mixed_cache)


def test_spans_tell_versions_replicas_and_mixed_caches_apart() -> None:
    request = make()
    request.take(delta(1), "a")
    request.take(delta(2, 3), "a")
    request.take(delta(4, version=1, mixed_cache=True), "a")
    request.take(delta(5, version=1, mixed_cache=True), "a")
    request.take(delta(6, version=1), "b")
    rollout = rollout_of(request.result(FinishReason.LENGTH, 1.0))
    assert [(span.version, span.num_tokens, span.replica, span.mixed_cache) for span in rollout.spans] == [
        (0, 3, "a", False),
        (1, 2, "a", True),
        (1, 1, "b", False),
    ]
    assert rollout.versions.tolist() == [0, 0, 0, 1, 1, 1]
    assert rollout.mixed_cache.tolist() == [0, 0, 0, 1, 1, 0]
    assert rollout.mixed_cache.dtype == np.uint8


def test_a_delta_over_the_budget_is_refused() -> None:
    request = make(max_new_tokens=2)
    with pytest.raises(EngineError, match="3 tokens, 2 were left"):
        request.take(delta(1, 2, 3), "a")


def test_a_complete_answer_is_known_without_its_last_word() -> None:
    request = make(max_new_tokens=2)
    request.take(delta(1), "a")
    assert request.already_finished() is None
    request.take(delta(2), "a")
    assert request.already_finished() is FinishReason.LENGTH
    ended = make()
    ended.take(delta(9), "a")
    assert ended.already_finished() is FinishReason.STOP
