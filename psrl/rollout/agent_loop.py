"""Agent loops: how one trajectory comes to be. An agent loop asks for generation and adds what its environment says.

`SingleTurn` generates once. A tool or environment loop is another class with the same `run`; the worker does not learn
its name. What is trained on is what was generated: tokens are never decoded and encoded again.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from psrl.errors import EngineError
from psrl.rollout.messages import Generated
from psrl.types import FinishReason, SamplingParams, VersionSpan


class Rollout(msgspec.Struct, frozen=True):
    """What an agent loop made of a prompt; all arrays have the response's length T."""

    response_ids: npt.NDArray[np.int32]
    response_mask: npt.NDArray[np.uint8]  # 1: generated, trained on; 0: from the environment
    log_probs: npt.NDArray[np.float32]  # of the sampling distribution; 0 where the mask is 0
    versions: npt.NDArray[np.int32]  # weights each token was made under; -1 where the mask is 0
    mixed_cache: npt.NDArray[np.uint8]  # 1: made over keys and values of older weights
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    started_s: float
    ended_s: float
    num_dispatches: int
    num_turns: int = 1


GenerateFn = Callable[[bytes, SamplingParams], Awaitable[Generated]]
"""Continue these token ids (int32 little-endian) under these sampling parameters."""


class AgentLoop(Protocol):
    async def run(self, prompt_ids: bytes, sampling: SamplingParams, generate: GenerateFn) -> Rollout: ...


class SingleTurn:
    """One prompt, one answer."""

    async def run(self, prompt_ids: bytes, sampling: SamplingParams, generate: GenerateFn) -> Rollout:
        """Raises EngineError if the generation failed or its parts do not fit together."""
        return rollout_of(await generate(prompt_ids, sampling))


def rollout_of(generated: Generated) -> Rollout:
    """The arrays of one generation. Raises EngineError if it failed or its lengths differ."""
    if generated.finish_reason is FinishReason.ERROR:
        raise EngineError(generated.error)
    response_ids = np.frombuffer(generated.token_ids, np.int32)
    log_probs = np.frombuffer(generated.log_probs, np.float32)
    lengths = np.array([span.num_tokens for span in generated.spans], np.int64)
    versions = np.repeat(np.array([span.version for span in generated.spans], np.int32), lengths)
    mixed_cache = np.repeat(np.array([span.mixed_cache for span in generated.spans], np.uint8), lengths)
    if not len(response_ids) == len(log_probs) == len(versions):
        raise EngineError(
            f"{generated.trajectory.key}: {len(response_ids)} tokens, {len(log_probs)} log-probs, "
            f"{len(versions)} versions"
        )
    if not np.isfinite(log_probs).all():
        raise EngineError(f"{generated.trajectory.key}: a log-prob is not finite")
    return Rollout(
        response_ids=response_ids,
        response_mask=np.ones(len(response_ids), np.uint8),
        log_probs=log_probs,
        versions=versions,
        mixed_cache=mixed_cache,
        spans=generated.spans,
        finish_reason=generated.finish_reason,
        started_s=generated.started_s,
        ended_s=generated.ended_s,
        num_dispatches=generated.num_dispatches,
    )
