"""The `torch` engine: continuous batching of any Hugging Face causal LM, on CPU or one GPU.

A step is a prefill pass over what has no keys and values yet (new requests; all of them after a recomputing update),
within a budget of tokens, and a decode pass that gives each ready row one token. Requests join and leave between
passes; rows stay without holes. A row is described by two numbers: `length`, its tokens, and `computed`, how many of
them are in the cache. Ready to decode means that exactly the last token is not.

Requests that start with equal prompts in the same step (the siblings of a group) share one prefill: its row is copied.

Sampling is deterministic given seed, position in the response and logits (see `noise`), so a request's tokens do not
depend on the other rows but through rounding.
"""

import time
from collections import deque
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import numpy as np
import torch

from psrl.errors import ConfigError
from psrl.rollout.engine.base import EngineDelta, EngineLoad, EngineRequest, PulledWeights, Running
from psrl.rollout.engine.kv_cache import KVCache
from psrl.rollout.engine.model_runner import Chunk, ModelRunner, load_model, prepare
from psrl.rollout.engine.model_weights import ModelWeights
from psrl.rollout.engine.noise import uniforms
from psrl.rollout.engine.rows import Rows, Sequence
from psrl.rollout.engine.sampling import SamplingRows, sample
from psrl.rollout.engine.schedule import plan_prefill, split_by_length
from psrl.types import Epoch, FinishReason, Version


class TorchEngineSettings(msgspec.Struct, frozen=True):
    max_model_len: int  # prompt and response
    max_num_seqs: int = 256  # concurrent rows
    max_num_batched_tokens: int = 8192  # prefill tokens of one step
    epoch: Epoch = Epoch(0)
    version: Version = Version(0)


