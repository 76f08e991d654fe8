"""Floating-point work of a decoder-only model by the field's usual formula, for MFU figures. Pure.

The formula counts embedding and head both and attention without its causal half; so figures agree with other systems'.
"""

from collections.abc import Sequence
from typing import Protocol

DEVICE_TFLOPS = {"H100": 989.0, "H800": 989.0, "H200": 989.0, "A100": 312.0, "A800": 312.0, "B200": 2250.0}
DEVICE_TFLOPS |= {"L40S": 362.05, "CPU": 0.448}


class ModelShape(Protocol):
    """The fields of a Hugging Face config of the Llama and Qwen2 kind."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    num_attention_heads: int
    intermediate_size: int


def training_tflops(shape: ModelShape, sequence_lengths: Sequence[int]) -> float:
    """10^12 operations of one forward and backward pass over the sequences; a third of it for forward alone."""
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    query = shape.num_attention_heads * head_dim
    key = value = shape.num_key_value_heads * head_dim
    per_layer = 3 * shape.hidden_size * shape.intermediate_size + shape.hidden_size * (query + key + value + query)
    dense = shape.num_hidden_layers * per_layer + 2 * shape.vocab_size * shape.hidden_size
    squares = sum(length * length for length in sequence_lengths)
    attention = squares * head_dim * shape.num_attention_heads * shape.num_hidden_layers
    return float(6 * dense * sum(sequence_lengths) + 6 * attention) / 1e12


def mfu(tflops: float, elapsed_s: float, device: str, num_devices: int) -> float | None:
    """Share of the devices' peak; None for a device whose name holds none of the table's."""
    peak = next((peak for name, peak in DEVICE_TFLOPS.items() if name.lower() in device.lower()), None)
    if peak is None or elapsed_s <= 0:
        return None
    return tflops / elapsed_s / peak / num_devices
