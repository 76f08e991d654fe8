"""Write a Hugging Face directory: config and tokenizer files of the base model, weights of ours."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors.torch import save_file
from torch import Tensor

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")


def export_model(base_dir: str | Path, out_dir: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Make `out_dir` loadable by AutoModelForCausalLM and AutoTokenizer.

    `base_dir` gives everything but weights; both may be the same directory. `weights` have Hugging Face names, tied
    ones once. The config's dtype becomes that of the weights.
    """
    base, out = Path(base_dir), Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    if base.resolve() != out.resolve():
        for file in sorted(base.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, out / file.name)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config = msgspec.json.decode((base / "config.json").read_bytes())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (out / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    aside = out / "model.safetensors.tmp"
    contiguous = {name: tensor.contiguous() if tensor.is_cpu else tensor.cpu() for name, tensor in weights.items()}
    save_file(contiguous, aside, metadata={"format": "pt"})
    aside.replace(out / "model.safetensors")
