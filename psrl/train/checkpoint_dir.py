"""The folder of checkpoints: which are complete, which is the newest, which may go. No torch, so launchers use it too.

    checkpoints/
      global_step_N/                    appears whole, by one rename
        manifest.json                   what it holds, with the size and SHA-256 of every file
        control.msgpack                 the control side's state, opaque here
        shard_R_of_W.safetensors        rank R's rows of weights and optimizer moments
        huggingface/                    the policy for AutoModelForCausalLM
      .tmp-global_step_N                a save in progress, or one that was killed: never loaded, the next save drops it
      latest_checkpointed_iteration.txt N of the newest, for people and other tools; nothing here relies on it

Newest is the one written last, not the one with the highest step: `sequence` counts saves in the folder. So neither the
leftovers of another run nor later steps that a resume went back behind are taken for it.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from psrl.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

FORMAT = 1
_PREFIX = "global_step_"
_ASIDE = ".tmp-"
_REPLACED = f"{_ASIDE}replaced-"
_TORN = "TORN"
_POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
CONTROL = "control.msgpack"
HUGGINGFACE = "huggingface"


class FileEntry(msgspec.Struct, frozen=True):
    name: str  # relative to the checkpoint
    nbytes: int
    sha256: str


class TensorEntry(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. `step` updates were done; the weights are those of version `step`."""

    format: int = FORMAT
    run_id: str  # of the line of runs that resumed from each other
    sequence: int  # of saves in this folder, from 1
    step: int
    world_size: int
    num_skipped: int  # skipped updates so far
    tensors: dict[str, TensorEntry]  # by name in the shards; each is cut along dimension 0
    files: tuple[FileEntry, ...]


