"""The packed forward pass equals one sequence at a time through Hugging Face; chunking changes nothing."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from psrl.errors import ConfigError
from psrl.train.hf_config import load_config
from psrl.train.logprobs import token_log_probs
from psrl.train.model import load
from psrl.train.packed import Layout, pack

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
KINDS = {
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "llama-untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
}


@pytest.fixture(params=KINDS)
def model_dir(request, tmp_path):
    torch.manual_seed(0)
    KINDS[request.param]().save_pretrained(tmp_path)
    return tmp_path


def sequences(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    shapes = [(3, 5), (1, 9), (7, 1), (2, 20), (4, 0), (5, 6)]
    prompts = [rng.integers(0, 61, p).astype(np.int32) for p, _ in shapes]
    responses = [rng.integers(0, 61, t).astype(np.int32) for _, t in shapes]
    masks = [(rng.random(t) < 0.8).astype(np.uint8) for _, t in shapes]
    return prompts, responses, masks


def test_packed_equals_own_logits_one_by_one(model_dir) -> None:
    model = load(model_dir)
    prompts, responses, masks = sequences()
    log_probs, entropies = model(pack(prompts, responses, masks), 0.7, "value")
    eager = type(model.lm).from_pretrained(model_dir, attn_implementation="eager").eval()
    expected, expected_entropy = [], []
    for prompt, response in zip(prompts, responses):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = eager(ids[None]).logits[0, len(prompt) - 1 : len(ids) - 1] / 0.7
        all_log_probs = torch.log_softmax(logits, -1)
        expected.append(all_log_probs.gather(-1, ids[len(prompt) :, None])[:, 0])
        expected_entropy.append(-(all_log_probs.exp() * all_log_probs).sum(-1))
    torch.testing.assert_close(log_probs, torch.cat(expected), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, torch.cat(expected_entropy), atol=2e-5, rtol=1e-5)


def test_checkpointing_and_chunks_change_no_gradient(model_dir) -> None:
    batch = pack(*sequences())
    plain, saving = load(model_dir), load(model_dir, checkpointing=True)
    (plain(batch)[0] * batch.mask).sum().backward()
    (saving(batch)[0] * batch.mask).sum().backward()
    for (name, a), (_, b) in zip(plain.weights(), saving.weights()):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_chunked_log_probs_equal_the_whole_matrix(entropy) -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 8, requires_grad=True)
    hidden = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(0, 37, (50,))
    results = []
    for chunk in (50, 7):
        log_probs, entropies = token_log_probs(
            hidden, weight, None, targets, temperature=1.3, entropy=entropy, chunk_tokens=chunk
        )
        assert entropies.requires_grad == (entropy == "gradient")
        loss = log_probs.sum() + 0.1 * entropies.sum()
        results.append((log_probs, entropies, *torch.autograd.grad(loss, (hidden, weight))))
    for whole, chunked in zip(*results):
        torch.testing.assert_close(whole, chunked)


def test_layout_pads_little_and_restores_the_order() -> None:
    lengths = [3, 100, 5, 4, 90, 1, 3]
    layout = Layout.of(lengths)
    padded = sum(bucket.num_rows * bucket.width for bucket in layout.buckets)
    assert padded <= 1.25 * sum(lengths)
    positions = torch.cat([bucket.index for bucket in layout.buckets])
    assert layout.restore is not None
    assert positions[layout.restore].tolist() == list(range(sum(lengths)))
    assert layout.offsets.tolist() == [0, 3, 103, 108, 112, 202, 203, 206]
    assert Layout.of([4, 4]).restore is None


def test_masters_are_float32_whatever_the_file_holds(tmp_path) -> None:
    KINDS["qwen2-tied"]().to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert {weight.dtype for _, weight in model.weights()} == {torch.float32}
    assert [name for name, _ in model.weights()].count("lm_head.weight") == 0  # tied, so once


def test_bad_directories_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path)
    KINDS["qwen2-tied"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"override_config\.no_such_key"):
        load(tmp_path, override_config={"no_such_key": 1})
    assert load(tmp_path, override_config={"max_position_embeddings": 999}).lm.config.max_position_embeddings == 999


@pytest.mark.parametrize(
    ("changed", "override", "said"),
    [
        ({"model_type": "foobar"}, {}, "model_type=foobar is unknown to the transformers that is installed"),
        ({"model_type": "bert"}, {}, r"has architectures=\['Qwen2ForCausalLM'\], but model_type=bert means Bert"),
        ({"model_type": "vit", "architectures": None}, {}, "model_type=vit has no causal language model"),
        ({}, {"foo": 13}, r"override_config\.foo: .* has no such key"),
    ],
)
def test_configs_of_something_else_are_refused(tiny_model, tmp_path, changed, override, said) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path, override)


def test_weights_that_are_not_finite_are_said_to_be_so(tiny_model, tmp_path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"hold NaN or infinity, in 1 tensors, the first: model\.norm\.weight"):
        load(tmp_path / "model")
