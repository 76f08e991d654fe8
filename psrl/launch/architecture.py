"""Whether a model's config, overrides included, says what its weights are. Without torch.

Only what is sure is refused here. What only transformers knows (is there such a key, such a type?) is asked of it, in a
process of its own, if there is doubt: importing it takes seconds.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PATH = "train_actor_rollout_ref.model.path"
_OVERRIDE = "train_actor_rollout_ref.model.override_config"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_PLAIN = ("llama", "mistral", "qwen2")  # head_dim is hidden_size / num_attention_heads unless it is given
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PROBE_TIMEOUT_S = 120.0

Shapes = Mapping[str, tuple[int, ...]]


def architecture_problems(
    model_dir: Path, config: Mapping[str, Any], override: Mapping[str, Any], shapes: Shapes
) -> list[str]:
    """What is wrong with a model's sizes and type, each by the key that says it. `shapes` are of its weights."""

    def said(key: str) -> str:
        where = f"{_OVERRIDE}." if key in override else f"{_PATH}={model_dir}: config.json has "
        return f"{where}{key}={merged[key]}"

    merged = {**config, **override}
    stated = [key for key in _SIZES if merged.get(key) is not None]
    bad = [key for key in stated if type(merged[key]) is not int or merged[key] <= 0]
    problems = [f"{said(key)}: must be a whole number from 1 on" for key in bad]
    named = merged.get("architectures") or []
    if isinstance(named, list) and named and not any(str(name).endswith(_CAUSAL) for name in named):
        problems.append(f"{said('architectures')}: it is no causal language model (...ForCausalLM), only those train")
    if problems:
        return problems
    heads, kv_heads = merged.get("num_attention_heads"), merged.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"{said('num_attention_heads')} is no multiple of num_key_value_heads={kv_heads}")
    if heads and merged.get("hidden_size") and not merged.get("head_dim") and merged["hidden_size"] % heads:
        problems.append(f"{said('hidden_size')} is no multiple of num_attention_heads={heads}")
    if problems:
        return problems
    for key, value, found in _in_weights(merged, shapes):
        if key in stated and merged[key] != value:
            problems.append(f"{said(key)}, but the weights have {value} ({found})")
    return list(dict.fromkeys(problems))


def _in_weights(merged: Mapping[str, Any], shapes: Shapes) -> Iterator[tuple[str, int, str]]:
    """(key, its value by the weights, where that is seen), for what can be seen."""
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is not None and len(embedding) == 2:
        for key, value in zip(("vocab_size", "hidden_size"), embedding, strict=True):
            yield key, value, f"model.embed_tokens.weight is {embedding[0]} x {embedding[1]}"
    layers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    if layers:
        yield "num_hidden_layers", max(layers) + 1, f"up to model.layers.{max(layers)}"
    if merged.get("model_type") not in _PLAIN:
        return
    gate = shapes.get("model.layers.0.mlp.gate_proj.weight")
    if gate is not None:
        yield "intermediate_size", gate[0], f"mlp.gate_proj.weight is {gate[0]} x {gate[1]}"
    heads = merged.get("num_attention_heads")
    head_dim = merged.get("head_dim") or (merged["hidden_size"] // heads if heads and "hidden_size" in merged else 0)
    head_by = f"a head has {head_dim}, by " + ("head_dim" if merged.get("head_dim") else f"num_attention_heads={heads}")
    for key, part in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        shape = shapes.get(f"model.layers.0.self_attn.{part}.weight")
        if shape is not None and head_dim and merged.get(key) and merged[key] * head_dim != shape[0]:
            yield key, shape[0] // head_dim, f"self_attn.{part}.weight is {shape[0]} x {shape[1]} and {head_by}"


def doubts(config: Mapping[str, Any], override: Mapping[str, Any]) -> bool:
    """Whether transformers has to be asked: a key that config.json lacks, a type that it or `architectures` may not
    know."""
    kind = str({**config, **override}.get("model_type", "")).replace("-", "_")
    transformers = importlib.util.find_spec("transformers")
    roots = [] if transformers is None else [Path(root) for root in transformers.submodule_search_locations or ()]
    is_known = bool(kind) and any((root / "models" / kind).is_dir() for root in roots)
    named = [str(name).lower() for name in config.get("architectures") or []]
    fits = not named or any(name.startswith(kind.replace("_", "")) for name in named)
    return bool(set(override) - set(config)) or not is_known or not fits


def ask_transformers(model_dir: Path, override: Mapping[str, Any]) -> list[str]:
    """What it says against this config. Blocking, some seconds; silent if it cannot be asked."""
    command = [sys.executable, "-m", "psrl.train.hf_config", str(model_dir), json.dumps(dict(override), default=str)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return []
    return [done.stdout.strip()] if done.returncode == 2 else []
