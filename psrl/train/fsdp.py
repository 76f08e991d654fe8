"""FSDP2: shard a packed model over the ranks, and get whole tensors back.

Each layer is a unit, the rest (embedding, norm, head) is the root. Masters and gradients are float32; compute is bf16
on GPU and float32 on CPU unless asked otherwise. Gradients are averaged over ranks. Checkpointed layers are
checkpointed inside their unit. Parameter names don't change.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from psrl.config.schema import FsdpConfig
from psrl.errors import ConfigError
from psrl.train.model import PackedLM
from psrl.train.ranks import Ranks


def compute_dtype(config: FsdpConfig, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward. Raises ConfigError for an unknown name."""
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtypes = {"auto": auto, "fp32": torch.float32, "bf16": torch.bfloat16}
    if config.mixed_precision not in dtypes:
        raise ConfigError(f"fsdp_config.mixed_precision={config.mixed_precision!r} is not one of {', '.join(dtypes)}")
    return dtypes[config.mixed_precision]


def shard(model: PackedLM, ranks: Ranks, config: FsdpConfig) -> None:
    """Move the model to this rank's device and shard it in place. Without a process group it stays whole."""
    if ranks.device.type == "cuda" and config.optimizer_offload and not config.param_offload:
        raise ConfigError("fsdp_config.optimizer_offload without param_offload is not built yet; set both or neither")
    dtype = compute_dtype(config, ranks.device)
    if ranks.mesh is None:
        if dtype != torch.float32:
            raise ConfigError("a model that is not sharded trains in fp32 alone; set fsdp_config.mixed_precision=fp32")
        model.to(ranks.device)
        return
    model.to(ranks.device)
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offloads = config.param_offload and ranks.device.type == "cuda"
    offload: OffloadPolicy = CPUOffloadPolicy() if offloads else OffloadPolicy()
    for layer in model.layers():
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=ranks.mesh, mp_policy=precision, offload_policy=offload)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, detached. Collective: all ranks call it for the same tensors in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; shares memory with it."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_weights(model: PackedLM, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each weight, on the CPU, in `dtype`, one at a time."""
    for name, weight in model.weights():
        yield name, local(weight).to(device="cpu", dtype=dtype)


def whole_weights(model: PackedLM, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each weight whole, on the CPU, in `dtype`, one at a time. Collective: every rank runs it to the end."""
    for name, weight in model.weights():
        yield name, whole(weight).to(device="cpu", dtype=dtype)
