"""Sizes that a model's config states against its weights; what is sure and what has to be asked."""

from pathlib import Path
from typing import Any

import pytest

from psrl.launch.architecture import architecture_problems, doubts

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": None,
}
SHAPES = {
    "model.embed_tokens.weight": (50, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.1.mlp.gate_proj.weight": (96, 64),
    "model.norm.weight": (64,),
}
KEY = "train_actor_rollout_ref.model.override_config"


def problems(**override: Any) -> list[str]:
    return architecture_problems(Path("m"), CONFIG, override, SHAPES)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"vocab_size": 5}, "vocab_size=5, but the weights have 50 (model.embed_tokens.weight is 50 x 64)"),
        ({"hidden_size": 32}, "hidden_size=32, but the weights have 64"),
        ({"hidden_size": 13}, "hidden_size=13 is no multiple of num_attention_heads=4"),
        ({"intermediate_size": 97}, "intermediate_size=97, but the weights have 96"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3, but the weights have 2 (up to model.layers.1)"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number from 1 on"),
        ({"num_attention_heads": 4.0}, "num_attention_heads=4.0: must be a whole number from 1 on"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4, but the weights have 2"),
        ({"head_dim": 8}, "num_attention_heads=4, but the weights have 8"),
        ({"architectures": ["T5Model"]}, "architectures=['T5Model']: it is no causal language model"),
    ],
)
def test_sizes_that_do_not_fit_are_named(override: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in problems(**override)), problems(**override)
    merged = architecture_problems(Path("m"), CONFIG | override, {}, SHAPES)
    assert any("m: config.json has " in problem and said in problem for problem in merged)


def test_what_fits_and_what_cannot_be_seen_is_accepted() -> None:
    assert problems() == []
    assert problems(max_position_embeddings=2048, rope_theta=1.0, head_dim=16) == []
    assert architecture_problems(Path("m"), {}, {}, SHAPES) == []
    assert architecture_problems(Path("m"), {"model_type": "gpt2", "n_head": 2}, {}, {"wte.weight": (5, 4)}) == []
    unlike = {"model_type": "other", "num_attention_heads": 4, "hidden_size": 64}  # its projections may be otherwise
    assert (
        architecture_problems(Path("m"), unlike, {}, SHAPES | {"model.layers.0.self_attn.q_proj.weight": (9, 64)}) == []
    )


def test_transformers_is_asked_only_in_doubt() -> None:
    assert not doubts(CONFIG, {})
    assert not doubts(CONFIG, {"vocab_size": 5})
    assert not doubts({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, {})
    assert doubts(CONFIG, {"foo": 13})
    assert doubts(CONFIG | {"model_type": "bert"}, {})
    assert doubts(CONFIG | {"model_type": "foobar", "architectures": None}, {})
    assert doubts({}, {})
