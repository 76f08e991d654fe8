"""One run at a time in a run directory. The kernel lets go of the lock when its holder ends, however it ends."""

import fcntl
import os
from pathlib import Path
from typing import Self

from psrl.errors import ConfigError

_NAME = ".lock"


class RunLock:
    """Holds `run_dir` for this process, as a context manager or from construction until `release`."""

    def __init__(self, run_dir: Path) -> None:
        """Make the directory if need be. Raises ConfigError naming the process that holds it."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(run_dir / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError(holder_problem(run_dir) or f"{run_dir} is in use by another run") from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, str(os.getpid()).encode())

    def release(self) -> None:
        """Idempotent. The file stays: removing it would let two holders think that they are alone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def holder_problem(run_dir: Path) -> str | None:
    """Who holds the directory, in a sentence, or None. Changes nothing."""
    try:
        fd = os.open(run_dir / _NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 20).decode("ascii", "replace").strip()
        return (
            f"trainer.default_local_dir={run_dir} is in use by another run{f' (pid {pid})' if pid else ''}; "
            "end that one or choose another directory"
        )
    finally:
        os.close(fd)
    return None
