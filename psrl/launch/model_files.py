"""What a Hugging Face model directory holds, read without torch: the manifest of its weights, its context length.

Names and shapes come from the safetensors headers; trainer and replicas check theirs against the manifest made here.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

import msgspec

from psrl.errors import ConfigError
from psrl.weights.manifest import Manifest

_KEY = "train_actor_rollout_ref.model.path"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json. Raises ConfigError if the directory is none, or the file is missing or broken."""
    if not model_dir.is_dir():
        raise ConfigError(
            f"{_KEY}={model_dir}: there is no such directory. Models are not downloaded: give the directory of a "
            "Hugging Face model; `psrl model` makes small ones"
        )
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{_KEY}={model_dir}: it has no config.json, so it is no Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return config


def manifest_of(model_dir: Path, dtype: str) -> Manifest:
    """The weights of the model as they are published in `dtype`. Tied output heads stand once, under the embedding's
    name.

    Raises ConfigError if there are no safetensors files or one is damaged.
    """
    config = read_config(model_dir)
    entries: dict[str, _Entry] = {}
    for path in weight_files(model_dir):
        entries.update(_header(path))
    tied = config.get("tie_word_embeddings", config.get("model_type") not in ("llama", "mistral"))
    if tied and "lm_head.weight" in entries and "model.embed_tokens.weight" in entries:
        del entries["lm_head.weight"]
    return Manifest.of([(name, dtype, entry.shape) for name, entry in entries.items()])


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of the model. Raises ConfigError if there are none or the index names one that is
    missing.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} cannot be read: {error!r}") from error
        files = [model_dir / name for name in names]
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            raise ConfigError(f"{_KEY}={model_dir}: the index names files that are missing: {', '.join(missing)}")
        return files
    single = model_dir / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"{_KEY}={model_dir}: it has no model.safetensors; convert other weight files with transformers: "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return [single]


def _header(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            size = file.read(8)
            if size == _LFS_POINTER[:8]:
                raise ValueError("it is the pointer of a Git LFS file; `git lfs pull` fetches the file itself")
            if len(size) < 8:
                raise ValueError(f"it ends after {num_bytes} bytes")
            length = struct.unpack("<Q", size)[0]
            if length > min(_MAX_HEADER_BYTES, num_bytes):
                raise ValueError(f"its header claims {length} bytes, the file has {num_bytes}")
            raw = file.read(length)
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items() if name != "__metadata__"
        }
        needed = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if num_bytes != needed:
            raise ValueError(f"its header tells of {needed} bytes, the file has {num_bytes}: was it copied whole?")
        return entries
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{_KEY}: {path} is not a whole safetensors file: {error}") from error


def cache_values(config: dict[str, Any], override: dict[str, Any]) -> int:
    """Numbers that keys and values of one token come to, over all layers. 0 if the config does not say."""
    merged = {**config, **override}
    heads = merged.get("num_attention_heads")
    layers, hidden = merged.get("num_hidden_layers"), merged.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int) and heads > 0):
        return 0
    head_dim = merged.get("head_dim") or hidden // heads
    return 2 * layers * int(merged.get("num_key_value_heads") or heads) * int(head_dim)


def max_positions(config: dict[str, Any], override: dict[str, Any]) -> int | None:
    """The model's context length in tokens, if it says one."""
    value = override.get("max_position_embeddings", config.get("max_position_embeddings"))
    return value if isinstance(value, int) else None
