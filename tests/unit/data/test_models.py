"""The embedded model directories load as any Hugging Face model does."""

from pathlib import Path

import pytest

from psrl.data.models import smollm2, tiny
from psrl.errors import ConfigError


def test_tiny_loads_with_tied_embeddings_and_is_seeded(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    state = torch.get_rng_state()
    one, same, other = tiny(tmp_path / "0", 0), tiny(tmp_path / "0b", 0), tiny(tmp_path / "1", 1)
    assert torch.equal(torch.get_rng_state(), state)
    weights = (one / "model.safetensors").read_bytes()
    assert weights == (same / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(one)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 114_560
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)


def test_smollm2_refuses_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype int4 is unknown: use bfloat16 or float32"):
        smollm2(tmp_path, dtype="int4")


@pytest.mark.timeout(900)  # the model may be made first
def test_smollm2_speaks(smollm2_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from psrl.data import ChatTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2_dir), ChatTokenizer.load(smollm2_dir)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = torch.tensor([tokenizer.encode_prompt([{"role": "user", "content": "What is the capital of France?"}])])
    mask = torch.ones_like(ids)
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer.tolist())
    assert answer[-1].item() in tokenizer.eos_ids
