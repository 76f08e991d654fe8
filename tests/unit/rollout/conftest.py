"""Tiny random models of two architectures, and ways to drive an engine to the end of its work."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from psrl.rollout.engine.base import EngineDelta, EngineRequest
from psrl.rollout.engine.torch_engine import TorchEngine
from psrl.types import Epoch, FinishReason, SamplingParams, Version

VOCABULARY = 115

torch.set_num_threads(1)  # tiny models on a shared machine: more threads only wait for each other


class Answer(msgspec.Struct):
    """All deltas of one request put together. `versions` has one entry per token."""

    tokens: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    mixed: list[bool] = []
    reasons: list[FinishReason] = []
    error: str = ""

    def take(self, delta: EngineDelta) -> None:
        assert len(delta.token_ids) == len(delta.log_probs)
        assert not self.reasons, "a delta after the last one"
        self.tokens += delta.token_ids
        self.log_probs += delta.log_probs
        self.versions += [delta.version] * len(delta.token_ids)
        self.mixed += [delta.mixed_cache] * len(delta.token_ids)
        if delta.finish_reason is not None:
            self.reasons.append(delta.finish_reason)
            self.error = delta.error


class Answers(dict[str, Answer]):
    def take(self, deltas: list[EngineDelta]) -> None:
        for delta in deltas:
            self.setdefault(delta.request_id, Answer()).take(delta)


class Paced(TorchEngine):
    """Makes no more than about `limit` tokens in all, so that requests still run when a test acts, however late that
    is. Who raises the limit must also send the engine's thread a command: it sleeps while there is nothing to do.
    """

    limit = math.inf

    def has_work(self) -> bool:
        return super().has_work() and self.load().num_generated_tokens < self.limit


class Pulled(msgspec.Struct, frozen=True):
    version: Version
    tensors: dict[str, Any]
    epoch: Epoch = Epoch(0)
    transfer_s: float = 0.0


def make_request(name: str, prompt: list[int], **sampling: Any) -> EngineRequest:
    outer = {key: sampling.pop(key) for key in ("num_prefix", "pinned_version", "epoch") if key in sampling}
    return EngineRequest(name, np.array(prompt, np.int32), SamplingParams(**sampling), **outer)


def run_engine(engine: Any, *requests: EngineRequest) -> Answers:
    """Submit, step to the end, and return what came."""
    answers = Answers()
    for one in requests:
        engine.submit(one)
    for _ in range(10_000):
        if not engine.has_work():
            break
        engine.step()
        answers.take(engine.drain())
    answers.take(engine.drain())
    assert not engine.has_work()
    return answers


@pytest.fixture
def request_of() -> Callable[..., EngineRequest]:
    return make_request


@pytest.fixture
def run() -> Callable[..., Answers]:
    return run_engine


@pytest.fixture
def pulled() -> type[Pulled]:
    return Pulled


@pytest.fixture
def paced() -> type[Paced]:
    return Paced


@pytest.fixture
def new_answers() -> type[Answers]:
    return Answers


def _build(architecture: str, seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if architecture == "llama" else 4,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": architecture == "qwen2",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**settings, **changes}))
    return model.eval()


@pytest.fixture
def build_model() -> Callable[..., Any]:
    """build_model("qwen2" | "llama" | ..., **config): Qwen2 has tied embeddings, Llama grouped key heads."""
    return _build


@pytest.fixture
def reference_log_probs(build_model: Callable[..., Any]) -> Callable[..., list[float]]:
    """log_probs(model, tokens, num_prompt, temperature): transformers' own forward pass over it all."""

    def compute(model: Any, tokens: list[int], num_prompt: int, temperature: float = 1.0) -> list[float]:
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits[0].double() / temperature
        model.set_attn_implementation(before)
        log_probs = torch.log_softmax(logits, dim=-1)
        return [float(log_probs[at - 1, tokens[at]]) for at in range(num_prompt, len(tokens))]

    return compute


@pytest.fixture
def marked_weights(build_model: Callable[..., Any]) -> Callable[[int], dict[str, torch.Tensor]]:
    """Weights of the untied Llama under which any context is followed by token `version`, almost surely."""

    def make(version: int) -> dict[str, torch.Tensor]:
        tensors = {name: torch.zeros_like(part) for name, part in build_model("llama").named_parameters()}
        for name, part in tensors.items():
            if "norm" in name or "embed_tokens" in name:
                part.fill_(1.0)
        tensors["lm_head.weight"][version] = 1.0
        return tensors

    return make
