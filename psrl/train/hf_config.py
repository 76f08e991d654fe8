"""A model's config as transformers reads it, with overrides: what the trainer starts from.

`python -m psrl.train.hf_config DIRECTORY OVERRIDES_JSON` only looks: status 2 with the problem on stdout.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from psrl.errors import ConfigError

_KEY = "train_actor_rollout_ref.model"


def load_config(path: Path, override: Mapping[str, Any]) -> Any:
    """Raises ConfigError: no such type, none of a causal language model, another than `architectures` says, or a key
    that it does not have."""
    with named_errors(path):
        kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind is not None and kind not in CONFIG_MAPPING_NAMES:
        raise ConfigError(f"{_KEY}.path={path}: model_type={kind} is unknown to the transformers that is installed")
    with named_errors(path):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if causal is None:
        raise ConfigError(f"{_KEY}.path={path}: model_type={config.model_type} has no causal language model")
    classes = (causal,) if isinstance(causal, str) else tuple(causal)
    named = config.architectures
    if named and not set(named) & set(classes):
        raise ConfigError(
            f"{_KEY}.path={path}: config.json has architectures={named}, but model_type={config.model_type} means "
            f"{' or '.join(classes)}"
        )
    for key, value in override.items():
        if not hasattr(config, key):
            raise ConfigError(f"{_KEY}.override_config.{key}: {path} has no such key")
        setattr(config, key, value)
    return config


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """What transformers says of a model that it cannot load, as a ConfigError that names the model."""
    try:
        yield
    except Exception as error:  # safetensors and huggingface_hub raise classes of their own
        said = str(error).strip() or type(error).__name__
        raise ConfigError(f"{_KEY}.path={path}: transformers cannot load it: {said}") from error


def main() -> int:
    try:
        load_config(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except ConfigError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
