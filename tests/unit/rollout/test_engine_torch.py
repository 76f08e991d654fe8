import random
from typing import Any

import numpy as np
import pytest
import torch

from psrl.errors import ConfigError
from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings
from psrl.types import FinishReason

ARCHITECTURES = ["qwen2", "llama"]


def prompts(count: int, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(115) for _ in range(rng.randint(low, high))] for _ in range(count)]


def engine_of(model: Any, **settings: Any) -> TorchEngine:
    return TorchEngine(model, TorchEngineSettings(**{"max_model_len": 128, "max_num_seqs": 16, **settings}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_generate(architecture: str, build_model: Any, run: Any, request_of: Any) -> None:
    model = build_model(architecture)
    given = prompts(12)
    expected = []
    with torch.inference_mode():
        for prompt in given:
            made = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=20, do_sample=False, pad_token_id=0,
            )  # fmt: skip
            expected.append(made[0, len(prompt) :].tolist())
    answers = run(
        engine_of(model),
        *(request_of(str(i), prompt, temperature=0, max_new_tokens=20) for i, prompt in enumerate(given)),
    )
    assert [answers[str(i)].tokens for i in range(12)] == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_full_forward_pass(
    architecture: str, temperature: float, build_model: Any, run: Any, request_of: Any, reference_log_probs: Any
) -> None:
    model = build_model(architecture)
    given = prompts(20)
    answers = run(
        engine_of(model, max_num_seqs=7),
        *(
            request_of(str(i), prompt, temperature=temperature, max_new_tokens=5 + i, seed=i)
            for i, prompt in enumerate(given)
        ),
    )
    for i, prompt in enumerate(given):
        answer = answers[str(i)]
        assert len(answer.tokens) == 5 + i
        expected = reference_log_probs(model, prompt + answer.tokens, len(prompt), temperature)
        np.testing.assert_allclose(answer.log_probs, expected, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_do_not_depend_on_the_batch(architecture: str, build_model: Any, run: Any, request_of: Any) -> None:
    model = build_model(architecture)
    requests = [
        request_of(str(i), prompt, max_new_tokens=4 + i % 13, seed=1000 + i, top_p=0.95 if i % 3 else 1.0)
        for i, prompt in enumerate(prompts(30))
    ]
    together = run(engine_of(model, max_num_seqs=30), *requests)
    few_at_a_time = run(engine_of(model, max_num_seqs=3, max_num_batched_tokens=11), *reversed(requests))
    for one in requests:
        alone = run(engine_of(model), one)[one.request_id]
        for other in (together[one.request_id], few_at_a_time[one.request_id]):
            assert other.tokens == alone.tokens
            np.testing.assert_allclose(other.log_probs, alone.log_probs, atol=1e-4)


def test_siblings_of_one_prompt_differ_by_their_seeds_only(build_model: Any, run: Any, request_of: Any) -> None:
    model = build_model("qwen2")
    prompt = prompts(1, 20, 20)[0]
    siblings = [request_of(str(seed), prompt, max_new_tokens=15, seed=seed) for seed in range(8)]
    together = run(engine_of(model), *siblings)
    assert len({tuple(answer.tokens) for answer in together.values()}) == 8
    for one in siblings:
        assert run(engine_of(model), one)[one.request_id].tokens == together[one.request_id].tokens


@pytest.mark.parametrize("cut", [0, 1, 6, 11])
def test_a_dispatch_with_a_prefix_goes_on_with_the_same_stream(
    cut: int, build_model: Any, run: Any, request_of: Any
) -> None:
    model = build_model("qwen2")
    prompt = prompts(1, 9, 9)[0]
    whole = run(engine_of(model), request_of("a", prompt, max_new_tokens=12, seed=5))["a"]
    rest = run(
        engine_of(model),
        request_of("a", prompt + whole.tokens[:cut], max_new_tokens=12 - cut, seed=5, num_prefix=cut),
    )["a"]
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    assert rest.reasons == [FinishReason.LENGTH]
    np.testing.assert_allclose(rest.log_probs, whole.log_probs[cut:], atol=1e-4)


def test_prompts_over_the_prefill_budget_go_in_chunks(build_model: Any, run: Any, request_of: Any) -> None:
    model = build_model("llama")
    requests = [request_of(str(i), prompt, max_new_tokens=6, seed=i) for i, prompt in enumerate(prompts(6, 30, 60))]
    chunked = run(engine_of(model, max_num_batched_tokens=7), *requests)
    whole = run(engine_of(model), *requests)
    assert {name: answer.tokens for name, answer in chunked.items()} == {
        name: answer.tokens for name, answer in whole.items()
    }


def test_sliding_windows_are_kept(build_model: Any, run: Any, request_of: Any, reference_log_probs: Any) -> None:
    model = build_model("mistral", sliding_window=8, num_key_value_heads=2)
    prompt = prompts(1, 30, 30)[0]
    answer = run(engine_of(model, max_num_batched_tokens=13), request_of("a", prompt, max_new_tokens=20))["a"]
    expected = reference_log_probs(model, prompt + answer.tokens, len(prompt))
    np.testing.assert_allclose(answer.log_probs, expected, atol=1e-4)


def test_end_tokens_and_budgets_end_a_request_exactly(build_model: Any, run: Any, request_of: Any) -> None:
    model = build_model("qwen2")
    prompt = prompts(1, 9, 9)[0]
    free = run(engine_of(model), request_of("a", prompt, max_new_tokens=30, seed=3))["a"]
    assert (len(free.tokens), free.reasons) == (30, [FinishReason.LENGTH])
    stop = free.tokens[10]
    first = free.tokens.index(stop)
    stopped = run(engine_of(model), request_of("a", prompt, max_new_tokens=30, seed=3, stop_token_ids=(stop,)))["a"]
    assert (stopped.tokens, stopped.reasons) == (free.tokens[: first + 1], [FinishReason.STOP])
    at_the_end = request_of("a", prompt, max_new_tokens=first + 1, seed=3, stop_token_ids=(stop,))
    assert run(engine_of(model), at_the_end)["a"].reasons == [FinishReason.STOP]
    assert run(engine_of(model), request_of("a", prompt, max_new_tokens=0))["a"].reasons == [FinishReason.LENGTH]


def test_a_request_that_cannot_be_served_is_refused_alone(build_model: Any, run: Any, request_of: Any) -> None:
    answers = run(
        engine_of(build_model("qwen2"), max_model_len=40),
        request_of("long", [1] * 41, max_new_tokens=1),
        request_of("budget", [1] * 30, max_new_tokens=11),
        request_of("fits", [1] * 30, max_new_tokens=10),
        request_of("empty", [], max_new_tokens=1),
        request_of("strange", [115], max_new_tokens=1),
        request_of("negative", [-1], max_new_tokens=1),
        request_of("cold", [1], max_new_tokens=1, temperature=-1),
        request_of("nan", [1], max_new_tokens=1, temperature=float("nan")),
        request_of("top", [1], max_new_tokens=1, top_p=0.0),
        request_of("prefix", [1, 2], max_new_tokens=1, num_prefix=2),
        request_of("old", [1, 2], max_new_tokens=1, pinned_version=3),
        request_of("epoch", [1, 2], max_new_tokens=1, epoch=4),
    )
    assert answers["fits"].reasons == [FinishReason.LENGTH]
    for name in ("long", "budget"):
        assert answers[name].reasons == [FinishReason.ERROR]
        assert "model length 40" in answers[name].error
    for name in ("empty", "strange", "negative", "cold", "nan", "top", "prefix"):
        assert answers[name].reasons == [FinishReason.ERROR], name
    assert answers["old"].reasons == [FinishReason.ABORT]
    assert "version" in answers["old"].error
    assert answers["epoch"].reasons == [FinishReason.ABORT]
    assert "epoch" in answers["epoch"].error


def test_non_finite_logits_end_their_request_alone(build_model: Any, run: Any, request_of: Any) -> None:
    model = build_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    engine = engine_of(model, max_num_seqs=4)
    good = request_of("good", [1, 2, 3], max_new_tokens=8, seed=1, top_k=1)
    expected = run(engine, good)["good"].tokens
    assert 7 not in expected
    for _ in range(3):  # later ones get the row in which the bad one was
        answers = run(engine, request_of("bad", [7] * 20, max_new_tokens=8), good)
        assert answers["bad"].reasons == [FinishReason.ERROR]
        assert "non-finite logits at response position 0" in answers["bad"].error
        assert answers["good"].tokens == expected


def test_aborts_keep_what_was_made_and_leave_the_others_alone(
    build_model: Any, run: Any, request_of: Any, new_answers: Any
) -> None:
    model = build_model("qwen2")
    rng = random.Random(0)
    requests = [request_of(str(i), prompt, max_new_tokens=12, seed=i) for i, prompt in enumerate(prompts(24))]
    whole = run(engine_of(model), *requests)
    for _ in range(10):
        engine, answers = engine_of(model, max_num_seqs=8), new_answers()
        for one in requests:
            engine.submit(one)
        doomed = rng.sample(range(24), 12)
        while engine.has_work():
            engine.step()
            if doomed:
                engine.abort([str(doomed.pop()), "unknown"])
            answers.take(engine.drain(finished_only=rng.random() < 0.5))
        answers.take(engine.drain())
        for name, answer in answers.items():
            assert answer.reasons in ([FinishReason.ABORT], [FinishReason.LENGTH])
            assert answer.tokens == whole[name].tokens[: len(answer.tokens)]
        assert len(answers) == 24


def test_an_id_may_be_used_again_after_its_end(build_model: Any, run: Any, request_of: Any) -> None:
    engine = engine_of(build_model("qwen2"), max_num_seqs=1)
    engine.submit(request_of("other", [1, 2], max_new_tokens=4))
    engine.submit(request_of("a", [1, 2], max_new_tokens=4))
    engine.abort(["a"])
    engine.drain()
    answers = run(engine, request_of("a", [1, 2], max_new_tokens=3))
    assert len(answers["a"].tokens) == 3


def test_more_positions_than_the_model_has_are_refused_at_start(build_model: Any) -> None:
    with pytest.raises(ConfigError, match="300, the model has 256"):
        engine_of(build_model("qwen2"), max_model_len=300)


def test_layers_that_the_cache_does_not_know_are_refused_at_start(build_model: Any) -> None:
    model = build_model("qwen2")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        engine_of(model)
