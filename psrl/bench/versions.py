"""A model that nobody trained: shapes of a real one, and steps that change as many values as AdamW's.

Weights are normal with the spread of SmolLM2's. A step is what Adam makes of gradients that are noise: a normal change
of lr times 0.229 (the root of (1 - beta1) / (1 + beta1)). In bf16 that changes 1.2 % of the values at lr 1e-5 and 3.7 %
at 4e-5, nine in ten of them by one ulp: what training SmolLM2 does.
"""

import math
from collections.abc import Iterator

import torch

from psrl.weights.manifest import Manifest

_SPREAD, _STEP = 0.16, math.sqrt(0.1 / 1.9)
_PIECE = 1 << 22


def flat_model(num_bytes: int) -> Manifest:
    """One bf16 tensor."""
    return Manifest.of([("weights", "bfloat16", (num_bytes // 2,))])


def smollm2_135m() -> Manifest:
    """SmolLM2-135M's tensors in bf16, 269 MB: a Llama with tied embeddings."""
    hidden, intermediate, vocabulary, key_values = 576, 1536, 49152, 3 * 64
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(30):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (key_values, hidden),
            f"{at}.self_attn.v_proj.weight": (key_values, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{at}.mlp.up_proj.weight": (intermediate, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, intermediate),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    named = [(name, "bfloat16", shape) for name, shape in shapes.items()]
    return Manifest.of(named, {"lm_head.weight": "model.embed_tokens.weight"})


MODELS = {"smollm2-135m": smollm2_135m}


class Masters:
    """fp32 masters of a bf16 `manifest`, stepped in place."""

    def __init__(self, manifest: Manifest, seed: int = 0) -> None:
        self.manifest = manifest
        self._chance = torch.Generator().manual_seed(seed)
        self._flat = torch.empty(manifest.total_bytes // 2)
        for piece in self._pieces():
            piece.normal_(0, _SPREAD, generator=self._chance)

    def step(self, lr: float) -> None:
        for piece in self._pieces():
            piece.add_(torch.randn(piece.shape, generator=self._chance), alpha=-lr * _STEP)

    def version(self) -> torch.Tensor:
        """uint8 [total_bytes], laid out as the manifest says."""
        published = self._flat.to(torch.bfloat16).view(torch.uint8)
        for spec, end in zip(self.manifest.tensors, self._ends()):
            published[spec.offset + spec.nbytes : end] = 0  # gaps between tensors
        return published

    def _ends(self) -> Iterator[int]:
        yield from (spec.offset for spec in self.manifest.tensors[1:])
        yield self.manifest.total_bytes

    def _pieces(self) -> Iterator[torch.Tensor]:
        for at in range(0, len(self._flat), _PIECE):
            yield self._flat[at : at + _PIECE]
