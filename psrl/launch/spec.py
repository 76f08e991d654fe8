"""What every process of a run is told at its start: one msgpack file, written by the launcher, read by each child."""

from pathlib import Path

import msgspec

from psrl.config.schema import Config
from psrl.types import Epoch, Version

CHECKPOINTS = "checkpoints"


def is_own_checkpoint(checkpoint: Path, run_dir: Path) -> bool:
    """Whether the checkpoint is one of this run directory, whose record then has what led to it."""
    return checkpoint.resolve().parent == (run_dir / CHECKPOINTS).resolve()


class RunSpec(msgspec.Struct, frozen=True):
    """Everything that is decided before the first process starts."""

    config: Config
    run_dir: str
    socket_dir: str  # short and private: Unix socket paths are limited to 107 bytes
    attempt: int  # starts of this run directory before this one
    epoch: Epoch
    initial_version: Version  # of the weights that training starts from: 0, or the checkpoint's
    resume_from: str | None  # a checkpoint folder
    total_steps: int  # of the run, whatever was done before
    manifest: bytes  # of the published weights (`psrl.weights.manifest.Manifest`)
    device: str  # cpu or cuda
    master_port: int  # of torch.distributed

    @property
    def segments_socket(self) -> str:
        return str(Path(self.socket_dir) / "segments.sock")

    def socket_of(self, process: str) -> str:
        """Where the actor runtime of a process listens."""
        return str(Path(self.socket_dir) / f"{process}.sock")

    @property
    def head_socket(self) -> str:
        return self.socket_of(HEAD)

    @property
    def replicas(self) -> list[str]:
        return [f"replica-{index}" for index in range(self.config.psrl.deployment.n_rollout_instances)]

    @property
    def agents(self) -> list[str]:
        return [f"agent-{index}" for index in range(self.config.gen_actor_rollout_ref.rollout.agent.num_workers)]

    @property
    def rewards(self) -> list[str]:
        return [f"reward-{index}" for index in range(self.config.reward.reward_loop_worker.num_workers)]

    @property
    def trainers(self) -> list[str]:
        return [f"trainer-{rank}" for rank in range(self.config.psrl.deployment.train_ngpus_per_node)]

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.msgpack.encode(self))

    @staticmethod
    def read(path: Path) -> "RunSpec":
        return msgspec.msgpack.decode(path.read_bytes(), type=RunSpec)


HEAD = "head"
