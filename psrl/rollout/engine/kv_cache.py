"""Keys and values of the running requests: per layer one tensor [rows, kv_heads, length, head_dim], a row per request.

Rows and lengths are reserved as they are needed, up to fixed limits; a position of a row is written before it is
read, and what lies beyond a row's length is masked but must be finite (0 * NaN is NaN), so memory starts as zeros
and a row that met non-finite values is wiped.
"""

from collections.abc import Sequence

import torch

_LENGTH_STEP = 64


class KVCache:
    """Layers appear with their first write, so that head counts and sizes are the model's own business."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self._max_rows, self._max_length = max_rows, max_length
        self._rows = self._length = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for layer in self._layers.values() for part in layer)

    @torch.inference_mode()
    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` requests of `length` tokens. Grows by doubling: copies are rare, memory follows use."""
        assert rows <= self._max_rows
        assert length <= self._max_length
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = min(self._max_rows, max(rows, 2 * self._rows))
        if length > self._length:
            wanted = -(-max(length, self._length * 3 // 2) // _LENGTH_STEP) * _LENGTH_STEP
            self._length = min(self._max_length, wanted)
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._grown(keys), self._grown(values))

    @torch.inference_mode()
    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's tensors; made in the likeness of key and value ([B, kv_heads, T, head_dim]) the first time."""
        found = self._layers.get(index)
        if found is None:
            found = self._layers[index] = (self._zeros(key), self._zeros(value))
        return found

    @torch.inference_mode()
    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Rows are copied at once: no target may be a source."""
        for keys, values in self._layers.values():
            for part in (keys, values):
                part[targets, :, :length] = part[sources, :, :length]

    @torch.inference_mode()
    def wipe(self, row: int) -> None:
        for keys, values in self._layers.values():
            keys[row].zero_()
            values[row].zero_()

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = self._zeros(old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new
