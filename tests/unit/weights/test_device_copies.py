"""Loading that is recorded, then replayed over other bytes in the same places: does it give what loading gives?"""

from collections.abc import Callable

import pytest
import torch

from psrl.weights.device_copies import DirectCopies, record

H, Q, KV, F, V = 8, 8, 4, 12, 20


def checkpoint(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Views of one buffer, as staging gives them."""
    shapes = {"embed": (V, H), "q": (Q, H), "k": (KV, H), "v": (KV, H), "gate": (F, H), "up": (F, H), "norm": (H,)}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    flat = torch.randn(sum(sizes)).to(dtype)
    return {name: part.view(shapes[name]) for name, part in zip(shapes, flat.split(sizes))}


class Fused(torch.nn.Module):
    """An engine's layout: projections fused, the head tied to the embedding, a buffer that is loaded."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        for name, shape in {"embed": (V, H), "qkv": (Q + 2 * KV, H), "gate_up": (2 * F, H), "empty": (0, H)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.head = self.embed
        self.register_buffer("norm", torch.zeros(H, dtype=dtype))

    def load(self, tensors: dict[str, torch.Tensor], embedding: str = "embed") -> None:
        self.embed.data.copy_(tensors[embedding])
        self.qkv.data[:Q].copy_(tensors["q"])
        self.qkv.data.narrow(0, Q, KV).copy_(tensors["k"])
        self.qkv[Q + KV :].copy_(tensors["v"])
        for shard, part in enumerate(self.gate_up.data.chunk(2)):
            part.copy_(tensors[("gate", "up")[shard]])
        self.norm.copy_(tensors["norm"])

    def record(self, tensors: dict[str, torch.Tensor], load: Callable[[], object]) -> DirectCopies | str:
        named = self.named_parameters(remove_duplicate=False)
        return record(load, tensors.items(), named, self.named_buffers())

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


def require_equal_to_loading(model: Fused, tensors: dict[str, torch.Tensor], load: Callable[[], object]) -> None:
    """Record, then change the bytes: replaying must give what a load of them gives, in the same memory."""
    copies = model.record(tensors, load)
    assert isinstance(copies, DirectCopies), copies
    loaded = model.state()
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    for round_ in range(3):
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
        copies.apply()
        replayed = model.state()
        for tensor in model.state_dict().values():
            tensor.zero_()
        load()
        expected = model.state()
        assert all(torch.equal(replayed[name], expected[name]) for name in expected)
        assert not torch.equal(replayed["qkv"], loaded["qkv"]), round_
    assert places == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fused_tied_and_buffers(mode: Callable[[], torch.no_grad]) -> None:
    model, tensors = Fused(), checkpoint()
    with mode():
        require_equal_to_loading(model, tensors, lambda: model.load(tensors))


@pytest.mark.parametrize("of_checkpoint", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_model", [torch.float32, torch.bfloat16])
def test_casts(of_checkpoint: torch.dtype, of_model: torch.dtype) -> None:
    model, tensors = Fused(of_model), checkpoint(of_checkpoint)
    require_equal_to_loading(model, tensors, lambda: model.load(tensors))

    def cast_first() -> None:
        cast = {name: tensor.to(of_model, copy=True) for name, tensor in tensors.items()}
        model.load(cast)

    require_equal_to_loading(model, tensors, cast_first)


def test_rows_and_columns_of_a_shard() -> None:
    """Tensor parallel ranks take rows of some and columns of others, also after a cast."""
    whole = torch.randn(2, 16, 8)
    tensors = {"rows": whole[0], "columns": whole[1]}
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.zeros(shape), False) for name, shape in {"r": (8, 8), "c": (16, 4)}.items()}
    )

    def load() -> None:
        model["r"].data.copy_(tensors["rows"].clone()[8:])
        model["c"].data.copy_(tensors["columns"].narrow(1, 4, 4))

    copies = record(load, tensors.items(), model.named_parameters())
    assert isinstance(copies, DirectCopies), copies
    whole.copy_(torch.randn(2, 16, 8))
    copies.apply()
    assert torch.equal(model["r"], whole[0, 8:])
    assert torch.equal(model["c"], whole[1, :, 4:])