class TorchEngine:
    """Implements `psrl.rollout.engine.base.Engine`."""

    def __init__(self, model: Any, settings: TorchEngineSettings) -> None:
        """`model`: a transformers causal LM. Raises ConfigError if it cannot be served with these settings."""
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and settings.max_model_len > longest:
            raise ConfigError(
                f"data.max_prompt_length + data.max_response_length is {settings.max_model_len}, "
                f"the model has {longest} positions"
            )
        self.model = prepare(model)
        self._settings = settings
        self._num_embeddings = int(model.get_input_embeddings().weight.shape[0])
        self._weights = ModelWeights(self.model)
        self._cache = KVCache(settings.max_num_seqs, settings.max_model_len)
        self._runner = ModelRunner(self.model, self._cache)
        self._rows = Rows(settings.max_num_seqs)
        self._waiting: deque[Sequence] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._outbox: list[EngineDelta] = []
        self._epoch, self._version = settings.epoch, settings.version
        self._failure = ""
        self._num_generated = 0
        self._busy_s = 0.0

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        settings: TorchEngineSettings,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        override_config: dict[str, Any] | None = None,
    ) -> "TorchEngine":
        model = load_model(path, dtype=dtype, device=device, override_config=override_config)
        return cls(model, settings)

    # --- requests ---

    def submit(self, request: EngineRequest) -> None:
        reason, error = self._refusal(request)
        if reason is None and request.sampling.max_new_tokens == 0:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._outbox.append(EngineDelta(request.request_id, [], [], self._version, reason, error))
            return
        sequence = Sequence(request)
        self._by_id[request.request_id] = sequence
        self._waiting.append(sequence)

    def _refusal(self, request: EngineRequest) -> tuple[FinishReason | None, str]:
        """ABORT: another replica may take it; ERROR: it cannot be served anywhere."""
        sampling, ids = request.sampling, request.token_ids
        num_tokens, limit = len(ids), self._settings.max_model_len
        if request.epoch != self._epoch:
            reason = FinishReason.ERROR if request.epoch < self._epoch else FinishReason.ABORT
            return reason, f"epoch: the request is of {request.epoch}, the replica serves {self._epoch}"
        if request.pinned_version is not None and request.pinned_version != self._version:
            return FinishReason.ABORT, self._version_text(request)
        if self._failure:
            return FinishReason.ABORT, self._failure
        if request.request_id in self._by_id:
            return FinishReason.ERROR, f"request {request.request_id} is running already"
        if not 0 <= request.num_prefix < num_tokens:
            return FinishReason.ERROR, f"{num_tokens} tokens of which {request.num_prefix} are a generated prefix"
        if num_tokens + sampling.max_new_tokens > limit:
            return FinishReason.ERROR, (
                f"{num_tokens} tokens and {sampling.max_new_tokens} new ones are more than the model length {limit}"
            )
        if ids.min() < 0 or ids.max() >= self._num_embeddings:
            return FinishReason.ERROR, f"token ids must be in [0, {self._num_embeddings})"
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.max_new_tokens >= 0):
            return FinishReason.ERROR, f"sampling cannot work: {sampling}"
        return None, ""

    def abort(self, request_ids: Seq[str], reason: str = "") -> None:
        self._finish_many(
            [self._by_id[name] for name in request_ids if name in self._by_id], FinishReason.ABORT, reason
        )

    def abort_all(self, reason: str, *, running_only: bool = False) -> None:
        chosen = self._rows.sequences if running_only else list(self._by_id.values())
        self._finish_many(list(chosen), FinishReason.ABORT, reason)

    def has_work(self) -> bool:
        return bool(self._by_id)

    def load(self) -> EngineLoad:
        return EngineLoad(
            epoch=self._epoch,
            version=self._version,
            num_running=len(self._rows),
            num_waiting=len(self._by_id) - len(self._rows),
            num_generated_tokens=self._num_generated,
            busy_s=self._busy_s,
            failure=self._failure,
            full_load=self._weights.full_load,
        )

    def drain(self, *, finished_only: bool = False) -> list[EngineDelta]:
        deltas, self._outbox = self._outbox, []
        if not finished_only:
            deltas += [sequence.take_delta(self._version) for sequence in self._rows.sequences if sequence.new_tokens]
        return deltas

    # --- one step ---

    def step(self) -> None:
        started = time.perf_counter()
        self._prefill()
        self._decode()
        self._busy_s += time.perf_counter() - started

    def _prefill(self) -> None:
        """Bring rows to their full length, admit new ones, and draw a token for each that got there."""
        rows, budget = self._rows, self._settings.max_num_batched_tokens
        leaders = np.flatnonzero(rows.length[: len(rows)] - rows.computed[: len(rows)] > 1).tolist()
        pending = (rows.length[leaders] - rows.computed[leaders]).tolist()
        followers = self._admit(leaders, pending, budget - sum(pending))
        if not leaders:
            return
        self._cache.reserve(len(rows), int(rows.length[: len(rows)].max()))
        made: list[tuple[int, int, float]] = []
        for group in split_by_length(plan_prefill(pending, budget), budget):
            chunks = []
            for part in group:
                row = leaders[part.index]
                start = int(rows.computed[row])
                chunks.append(Chunk(row, start, rows.sequences[row].tokens[start : start + part.num_tokens]))
            logits = self._runner.prefill(chunks)
            complete: list[int] = []  # rows, and for each the chunk that its logits come from
            source: list[int] = []
            for index, chunk in enumerate(chunks):
                rows.computed[chunk.row] += len(chunk.tokens)
                if rows.computed[chunk.row] == rows.length[chunk.row]:
                    copies = followers.get(chunk.row, []) if chunk.start == 0 else []
                    complete += [chunk.row, *copies]
                    source += [index] * (1 + len(copies))
            if complete:
                self._follow(complete, source, chunks)
                made += self._draw(complete, logits[source])
        self._record(made)

    def _admit(self, leaders: list[int], pending: list[int], budget: int) -> dict[int, list[int]]:
        """Move waiting requests into rows while there is room and budget. Appends to leaders and pending what is to
        be computed; returns for a leader the rows with the same prompt, which cost nothing."""
        rows = self._rows
        followers: dict[int, list[int]] = {}
        by_prompt: dict[bytes, int] = {}
        while self._waiting and budget > 0 and len(rows) < self._settings.max_num_seqs:
            sequence = self._waiting.popleft()
            if self._by_id.get(sequence.request.request_id) is not sequence:
                continue  # aborted while waiting
            rows.add(sequence)
            prompt = sequence.request.token_ids.tobytes()
            if len(sequence.tokens) == 1:
                continue  # ready to decode as it is
            if prompt in by_prompt:
                followers.setdefault(by_prompt[prompt], []).append(sequence.row)
                continue
            by_prompt[prompt] = sequence.row
            leaders.append(sequence.row)
            pending.append(len(sequence.tokens))
            budget -= len(sequence.tokens)
        return followers

    def _follow(self, complete: list[int], source: list[int], chunks: list[Chunk]) -> None:
        """Copy the leaders' rows to their followers."""
        pairs = [(chunks[index].row, row) for row, index in zip(complete, source) if chunks[index].row != row]
        if pairs:
            leaders, copies = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            self._rows.computed[copies] = self._rows.computed[leaders]
            self._cache.copy_rows(leaders, copies, int(self._rows.computed[leaders].max()))

    def _decode(self) -> None:
        """One token for each row of which only the last token is not in the cache."""
        rows, count = self._rows, len(self._rows)
        ready = rows.length[:count] - rows.computed[:count] == 1
        if not ready.any():
            return
        # Rows amid their prefill take part with a token that is overwritten later, so that rows stay the leading ones.
        logits = self._runner.decode(np.where(ready, rows.last_token[:count], 0), rows.computed[:count].copy())
        drawn = np.flatnonzero(ready)
        rows.computed[drawn] += 1
        self._record(self._draw(drawn.tolist(), logits if len(drawn) == count else logits[torch.from_numpy(drawn)]))

    def _draw(self, chosen: list[int], logits_BV: torch.Tensor) -> list[tuple[int, int, float]]:
        """(row, token, log-prob) for each of the chosen rows."""
        rows = self._rows
        positions = (rows.length[chosen] - rows.base[chosen]).astype(np.uint64)
        settings = SamplingRows(
            rows.temperature[chosen], rows.top_k[chosen], rows.top_p[chosen], uniforms(rows.seed[chosen], positions)
        )
        with torch.inference_mode():
            tokens, log_probs = sample(logits_BV, settings)
        rows.length[chosen] += 1
        rows.last_token[chosen] = tokens
        return list(zip(chosen, tokens, log_probs, strict=True))

    def _record(self, made: list[tuple[int, int, float]]) -> None:
        """Append tokens to their requests; end those that are complete or whose logits are not finite."""
        sequences, ended = self._rows.sequences, []
        for row, token, log_prob in made:
            sequence = sequences[row]
            if log_prob != log_prob:  # NaN
                self._cache.wipe(row)
                where = f"response position {self._rows.length[row] - 1 - self._rows.base[row]}"
                ended.append((sequence, FinishReason.ERROR, f"non-finite logits at {where}"))
                continue
            sequence.tokens.append(token)
            sequence.new_tokens.append(token)
            sequence.new_log_probs.append(log_prob)
            sequence.num_made += 1
            self._num_generated += 1
            if token in sequence.stop:
                ended.append((sequence, FinishReason.STOP, ""))
            elif sequence.num_made >= sequence.request.sampling.max_new_tokens:
                ended.append((sequence, FinishReason.LENGTH, ""))
        self._finish(ended)

    def _finish_many(self, sequences: list[Sequence], reason: FinishReason, error: str) -> None:
        self._finish([(sequence, reason, error) for sequence in sequences])

    def _finish(self, ended: list[tuple[Sequence, FinishReason, str]]) -> None:
        """The last delta of each; their rows are filled from the end. Waiting ones are skipped when their turn
        comes."""
        if not ended:
            return
        for sequence, reason, error in ended:
            self._outbox.append(sequence.take_delta(self._version, reason, error))
            del self._by_id[sequence.request.request_id]
        length = int(self._rows.computed[: len(self._rows)].max()) if len(self._rows) else 0
        sources, targets = self._rows.remove([sequence.row for sequence, _, _ in ended if sequence.row >= 0])
        if sources and length:
            self._cache.copy_rows(sources, targets, length)

    # --- weights ---

    def update(self, pulled: PulledWeights, running: Running) -> int:
        self._weights.check(pulled.tensors)
        self._outbox += [sequence.take_delta(self._version) for sequence in self._rows.sequences if sequence.new_tokens]
        self._failure = f"weights of version {pulled.version} are half loaded"
        try:
            num_bytes = self._weights.copy(pulled.tensors)
        except BaseException:
            self.abort_all(self._failure)
            raise
        self._failure = ""
        new_epoch = pulled.epoch != self._epoch
        self._epoch, self._version = pulled.epoch, pulled.version
        self._carry_over(Running.ABORT if new_epoch else running)
        return num_bytes

    def _carry_over(self, running: Running) -> None:
        """What becomes of requests that were here before the update."""
        old_epoch = [sequence for sequence in self._by_id.values() if sequence.request.epoch != self._epoch]
        self._finish_many(old_epoch, FinishReason.ABORT, f"epoch: the replica now serves {self._epoch}")
        for sequence in list(self._by_id.values()):
            pinned = sequence.request.pinned_version
            if pinned is not None and pinned != self._version:
                self._finish_many([sequence], FinishReason.ABORT, self._version_text(sequence.request))
        if running is Running.ABORT:
            self.abort_all(f"version: the replica now serves {self._version}", running_only=True)
        elif running is Running.RECOMPUTE:
            self._restart(self._rows.sequences)
        else:
            unfinished = self._rows.length - self._rows.computed > 1
            self._restart([sequence for sequence in self._rows.sequences if unfinished[sequence.row]])
            for sequence in self._rows.sequences:
                sequence.mixed_cache |= bool(self._rows.computed[sequence.row])

    def _restart(self, sequences: Seq[Sequence]) -> None:
        """Forget their keys and values; the next prefills compute them again."""
        for sequence in sequences:
            self._rows.computed[sequence.row] = 0
            sequence.mixed_cache = False

    def distrust_weights(self, reason: str) -> None:
        self._failure = reason
        self.abort_all(reason)

    def _version_text(self, request: EngineRequest) -> str:
        return f"version: the request is pinned to {request.pinned_version}, the replica serves {self._version}"
