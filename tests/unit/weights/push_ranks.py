"""Trainer ranks of a test, as processes over gloo: they shard a model by FSDP2 and HSDP and push it.

Rank 0 looks at what arrived: each tensor bit for bit, and the row and column slices that an engine's ranks take. Ranks
are forked once everything is imported, which is most of the time otherwise.
"""

import os
import socket
import sys
import traceback
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from psrl._core import Segment, WeightStore
from psrl.train.ranks import Ranks
from psrl.weights.copies import apply
from psrl.weights.manifest import Manifest, canonical_name
from psrl.weights.publish import WeightPublisher, describe
from psrl.weights.reshard import Part, dim_slice, pull_plan
from psrl.weights.subscribe import WeightSubscriber

SIZE = 17  # not divisible by 2 or 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, 4 * SIZE)
        self.down = nn.Linear(4 * SIZE, SIZE, bias=False)
        self.scale = nn.Parameter(torch.ones(1))  # most ranks have none of it


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * SIZE + 1, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(SIZE, 2 * SIZE + 1, bias=False)
        self.head.weight = self.embed.weight


def random_model() -> Model:
    torch.manual_seed(7)
    model = Model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def wrap(model: Model, mesh: Any, columns: bool) -> nn.Module:
    """Checkpointed blocks, sharded by rows, or down-projections by columns."""
    place = (
        (lambda parameter: Shard(1) if parameter.ndim == 2 and parameter.shape[1] > SIZE else None) if columns else None
    )
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(checkpoint_wrapper(block), mesh=mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh)


def require_arrived(store: WeightStore, manifest: Manifest, version: int, expected: dict[str, torch.Tensor]) -> None:
    with WeightSubscriber(store, manifest, "test").pull(version, 5.0) as pulled:
        assert pulled.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(pulled.tensors[name], tensor), name
        flat = np.zeros(manifest.total_bytes, dtype=np.uint8)
        for spec in manifest.tensors:
            flat[spec.offset : spec.offset + spec.nbytes] = (
                pulled.tensors[spec.name].contiguous().view(-1).view(torch.uint8).numpy()
            )
    for dim in (0, 1):
        boxes = {
            n: dim_slice(t.shape, dim, t.shape[dim] // 3, t.shape[dim]) for n, t in expected.items() if t.ndim > dim
        }
        target = Manifest.of((n, "float32", [b - a for a, b in box]) for n, box in boxes.items())
        copies, _ = pull_plan(manifest, target, [Part(n, n, box) for n, box in boxes.items()])
        into = np.zeros(target.total_bytes, dtype=np.uint8)
        apply(copies, flat, into)
        for spec in target.tensors:
            found = into[spec.offset : spec.offset + spec.nbytes].view(np.float32).reshape(spec.shape)
            wanted = expected[spec.name][tuple(slice(*interval) for interval in boxes[spec.name])]
            assert np.array_equal(found, wanted.numpy()), (spec.name, dim)


def push(rank: int, world_size: int, port: int, segment: Segment) -> None:
    ranks = Ranks.join(rank, world_size, device_type="cpu", master_addr="127.0.0.1", master_port=port, timeout_s=60)
    expected = {name: parameter.detach().clone() for name, parameter in random_model().named_parameters()}
    manifest = describe(random_model().state_dict().items())
    assert manifest.tied == (("head.weight", "embed.weight"),)
    shape = {2: (2,), 4: (2, 2)}[world_size]
    hsdp = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    layouts = [(ranks.mesh, False), (ranks.mesh, True), (hsdp, False)]
    for version, (mesh, columns) in enumerate(layouts):
        model = wrap(random_model(), mesh, columns)
        if ranks.first and version == 0:
            WeightStore.format(segment, manifest.total_bytes)
        ranks.sum([0.0])
        store = WeightStore.open(segment)
        assert describe(model.named_parameters(remove_duplicate=False)) == manifest
        publisher = WeightPublisher(store, manifest)
        publisher.shard(model.named_parameters(remove_duplicate=False), rank, world_size)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        slot = publisher.push(ranks, 0, version, model.named_parameters(remove_duplicate=False))
        if ranks.first:
            store.commit(0, version, slot)
            require_arrived(store, manifest, version, expected)
    if world_size == 4:  # tensor parallel in a data-parallel mesh, by hand
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placed = {
            name: distribute_tensor(tensor, mesh, [Shard(0), Shard(tensor.ndim - 1)])
            for name, tensor in expected.items()
        }
        publisher.shard(placed.items(), rank, world_size)
        slot = publisher.push(ranks, 0, len(layouts), placed.items())
        if ranks.first:
            store.commit(0, len(layouts), slot)
            require_arrived(store, manifest, len(layouts), expected)
    assert {canonical_name(name) for name, _ in model.named_parameters()} == set(expected)
    ranks.leave()


def run_ranks(world_size: int) -> int:
    """The number of ranks that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    segment = Segment.create("weights", WeightStore.required_bytes(1 << 20))
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                push(rank, world_size, port, segment)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_ranks(2) or run_ranks(4))
