"""What is read of a model directory without torch, against what transformers makes of it."""

from pathlib import Path

import pytest

from psrl.errors import ConfigError
from psrl.launch.model_files import cache_values, manifest_of, max_positions, read_config


def small(path: Path, *, tied: bool, kv_heads: int) -> int:
    """A Qwen2 directory; the number of its parameters, tied ones once."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_the_manifest_has_each_parameter_once(tmp_path: Path, tied: bool) -> None:
    num_parameters = small(tmp_path, tied=tied, kv_heads=2)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        manifest = manifest_of(tmp_path, dtype)
        assert manifest.payload_bytes == num_parameters * size
        assert ("lm_head.weight" in manifest.by_name()) is not tied


def test_sizes_of_the_cache_follow_the_heads_that_keys_have(tmp_path: Path) -> None:
    small(tmp_path, tied=True, kv_heads=2)
    config = read_config(tmp_path)
    assert cache_values(config, {}) == 2 * 3 * 2 * 16
    assert cache_values(config, {"num_hidden_layers": 1}) == 2 * 2 * 16
    assert cache_values({}, {}) == 0
    assert max_positions(config, {}) == 128
    assert max_positions(config, {"max_position_embeddings": 256}) == 256


def test_a_directory_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        manifest_of(tmp_path, "float32")
    with pytest.raises(ConfigError, match="no such directory"):
        read_config(tmp_path / "nowhere")
