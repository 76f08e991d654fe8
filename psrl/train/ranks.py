"""The trainer's processes as one group: who I am, and what we say to each other besides gradients.

Collectives of tensors on the device go through FSDP2; what is here are small host-side exchanges over gloo: bytes
(msgpack, never pickle), sums, and agreement about errors. Every collective has the group's deadline, and a rank whose
process ends breaks the connections of the others, so nobody waits for a dead rank.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Ranks:
    """This process among `world_size`. `alone` makes one without a process group, which cannot be sharded over."""

    def __init__(self, rank: int, world_size: int, device: torch.device, mesh: DeviceMesh | None) -> None:
        self.rank, self.world_size, self.device, self.mesh = rank, world_size, device, mesh
        self._talks = mesh is not None and world_size > 1

    @staticmethod
    def alone(device: torch.device | None = None) -> "Ranks":
        return Ranks(0, 1, device or torch.device("cpu"), None)

    @staticmethod
    def from_environment(device_type: str, timeout_s: float) -> "Ranks":
        """Join as torch.distributed's environment says: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        environment = os.environ
        return Ranks.join(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            device_type=device_type,
            master_addr=environment["MASTER_ADDR"],
            master_port=int(environment["MASTER_PORT"]),
            timeout_s=timeout_s,
        )

    @staticmethod
    def join(
        rank: int, world_size: int, *, device_type: str, master_addr: str, master_port: int, timeout_s: float = 300.0
    ) -> "Ranks":
        """Join the process group. `timeout_s` bounds every collective: a hang of a live rank ends the run by name."""
        device = torch.device(device_type, rank % torch.cuda.device_count()) if device_type == "cuda" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
        return Ranks(rank, world_size, device or torch.device("cpu"), mesh)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def leave(self) -> None:
        """Close the group after a normal end. After an error just end the process: that is what frees the others."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others pass None."""
        if not self._talks:
            assert payload is not None
            return payload
        size = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64)
        dist.broadcast(size, 0)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if payload:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes on every rank, by rank."""
        if not self._talks:
            return [payload]
        sizes = self.sum_tensor(
            torch.tensor([len(payload) if r == self.rank else 0 for r in range(self.world_size)], dtype=torch.int64)
        )
        widest = max(int(sizes.max().item()), 1)
        mine = torch.zeros(widest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.empty(widest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes)]

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks of a host tensor (in place)."""
        if self._talks:
            dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def max_tensor(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks of a host tensor (in place)."""
        if self._talks:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sums over ranks."""
        return self.sum_tensor(torch.tensor(list(values), dtype=torch.float64)).tolist()

    def problems(self, problem: str) -> list[str]:
        """What went wrong on each rank that says so, on every rank."""
        texts = [text.decode() for text in self.gather(problem.encode())]
        return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
