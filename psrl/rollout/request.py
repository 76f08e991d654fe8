"""One trajectory's generation as the gateway sees it: what was streamed so far, over however many replicas.

Tokens, log-probs and the version of each token grow together; a request that goes through selection again keeps them
as its prefix. The token budget is counted here alone, so that a resumed request never exceeds it.
"""

import msgspec

from psrl.errors import EngineError
from psrl.rollout.messages import Generate, Generated
from psrl.rollout.replica_pb2 import Delta, GenerateRequest
from psrl.types import FinishReason, SamplingParams, Version, VersionSpan

_ITEM = 4  # bytes of an int32 token id and of a float32 log-prob


class GenerationRequest:
    """Accumulates deltas of one `Generate` until it has a terminal result."""

    def __init__(self, message: Generate, started_s: float) -> None:
        self.message = message
        self.request_id = message.trajectory.key + "@" + message.trajectory.purpose
        self.abort_reason: str | None = None
        self.num_dispatches = 0
        self._started_s = started_s
        self._tokens = bytearray()
        self._log_probs = bytearray()
        self._spans: list[VersionSpan] = []

    def count_dispatch(self, now_s: float) -> None:
        """A place was reserved. Generation starts with the first one; before, the request only waited."""
        if self.num_dispatches == 0:
            self._started_s = now_s
        self.num_dispatches += 1

    @property
    def sampling(self) -> SamplingParams:
        return self.message.sampling

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // _ITEM

    @property
    def num_left(self) -> int:
        return self.sampling.max_new_tokens - self.num_tokens

    def to_wire(self) -> GenerateRequest:
        """The request for a replica, with what was generated before as its prefix."""
        sampling = self.sampling
        request = GenerateRequest(
            request_id=self.request_id,
            token_ids=self.message.prompt_ids + bytes(self._tokens),
            num_prefix=self.num_tokens,
            max_new_tokens=self.num_left,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            epoch=self.message.epoch,
        )
        if self.message.pinned_version is not None:
            request.pinned_version = self.message.pinned_version
        return request

    def take(self, delta: Delta, replica: str) -> None:
        """Append a delta. Raises EngineError if its tokens and log-probs differ in number or pass the budget."""
        count = len(delta.token_ids) // _ITEM
        if len(delta.token_ids) % _ITEM or len(delta.log_probs) != count * _ITEM:
            raise EngineError(
                f"replica {replica} sent {len(delta.token_ids)} token and {len(delta.log_probs)} log-prob bytes"
            )
        if count > self.num_left:
            raise EngineError(f"replica {replica} sent {count} tokens, {self.num_left} were left of the budget")
        if not count:
            return
        self._tokens += delta.token_ids
        self._log_probs += delta.log_probs
        made = VersionSpan(Version(delta.version), count, replica, delta.mixed_cache)
        last = self._spans[-1] if self._spans else None
        if last is not None and msgspec.structs.replace(last, num_tokens=count) == made:
            self._spans[-1] = msgspec.structs.replace(last, num_tokens=last.num_tokens + count)
        else:
            self._spans.append(made)

    def already_finished(self) -> FinishReason | None:
        """Whether what was streamed is complete although the final word was lost with its replica."""
        if (
            self._tokens
            and int.from_bytes(self._tokens[-_ITEM:], "little", signed=True) in self.sampling.stop_token_ids
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left <= 0 else None

    def result(self, reason: FinishReason, ended_s: float, error: str = "") -> Generated:
        return Generated(
            trajectory=self.message.trajectory,
            token_ids=bytes(self._tokens),
            log_probs=bytes(self._log_probs),
            spans=tuple(self._spans),
            finish_reason=reason,
            started_s=self._started_s,
            ended_s=ended_s,
            num_dispatches=self.num_dispatches,
            error=error,
        )
