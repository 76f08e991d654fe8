"""How much arithmetic a step is, and what share of the device's peak that is. Pure.

The formula is the field's (`perf/mfu/*`): embedding and head both counted, attention without the causal half.
"""

from collections.abc import Sequence
from typing import Any

_PEAK_TFLOPS = {
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "L40S": 362.05,
}
_CPU_TFLOPS = 0.448


def training_flops(config: Any, lengths: Sequence[int]) -> float:
    """Floating-point operations of forward and backward over sequences of these lengths.

    `config` is a Hugging Face config with hidden_size, vocab_size, num_hidden_layers, num_attention_heads,
    num_key_value_heads, intermediate_size and perhaps head_dim.
    """
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    dense = layers * (3 * hidden * config.intermediate_size + hidden * (2 * q_size + 2 * kv_size))
    dense += 2 * config.vocab_size * hidden
    attention = sum(length * length for length in lengths) * head_dim * heads * layers
    return float(6 * dense * sum(lengths) + 6 * attention)


def peak_tflops(device_name: str | None) -> float:
    """Peak bf16 TFLOP/s of a CUDA device by its name, None for the CPU; infinite for an unknown one (so MFU is 0)."""
    if device_name is None:
        return _CPU_TFLOPS
    return next((peak for name, peak in _PEAK_TFLOPS.items() if name in device_name), float("inf"))


def mfu(flops: float, seconds: float, world_size: int, device_name: str | None) -> float:
    """Share of the peak of `world_size` devices."""
    return flops / seconds / 1e12 / peak_tflops(device_name) / world_size if seconds > 0 else 0.0