def test_both_names_of_tied_weights_and_scalars_that_spread() -> None:
    tensors = {"a": torch.randn(4), "same": torch.randn(4), "scale": torch.randn(())}
    one, scales = torch.nn.Parameter(torch.zeros(4), False), torch.nn.Parameter(torch.zeros(3), False)

    def load() -> None:
        one.data.copy_(tensors["a"])
        one.data.copy_(tensors["same"])
        scales.data.copy_(tensors["scale"])

    copies = record(load, tensors.items(), [("one", one), ("other", one), ("scales", scales)])
    assert isinstance(copies, DirectCopies), copies
    assert copies.num_copies == 2
    tensors["same"].copy_(torch.arange(4.0))
    tensors["scale"].fill_(7)
    copies.apply()
    assert one.tolist() == [0, 1, 2, 3]
    assert scales.tolist() == [7, 7, 7]


def test_foreach_copies_count_as_copies() -> None:
    tensors = {"a": torch.randn(4), "b": torch.randn(2)}
    model = torch.nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(2)}).requires_grad_(False)
    copies = record(
        lambda: torch._foreach_copy_([model["a"], model["b"]], [tensors["a"], tensors["b"]]),
        tensors.items(),
        model.named_parameters(),
    )
    assert isinstance(copies, DirectCopies), copies
    assert copies.num_copies == 2
    assert copies.num_bytes == 24


def test_a_freed_cast_is_not_taken_for_what_comes_to_its_place() -> None:
    tensors = {"a": torch.randn(64)}
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64), False)

    def load() -> None:
        tensors["a"].to(torch.float64)
        for _ in range(50):
            parameter.data.copy_(torch.ones(64, dtype=torch.float64))

    assert record(load, tensors.items(), [("w", parameter)]) == (
        "w is filled from a tensor that was computed; w is not filled as a whole"
    )


def twice(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.embed.data.mul_(2)


def computed(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.qkv.data.copy_(torch.cat([tensors["q"], tensors["k"], tensors["v"]]))


def two_casts(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load({**tensors, "gate": tensors["gate"].to(torch.float16).to(torch.bfloat16)})


def changed_cast(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load({**tensors, "gate": tensors["gate"].clone().add_(1)})


def other_cast(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load({**tensors, "gate": tensors["gate"].to(torch.float16)})


def lacking(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.qkv.data[:Q].copy_(tensors["q"])
    model.qkv.data[Q + KV :].copy_(tensors["v"])
    model.gate_up.data[:F].copy_(tensors["gate"])


def columns(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.embed.data[:, :4].copy_(tensors["embed"][:, 4:])


def overlapping(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.qkv.data[Q - 1 : Q + KV - 1].copy_(tensors["k"])


def moved(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    model.embed.data = tensors["embed"].clone()


def aside(model: Fused, tensors: dict[str, torch.Tensor]) -> None:
    model.load(tensors)
    torch.empty_like(tensors["up"]).copy_(tensors["up"])


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (twice, "embed is written by aten.mul_"),
        (computed, "qkv is filled from a tensor that was computed"),
        (two_casts, "gate_up is filled from a tensor that was computed"),
        (changed_cast, "gate_up is filled from a tensor that was computed"),
        (other_cast, "gate_up is filled from a tensor that was computed"),
        (lacking, "embed is not filled as a whole; qkv is not filled as a whole; gate_up is not filled as a whole"),
        (columns, "a part of embed that is filled is not contiguous"),
        (overlapping, "copies overlap in qkv"),
        (moved, "embed was moved"),
        (aside, "up goes to what is no parameter or buffer"),
    ],
)
def test_what_cannot_be_replayed_is_told_and_loaded(load: Callable, reason: str) -> None:
    model, tensors = Fused(), checkpoint()
    outcome = model.record(tensors, lambda: load(model, tensors))
    assert isinstance(outcome, str)
    assert reason in outcome
    assert torch.equal(model.qkv[:Q], tensors["q"]) or load is overlapping


def test_what_loading_raises_passes() -> None:
    model, tensors = Fused(), checkpoint()
    with pytest.raises(KeyError):
        model.record(tensors, lambda: model.load(tensors, embedding="wte"))
