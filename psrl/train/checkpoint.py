"""Save and load what training needs to go on: weights, optimizer, random state, control state.

Each rank writes its own rows of every tensor to one safetensors file; rank 0 adds the control state, the Hugging Face
export and the manifest. All of it goes to a folder aside that is renamed when every rank has succeeded. A failure on
any rank is raised on all of them as CheckpointError, and the folder is removed; no rank waits for one that failed.
Loading works on any number of ranks.
"""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from psrl.errors import CheckpointError
from psrl.train.checkpoint_dir import (
    CONTROL,
    HUGGINGFACE,
    MANIFEST,
    Checkpoint,
    CheckpointDir,
    CheckpointManifest,
    FileEntry,
    TensorEntry,
    file_entry,
    sync,
)
from psrl.train.export import export_model
from psrl.train.fsdp import local, whole_weights
from psrl.train.learner import Learner
from psrl.train.ranks import Ranks

_RNG = "rng"
_MARGIN_BYTES = 1 << 20


def row_range(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows of dimension 0 that `rank` holds: FSDP2's division, the last ranks may have fewer or none."""
    size = -(-num_rows // world_size)
    return min(rank * size, num_rows), min((rank + 1) * size, num_rows)


class Checkpointer:
    """Writes checkpoints of `learner` to `root`. Collective: all ranks call `save` with the same arguments."""

    def __init__(
        self,
        root: Path,
        learner: Learner,
        *,
        base_model: str | Path,
        run_id: str,
        num_kept: int | None,
        dtype: torch.dtype,
    ) -> None:
        if num_kept is not None and num_kept < 1:
            raise CheckpointError(f"trainer.max_actor_ckpt_to_keep={num_kept} would keep no checkpoint at all")
        self._dir = CheckpointDir(root)
        self._learner, self._ranks = learner, learner.ranks
        self._base_model, self._run_id, self._num_kept, self._dtype = Path(base_model), run_id, num_kept, dtype

    def save(self, step: int, control_state: bytes) -> Path:
        """Write `global_step_<step>` and drop what retention says; the folder. `control_state` matters on rank 0.

        Raises CheckpointError on all ranks if any failed; what was there before stands.
        """
        tensors = named_tensors(self._learner)
        needed = sum(local(tensor).nbytes for tensor in tensors.values()) + len(control_state) + _MARGIN_BYTES
        total = int(self._ranks.sum([needed])[0]) + self._export_bytes()
        aside = self._dir.aside(step)
        final = self._dir.root / f"global_step_{step}"
        with self._phase("prepare", step):
            if self._ranks.first:
                self._dir.begin(step, total)
        try:
            entries = self._write_shard(aside, tensors, step)
            self._write_rest(aside, control_state, step)
            with self._phase("finish", step):
                if self._ranks.first:
                    self._dir.commit(aside, self._manifest(aside, step, tensors, entries))
        except CheckpointError:
            if self._ranks.first:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        with self._phase("drop older checkpoints after", step):
            if self._ranks.first and self._num_kept is not None:
                self._dir.retain(self._num_kept, final, self._run_id)
        return final

    def _export_bytes(self) -> int:
        return sum(weight.numel() for _, weight in self._learner.model.weights()) * self._dtype.itemsize

    @contextlib.contextmanager
    def _phase(self, doing: str, step: int) -> Iterator[None]:
        """Run a part on this rank, then agree with the others on whether it went well everywhere."""
        problem = ""
        try:
            yield
        except (OSError, SafetensorError, CheckpointError) as error:
            problem = str(error) or type(error).__name__
        problems = self._ranks.problems(problem)
        if problems:
            raise CheckpointError(f"could not {doing} the checkpoint of step {step}: {'; '.join(problems)}")

    def _write_shard(self, aside: Path, tensors: dict[str, Tensor], step: int) -> list[FileEntry]:
        """This rank's file; the entries of all ranks' files."""
        rank = self._ranks.rank
        name = shard_name(rank, self._ranks.world_size)
        mine = b""
        with self._phase("write the shards of", step):
            parts = {
                key: local(tensor).cpu().contiguous() for key, tensor in tensors.items() if tensor.dim() or rank == 0
            }
            save_file(
                parts | {f"{_RNG}/{kind}": state for kind, state in _rng_state(self._ranks).items()}, aside / name
            )
            sync(aside / name)
            mine = msgspec.msgpack.encode(file_entry(aside, name))
        return [msgspec.msgpack.decode(entry, type=FileEntry) for entry in self._ranks.gather(mine)]

    def _write_rest(self, aside: Path, control_state: bytes, step: int) -> None:
        # Gathering is collective, so it comes before anything that can fail on rank 0 alone.
        weights = {
            name: weight for name, weight in whole_weights(self._learner.model, self._dtype) if self._ranks.first
        }
        with self._phase("write the model of", step):
            if self._ranks.first:
                (aside / CONTROL).write_bytes(control_state)
                export_model(self._base_model, aside / HUGGINGFACE, weights)
                for file in _files(aside):
                    sync(file)

    def _manifest(
        self, aside: Path, step: int, tensors: dict[str, Tensor], shards: Iterable[FileEntry]
    ) -> CheckpointManifest:
        known = {entry.name: entry for entry in shards}
        names = sorted(str(file.relative_to(aside)) for file in _files(aside))
        return CheckpointManifest(
            run_id=self._run_id,
            sequence=self._dir.next_sequence(),
            step=step,
            world_size=self._ranks.world_size,
            num_skipped=self._learner.optimizer.num_skipped,
            tensors={
                key: TensorEntry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for key, tensor in tensors.items()
            },
            files=tuple(known.get(name) or file_entry(aside, name) for name in names if name != MANIFEST),
        )


def load(checkpoint: Checkpoint, learner: Learner) -> None:
    """Fill weights, optimizer and (for a rank that was there) random state from a checkpoint of any world size.

    Raises CheckpointError, on all ranks, when its tensors are not those of the model.
    """
    ranks, manifest = learner.ranks, checkpoint.manifest
    has_moments = any(name.startswith("exp_avg/") for name in manifest.tensors)
    if has_moments:
        learner.optimizer.make_state()
    problem = ""
    try:
        tensors = named_tensors(learner)
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        saved = {name: entry.shape for name, entry in manifest.tensors.items()}
        if expected != saved:
            differing = sorted(n for n in expected.keys() | saved.keys() if expected.get(n) != saved.get(n))
            raise CheckpointError(f"{checkpoint.path} is of another model: {', '.join(differing[:5])} differ")
        _read(checkpoint, tensors, ranks)
        _restore_rng(checkpoint, ranks)
    except (OSError, SafetensorError, CheckpointError) as error:
        problem = str(error)
    problems = ranks.problems(problem)
    if problems:
        raise CheckpointError("; ".join(problems))
    learner.optimizer.num_skipped = manifest.num_skipped


def named_tensors(learner: Learner) -> dict[str, Tensor]:
    """All tensors of a checkpoint by `kind/weight name`, sharded as they are in memory."""
    weights: dict[str, Tensor] = {f"model/{name}": weight.detach() for name, weight in learner.model.weights()}
    return weights | learner.optimizer.state()


def shard_name(rank: int, world_size: int) -> str:
    return f"shard_{rank:05d}_of_{world_size:05d}.safetensors"


def _read(checkpoint: Checkpoint, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Copy this rank's rows from the files that hold them."""
    saved_world = checkpoint.manifest.world_size
    for source in range(saved_world):
        with safe_open(checkpoint.path / shard_name(source, saved_world), "pt") as file:
            for name, tensor in tensors.items():
                here = local(tensor)
                if tensor.dim() == 0:
                    if source == 0:
                        here.copy_(file.get_tensor(name))
                    continue
                num_rows = tensor.shape[0]
                start, stop = row_range(num_rows, ranks.rank, ranks.world_size)
                first, last = row_range(num_rows, source, saved_world)
                low, high = max(start, first), min(stop, last)
                if low < high:
                    here[low - start : high - start].copy_(file.get_slice(name)[low - first : high - first])


def _rng_state(ranks: Ranks) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states


def _restore_rng(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """A rank that did not exist at the save keeps the random state of its seed."""
    if ranks.rank >= checkpoint.manifest.world_size:
        return
    with safe_open(checkpoint.path / shard_name(ranks.rank, checkpoint.manifest.world_size), "pt") as file:
        names = set(file.keys())
        torch.set_rng_state(file.get_tensor(f"{_RNG}/cpu"))
        if ranks.device.type == "cuda" and f"{_RNG}/cuda" in names:
            torch.cuda.set_rng_state(file.get_tensor(f"{_RNG}/cuda"), ranks.device)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
