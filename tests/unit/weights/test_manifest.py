import random

import msgspec
import pytest

from psrl.errors import StorageError
from psrl.weights.manifest import ALIGNMENT, Manifest, TensorSpec, canonical_name

MODEL = [
    ("model.norm.weight", "bfloat16", (5,)),
    ("model.embed_tokens.weight", "bfloat16", (7, 5)),
    ("scale", "float32", ()),
    ("empty", "int64", (0, 4)),
]


def test_layout_is_by_name_and_aligned():
    manifest = Manifest.of(MODEL, {"lm_head.weight": "model.embed_tokens.weight"})
    assert manifest.tensors == (
        TensorSpec("empty", "int64", (0, 4), 0, 0),
        TensorSpec("model.embed_tokens.weight", "bfloat16", (7, 5), 0, 70),
        TensorSpec("model.norm.weight", "bfloat16", (5,), 128, 10),
        TensorSpec("scale", "float32", (), 192, 4),
    )
    assert manifest.total_bytes == 256
    assert manifest.payload_bytes == 84
    assert manifest.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert all(spec.offset % ALIGNMENT == 0 for spec in manifest.tensors)


def test_same_model_in_another_order_has_the_same_hash():
    shuffled = random.Random(0).sample(MODEL, len(MODEL))
    assert Manifest.of(shuffled).hash == Manifest.of(MODEL).hash
    assert len(Manifest.of(MODEL).hash) == 32


@pytest.mark.parametrize(
    "changed",
    [
        [("other.weight", *MODEL[0][1:]), *MODEL[1:]],
        [(MODEL[0][0], "float16", MODEL[0][2]), *MODEL[1:]],
        [(MODEL[0][0], "bfloat16", (5, 1)), *MODEL[1:]],
        MODEL[1:],
    ],
)
def test_any_difference_changes_the_hash(changed: list):
    assert Manifest.of(changed).hash != Manifest.of(MODEL).hash


def test_ties_are_part_of_the_hash():
    assert Manifest.of(MODEL, {"lm_head.weight": "scale"}).hash != Manifest.of(MODEL).hash


@pytest.mark.parametrize(
    ("named", "tied", "says"),
    [
        ([MODEL[0], MODEL[0]], {}, "twice"),
        ([("a", "float7", (1,))], {}, "float7"),
        ([("a", "int8", (-1,))], {}, "shape"),
        (MODEL, {"scale": "empty"}, "tied"),
        (MODEL, {"head": "nowhere"}, "tied"),
    ],
)
def test_nonsense_is_refused(named: list, tied: dict, says: str):
    with pytest.raises(StorageError, match=says):
        Manifest.of(named, tied)


def test_encoding_is_checked():
    manifest = Manifest.of(MODEL)
    assert Manifest.decode(manifest.encode()) == manifest
    spec = msgspec.structs.replace(manifest.tensors[-1], offset=0)  # overlaps another
    with pytest.raises(StorageError, match="offsets"):
        Manifest.decode(msgspec.structs.replace(manifest, tensors=(*manifest.tensors[:-1], spec)).encode())
    with pytest.raises(StorageError, match="not a manifest"):
        Manifest.decode(b"\x00")


def test_nothing_to_publish_still_has_a_place():
    assert Manifest.of([]).total_bytes == ALIGNMENT


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("module.lm_head.weight", "lm_head.weight"),
        ("model.module.weight", "model.module.weight"),
        ("_fsdp_wrapped_module.a", "a"),
    ],
)
def test_wrappers_do_not_change_names(wrapped: str, name: str):
    assert canonical_name(wrapped) == name
