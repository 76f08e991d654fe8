from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from psrl.errors import EngineError
from psrl.rollout.engine.base import Running
from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings
from psrl.types import FinishReason


def engine_of(model: Any, **settings: Any) -> TorchEngine:
    return TorchEngine(model, TorchEngineSettings(**{"max_model_len": 128, "max_num_seqs": 8, **settings}))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("running", list(Running))
@pytest.mark.parametrize("budget", [16, 8192])
def test_recorded_versions_are_true(
    running: Running, budget: int, build_model: Any, marked_weights: Any, pulled: Any, request_of: Any, new_answers: Any
) -> None:
    """Weights of version v make the model say v, so each token tells which weights made it."""
    engine, answers = engine_of(build_model("llama"), max_num_batched_tokens=budget), new_answers()
    engine.update(pulled(1, marked_weights(1)), running)
    for i in range(20):
        engine.submit(request_of(str(i), [5] * (3 + i), max_new_tokens=6 + i % 5, seed=i))
    version, steps = 1, 0
    while engine.has_work():
        engine.step()
        steps += 1
        answers.take(engine.drain(finished_only=steps % 2 == 0))
        if steps % 3 == 0:
            version += 1
            engine.update(pulled(version, marked_weights(version)), running)
    answers.take(engine.drain())
    assert version > 3
    for i in range(20):
        answer = answers[str(i)]
        assert answer.versions == answer.tokens
        assert len(answer.reasons) == 1
        if running is Running.ABORT and answer.reasons == [FinishReason.ABORT]:
            assert len(set(answer.versions)) <= 1
            assert "version" in answer.error
        else:
            assert len(answer.tokens) == 6 + i % 5
        assert any(answer.mixed) <= (running is Running.KEEP)
        assert not answer.mixed or not answer.mixed[0]
    spread = [len(set(answer.versions)) for answer in answers.values()]
    assert (max(spread) > 1) == (running is not Running.ABORT)


def test_recompute_leaves_nothing_of_the_old_weights(
    build_model: Any, pulled: Any, request_of: Any, new_answers: Any, reference_log_probs: Any
) -> None:
    old, new = build_model("qwen2", seed=1), build_model("qwen2", seed=2)
    for running in (Running.RECOMPUTE, Running.KEEP):
        engine, answers = engine_of(build_model("qwen2", seed=1), max_num_batched_tokens=12), new_answers()
        for i in range(5):
            engine.submit(request_of(str(i), list(range(i, 9 + 3 * i)), max_new_tokens=14, seed=i))
        for _ in range(8):
            engine.step()
        engine.update(pulled(1, weights_of(new)), running)
        engine.submit(request_of("late", [3, 1, 4, 1, 5], max_new_tokens=14, seed=9))
        while engine.has_work():
            engine.step()
        answers.take(engine.drain())
        for name, answer in answers.items():
            prompt = [3, 1, 4, 1, 5] if name == "late" else list(range(int(name), 9 + 3 * int(name)))
            under_old = reference_log_probs(old, prompt + answer.tokens, len(prompt))
            under_new = reference_log_probs(new, prompt + answer.tokens, len(prompt))
            for token, version in enumerate(answer.versions):
                expected = (under_old, under_new)[version][token]
                if version == 0 or not answer.mixed[token]:
                    assert answer.log_probs[token] == pytest.approx(expected, abs=1e-4)
            assert set(answer.versions) == ({1} if name == "late" else {0, 1})
            if running is Running.KEEP and name != "late":
                switch = answer.versions.index(1)
                assert answer.mixed == [False] * switch + [True] * (14 - switch)
                assert not np.allclose(answer.log_probs[switch:], under_new[switch:], atol=1e-3)


def test_a_reload_of_equal_weights_changes_nothing(build_model: Any, pulled: Any, run: Any, request_of: Any) -> None:
    model = build_model("qwen2")
    equal = weights_of(model)
    engine = engine_of(model)
    one = request_of("a", [4, 8, 15, 16, 23, 42], max_new_tokens=20, seed=1)
    before = run(engine, one)["a"]
    for version in (1, 2, 3):
        assert engine.update(pulled(version, equal), Running.RECOMPUTE) == sum(t.nbytes for t in equal.values())
        again = run(engine, one)["a"]
        assert (again.tokens, again.log_probs) == (before.tokens, before.log_probs)
        assert set(again.versions) == {version}


def test_tied_embeddings_stay_one(build_model: Any, pulled: Any) -> None:
    model = build_model("qwen2")
    engine = engine_of(model)
    new = weights_of(build_model("qwen2", seed=7))
    assert "lm_head.weight" not in new
    engine.update(pulled(1, new), Running.RECOMPUTE)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, new["model.embed_tokens.weight"])
    head_only = {("lm_head.weight" if "embed" in name else name): part for name, part in new.items()}
    engine.update(pulled(2, head_only), Running.RECOMPUTE)
    with pytest.raises(EngineError, match="tied but different"):
        engine.update(pulled(3, {**new, "lm_head.weight": new["model.embed_tokens.weight"] + 1}), Running.RECOMPUTE)


