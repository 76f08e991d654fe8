"""The running requests: one row each, the rows 0..n-1 of the cache, without holes.

What a step needs of all rows at once is kept in arrays; what only one request needs, in its `Sequence`.
"""

from collections.abc import Sequence as Seq

import numpy as np

from psrl.rollout.engine.base import EngineDelta, EngineRequest
from psrl.types import FinishReason, Version


class Sequence:
    """One request from submit to its last delta."""

    __slots__ = ("mixed_cache", "new_log_probs", "new_tokens", "num_made", "request", "row", "stop", "tokens")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.tokens: list[int] = request.token_ids.tolist()  # prompt, prefix, and what is made here
        self.num_made = 0
        self.new_tokens: list[int] = []  # not yet in a delta; all of one version
        self.new_log_probs: list[float] = []
        self.stop = frozenset(request.sampling.stop_token_ids)
        self.row = -1  # waiting
        self.mixed_cache = False

    def take_delta(self, version: Version, reason: FinishReason | None = None, error: str = "") -> EngineDelta:
        tokens, log_probs = self.new_tokens, self.new_log_probs
        self.new_tokens, self.new_log_probs = [], []
        return EngineDelta(self.request.request_id, tokens, log_probs, version, reason, error, self.mixed_cache)


class Rows:
    """Rows 0..len-1 are in use. length counts a row's tokens, computed those of them with keys and values."""

    _ARRAYS = ("length", "computed", "base", "last_token", "temperature", "top_p", "top_k", "seed")

    def __init__(self, max_rows: int) -> None:
        self.sequences: list[Sequence] = []
        self.length = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int64)
        self.base = np.zeros(max_rows, np.int64)  # tokens before the response: noise counts positions from here
        self.last_token = np.zeros(max_rows, np.int64)
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_p = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)
        self.seed = np.zeros(max_rows, np.uint64)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        row = sequence.row = len(self.sequences)
        request, sampling = sequence.request, sequence.request.sampling
        self.sequences.append(sequence)
        self.length[row] = len(sequence.tokens)
        self.computed[row] = 0
        self.base[row] = len(sequence.tokens) - request.num_prefix
        self.last_token[row] = sequence.tokens[-1]
        self.temperature[row], self.top_p[row], self.top_k[row] = sampling.temperature, sampling.top_p, sampling.top_k
        self.seed[row] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF

    def remove(self, gone: Seq[int]) -> tuple[list[int], list[int]]:
        """Take rows out and fill the holes from the end: (sources, targets) of the moves, for the cache to follow."""
        leaving = set(gone)
        num_left = len(self.sequences) - len(leaving)
        sources = [row for row in range(num_left, len(self.sequences)) if row not in leaving]
        targets = sorted(row for row in leaving if row < num_left)
        for row in leaving:
            self.sequences[row].row = -1
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]
            self.sequences[target].row = target
        del self.sequences[num_left:]
        if sources:
            for name in self._ARRAYS:
                array = getattr(self, name)
                array[targets] = array[sources]
        return sources, targets
