"""What one version of the weights consists of: each tensor's name, dtype, shape and place. Pure; no torch.

Names are those of the Hugging Face checkpoint. Tensors are laid out by name, each at a multiple of 64 bytes, so the
same model gives the same manifest in every process, whatever order it lists them in. Tied weights stand once, under
the name that was met first; the other names are in `tied`.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psrl.errors import StorageError

ALIGNMENT = 64

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Size of one element by the dtype's name, which is torch's without `torch.`."""

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}


def canonical_name(name: str) -> str:
    """The checkpoint's name of a parameter, whatever torch.compile, checkpointing or DDP wrapped around it.

    `module` counts as a wrapper only in front, where DDP puts it.
    """
    parts = name.split(".")
    return ".".join(part for i, part in enumerate(parts) if part not in _WRAPPERS or (part == "module" and i > 0))


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor stands in a version: `nbytes` bytes from `offset` on, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of a version, sorted by name. Make it with `Manifest.of`.

    `total_bytes` is the size of a version with the gaps between tensors; `tied` has (other name, name in `tensors`).
    """

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    tied: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, named: Iterable[tuple[str, str, Sequence[int]]], tied: Mapping[str, str] | None = None) -> "Manifest":
        """Lay out (name, dtype, shape). Raises StorageError for a name twice, an unknown dtype or a bad tie."""
        specs: list[TensorSpec] = []
        offset = 0
        for name, dtype, shape in sorted(named, key=lambda entry: entry[0]):
            if specs and specs[-1].name == name:
                raise StorageError(f"weights: tensor {name} is listed twice")
            nbytes = _num_bytes(name, dtype, shape)
            specs.append(TensorSpec(name, dtype, tuple(int(size) for size in shape), offset, nbytes))
            offset = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
        names = {spec.name for spec in specs}
        ties = tuple(sorted((tied or {}).items()))
        for other, name in ties:
            if other in names or name not in names:
                raise StorageError(f"weights: {other} cannot be tied to {name}")
        return cls(tuple(specs), max(offset, ALIGNMENT), ties)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone: what a writer must put."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def digest(self) -> bytes:
        """16 bytes that tell this manifest from others; a slot carries them."""
        return hashlib.sha256(self.encode()).digest()[:16]

    @property
    def hash(self) -> str:
        """`digest` in hexadecimal, for messages."""
        return self.digest.hex()

    def by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> "Manifest":
        """The inverse of `encode`. Raises StorageError if it is not a manifest that `of` could have made."""
        try:
            manifest = msgspec.msgpack.decode(data, type=Manifest)
        except msgspec.MsgspecError as error:
            raise StorageError(f"weights: not a manifest: {error}") from error
        made = Manifest.of([(t.name, t.dtype, t.shape) for t in manifest.tensors], dict(manifest.tied))
        if made != manifest:
            raise StorageError("weights: the manifest's offsets or sizes do not follow from its tensors")
        return manifest


def _num_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    if dtype not in ITEM_BYTES:
        raise StorageError(f"weights: tensor {name} has dtype {dtype}, known are {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape):
        raise StorageError(f"weights: tensor {name} has shape {tuple(shape)}")
    return ITEM_BYTES[dtype] * math.prod(shape)
