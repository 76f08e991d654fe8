"""Jagged: one field of many rows, packed: the values one after the other, and the offsets that tell rows apart."""

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Jagged:
    """`values` [sum of lengths, ...] and `offsets` [rows + 1]; row i is values[offsets[i]:offsets[i + 1]].

    A field of scalars has one value a row, so its values are the column. Whether values may be written to is up to who
    made it: of a single row on this node they are a view of shared memory.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        self.values, self.offsets = values, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        """The values of one row, without a copy."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        view: NDArray[Any] = self.values[self.offsets[row] : self.offsets[row + 1]]
        return view

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"Jagged({len(self)} rows, {len(self.values)} values of {self.values.dtype} {self.values.shape[1:]})"

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def torch(self) -> "torch.Tensor":
        """A nested tensor of jagged layout over the same memory."""
        import torch

        return torch.nested.nested_tensor_from_jagged(as_torch(self.values), as_torch(self.offsets))


def as_torch(array: NDArray[Any]) -> "torch.Tensor":
    """A tensor over the same memory, which it keeps alive. Also of a read-only view, which nobody may then write to:
    torch knows no read-only tensors, and has only a warning for them."""
    import torch

    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    flat = np.ascontiguousarray(array)
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.ctypes.data)
    memory.keep = flat  # type: ignore[attr-defined]  # the tensor keeps `memory`, and that the array
    return torch.frombuffer(memory, dtype=dtype).reshape(array.shape)