class Checkpoint:
    """A complete checkpoint on disk. `open` checks the sizes of its files, `verify` their checksums."""

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self.path, self.manifest = path, manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @staticmethod
    def open(path: Path) -> "Checkpoint":
        """Raises CheckpointError, naming the file, when something is missing or has another size."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is not there: a checkpoint is a folder like checkpoints/global_step_20")
        try:
            manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
        if manifest.format != FORMAT:
            raise CheckpointError(f"{path} has format {manifest.format}, this version reads {FORMAT}")
        for entry in manifest.files:
            file = path / entry.name
            try:
                size = file.stat().st_size
            except OSError:  # also: removed in this moment, by the run that it belongs to
                size = None
            if size != entry.nbytes:
                raise CheckpointError(f"{file} should have {entry.nbytes} bytes, it has {size or 'none'}")
        return Checkpoint(path, manifest)

    def verify(self) -> None:
        """Read every file and compare checksums. Raises CheckpointError."""
        for entry in self.manifest.files:
            if file_entry(self.path, entry.name).sha256 != entry.sha256:
                raise CheckpointError(f"{self.path / entry.name} is not what was written: its checksum differs")

    def control_state(self) -> bytes:
        return (self.path / CONTROL).read_bytes()


def file_entry(folder: Path, name: str) -> FileEntry:
    """Size and checksum of a file as it is on disk."""
    with (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(name, file.tell(), digest)


class CheckpointDir:
    """The folder `root`, which need not exist yet. One process (the trainer's rank 0) writes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def aside(self, step: int) -> Path:
        return self.root / f"{_ASIDE}{_PREFIX}{step}"

    def complete(self) -> list[Checkpoint]:
        """All checkpoints whose files are there, newest first; their bytes are not read."""
        found = []
        for path in self._folders():
            try:
                found.append(Checkpoint.open(path))
            except CheckpointError:
                continue
        return sorted(found, key=lambda checkpoint: -checkpoint.manifest.sequence)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold; None if there is no checkpoint at all.

        Bad ones on the way are named in the log, and get a file TORN that says why. Raises CheckpointError, with the
        reason for each, when checkpoints are there and none is whole.
        """
        self._recover()
        bad: dict[Path, str] = {}
        for path in self._folders():
            try:
                Checkpoint.open(path)
            except CheckpointError as error:
                bad[path] = str(error)
        found = None
        for checkpoint in self.complete():
            try:
                checkpoint.verify()
            except CheckpointError as error:
                bad[checkpoint.path] = str(error)
            else:
                found = checkpoint
                break
        for path, reason in bad.items():
            _mark(path, reason)
        if bad and found is None:
            raise CheckpointError(f"no checkpoint in {self.root} is whole: {'; '.join(bad.values())}")
        for path, reason in bad.items():
            logger.warning("checkpoint %s is passed over: %s", path.name, reason)
        return found

    def begin(self, step: int, nbytes: int) -> Path:
        """An empty folder for a save of `nbytes`. What killed saves left is removed first.

        Raises CheckpointError if there is not room for it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._recover()
        for leftover in self.root.glob(f"{_ASIDE}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        free = shutil.disk_usage(self.root).free
        if free < nbytes:
            raise CheckpointError(
                f"step {step} needs {nbytes / 2**20:.1f} MiB, {self.root} has {free / 2**20:.1f} MiB free"
            )
        aside = self.aside(step)
        aside.mkdir()
        return aside

    def next_sequence(self) -> int:
        return max((checkpoint.manifest.sequence for checkpoint in self.complete()), default=0) + 1

    def commit(self, aside: Path, manifest: CheckpointManifest) -> Path:
        """Write the manifest and let the checkpoint appear. Files of `aside` must be synced already."""
        _write_synced(aside / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        for folder in (aside / HUGGINGFACE, aside):
            if folder.is_dir():
                sync(folder)
        final = self.root / f"{_PREFIX}{manifest.step}"
        if final.exists():  # saved before a resume went back behind it, or torn
            replaced = self.root / f"{_REPLACED}{final.name}"
            final.rename(replaced)
            aside.rename(final)
            shutil.rmtree(replaced)
        else:
            aside.rename(final)
        sync(self.root)
        pointer = self.root / f"{_ASIDE}pointer"
        _write_synced(pointer, f"{manifest.step}\n".encode())
        pointer.replace(self.root / _POINTER)
        sync(self.root)
        return final

    def retain(self, num_kept: int, newest: Path, run_id: str) -> list[Path]:
        """Delete this line of runs' checkpoints but the last `num_kept` written; returns what went.

        `newest` always stays, and so do folders of other runs or with damage.
        """
        ours = [checkpoint.path for checkpoint in self.complete() if checkpoint.manifest.run_id == run_id]
        gone = [path for path in ours[max(num_kept, 1) :] if path != newest]
        for path in gone:
            # Renamed first: a kill in the middle of the deletion must not leave half a checkpoint under its name.
            doomed = self.root / f"{_ASIDE}old-{path.name}"
            path.rename(doomed)
            shutil.rmtree(doomed)
        return gone

    def _recover(self) -> None:
        """Put back what a commit, killed between its two renames, had moved out of the way."""
        for replaced in self.root.glob(f"{_REPLACED}*"):
            final = self.root / replaced.name.removeprefix(_REPLACED)
            if not final.exists():
                replaced.rename(final)

    def _folders(self) -> Sequence[Path]:
        if not self.root.is_dir():
            return []
        return [path for path in sorted(self.root.glob(f"{_PREFIX}*")) if path.is_dir()]


def resume_point(root: Path, mode: str, path: str | None) -> Checkpoint | None:
    """Where a run starts from: None for the base model.

    `auto`: the newest whole checkpoint under `root`, if there are any; `disable`: none; `resume_path`: the folder
    `path`, verified. Raises ConfigError for another mode, a path that is no good checkpoint, or when none is whole of
    those that `auto` finds: starting from nothing is for the user to decide.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        try:
            return CheckpointDir(root).newest()
        except CheckpointError as error:
            raise ConfigError(f"{error}; trainer.resume_mode=disable starts anew, and keeps them aside") from error
    if mode != "resume_path":
        raise ConfigError(f"trainer.resume_mode={mode!r} is not one of auto, disable, resume_path")
    if not path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
    try:
        checkpoint = Checkpoint.open(Path(path))
        checkpoint.verify()
    except CheckpointError as error:
        raise ConfigError(f"trainer.resume_from_path={path}: {error}") from error
    return checkpoint


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    sync(path)


def _mark(path: Path, reason: str) -> None:
    try:
        (path / _TORN).write_text(reason + "\n")
    except OSError:
        pass  # a mark for people; the folder is passed by without it too