def test_weights_that_do_not_fit_are_told_by_name_and_the_old_ones_serve_on(
    build_model: Any, pulled: Any, run: Any, request_of: Any
) -> None:
    model = build_model("llama")
    engine = engine_of(model)
    one = request_of("a", [1, 2, 3], max_new_tokens=10)
    before = run(engine, one)["a"].tokens
    good = weights_of(build_model("llama", seed=5))
    lacking = {name: part for name, part in good.items() if "q_proj" not in name}
    misshapen = {**good, "model.norm.weight": torch.ones(3)}
    for tensors, text in (
        (lacking, r"missing: model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight"),
        ({**good, "model.extra": torch.ones(1)}, "unexpected: model.extra"),
        (misshapen, r"model.norm.weight is \[3\], wanted \[64\]"),
    ):
        with pytest.raises(EngineError, match=text):
            engine.update(pulled(1, tensors), Running.RECOMPUTE)
        answer = run(engine, one)["a"]
        assert (answer.tokens, set(answer.versions)) == (before, {0})


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_new_bytes_in_the_same_tensors_are_taken_by_the_same_copies(
    architecture: str, build_model: Any, pulled: Any
) -> None:
    model = build_model(architecture)
    engine = engine_of(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    staged = {name: part.to(torch.bfloat16) for name, part in weights_of(build_model(architecture, seed=1)).items()}
    for version in range(1, 4):
        for name, part in weights_of(build_model(architecture, seed=version)).items():
            staged[name].copy_(part)
        assert engine.update(pulled(version, staged), Running.RECOMPUTE) == sum(t.nbytes for t in staged.values())
        assert engine.load().full_load == ""
        assert all(torch.equal(part, staged[name].float()) for name, part in model.named_parameters())
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_ties_are_looked_at_in_every_update(build_model: Any, pulled: Any) -> None:
    engine = engine_of(build_model("qwen2"))
    new = weights_of(build_model("qwen2", seed=7))
    new["lm_head.weight"] = new["model.embed_tokens.weight"].clone()
    engine.update(pulled(1, new), Running.RECOMPUTE)
    new["lm_head.weight"] += 1
    with pytest.raises(EngineError, match="tied but different"):
        engine.update(pulled(2, new), Running.RECOMPUTE)


def test_a_model_that_cannot_take_direct_copies_is_loaded_in_full_and_says_so(
    build_model: Any, pulled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model("llama")
    model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    engine = engine_of(model)
    for version in (1, 2):
        new = weights_of(build_model("llama", seed=version))
        engine.update(pulled(version, new), Running.RECOMPUTE)
        assert torch.equal(model.lm_head.weight, new["lm_head.weight"])
        assert "lm_head.weight is not contiguous" in engine.load().full_load
    assert caplog.text.count("not by direct copies") == 1


class Breaking(Mapping[str, torch.Tensor]):
    """Passes the check, then fails in the middle of the copy."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._num_items_calls = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def items(self) -> Any:
        self._num_items_calls += 1
        for index, item in enumerate(self._tensors.items()):
            if self._num_items_calls > 1 and index == 5:
                raise ValueError("boom")
            yield item


def test_half_loaded_weights_serve_nothing_until_a_whole_load(
    build_model: Any, pulled: Any, run: Any, request_of: Any, new_answers: Any
) -> None:
    engine, answers = engine_of(build_model("llama")), new_answers()
    good = weights_of(build_model("llama", seed=5))
    for i in range(12):
        engine.submit(request_of(str(i), [1, 2, 3], max_new_tokens=10))
    engine.step()
    with pytest.raises(ValueError, match="boom"):
        engine.update(pulled(1, Breaking(good)), Running.RECOMPUTE)
    answers.take(engine.drain())
    assert [answer.reasons for answer in answers.values()] == [[FinishReason.ABORT]] * 12
    refused = run(engine, request_of("a", [1, 2, 3], max_new_tokens=10))["a"]
    assert (refused.reasons, refused.tokens) == ([FinishReason.ABORT], [])
    assert "half loaded" in refused.error
    assert "half loaded" in engine.load().failure
    engine.update(pulled(1, good), Running.RECOMPUTE)
    whole = run(engine, request_of("a", [1, 2, 3], max_new_tokens=10))["a"]
    assert (
        whole.tokens
        == run(engine_of(build_model("llama", seed=5)), request_of("a", [1, 2, 3], max_new_tokens=10))["a"].tokens
    )


def test_pinned_requests_end_when_their_version_goes(
    build_model: Any, marked_weights: Any, pulled: Any, request_of: Any, new_answers: Any
) -> None:
    engine, answers = engine_of(build_model("llama"), max_num_seqs=2), new_answers()
    engine.update(pulled(1, marked_weights(1)), Running.RECOMPUTE)
    for name in ("runs", "free", "waits"):
        pin = {} if name == "free" else {"pinned_version": 1}
        engine.submit(request_of(name, [1, 2, 3], max_new_tokens=10, **pin))
    engine.step()
    engine.update(pulled(2, marked_weights(2)), Running.RECOMPUTE)
    while engine.has_work():
        engine.step()
    answers.take(engine.drain())
    for name in ("runs", "waits"):
        assert answers[name].reasons == [FinishReason.ABORT]
        assert "version" in answers[name].error
        assert set(answers[name].versions) <= {1}
    assert set(answers["free"].versions) == {1, 2}


def test_a_new_epoch_ends_what_the_old_one_asked_for(
    build_model: Any, marked_weights: Any, pulled: Any, run: Any, request_of: Any
) -> None:
    engine = engine_of(build_model("llama"))
    engine.update(pulled(5, marked_weights(5)), Running.RECOMPUTE)
    engine.submit(request_of("old", [1, 2, 3], max_new_tokens=10))
    engine.step()
    engine.update(pulled(3, marked_weights(3), epoch=1), Running.KEEP)
    answers = run(engine, request_of("older", [1], max_new_tokens=2), request_of("new", [1], max_new_tokens=2, epoch=1))
    assert answers["old"].reasons == [FinishReason.ABORT]
    assert set(answers["old"].versions) == {5}
    assert answers["older"].reasons == [FinishReason.ERROR]
    assert "epoch" in answers["older"].error
    assert answers["new"].tokens == [3, 3]
